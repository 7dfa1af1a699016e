// Derivatives and vmap of the primitives, by MLX's own operations.
#include <cmath>
#include <numbers>

#include "csrc/cpu/layers/layer_primitives.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"

namespace mlx_paged {

namespace {

Arrays chosen(const Arrays& arrays, const std::vector<int>& argnums) {
  Arrays some;
  for (const int i : argnums) {
    some.push_back(arrays[i]);
  }
  return some;
}

}  // namespace

LayerPrimitive::Function LayerPrimitive::function_of(const std::vector<int>& argnums,
                                                     const Arrays& inputs) {
  return [this, argnums, inputs](const Arrays& some) {
    Arrays all = inputs;
    for (size_t i = 0; i < argnums.size(); ++i) {
      all[argnums[i]] = some[i];
    }
    return Arrays{composed(all)};
  };
}

Arrays LayerPrimitive::jvp(const Arrays& primals, const Arrays& tangents,
                           const std::vector<int>& argnums) {
  return mx::jvp(function_of(argnums, primals), chosen(primals, argnums), tangents).second;
}

Arrays LayerPrimitive::vjp(const Arrays& primals, const Arrays& cotangents,
                           const std::vector<int>& argnums, const Arrays&) {
  return mx::vjp(function_of(argnums, primals), chosen(primals, argnums), cotangents).second;
}

std::pair<Arrays, std::vector<int>> LayerPrimitive::vmap(const Arrays& inputs,
                                                         const std::vector<int>& axes) {
  const Function function = [this](const Arrays& all) { return Arrays{composed(all)}; };
  return {mx::vmap(function, axes, {0})(inputs), {0}};
}

mx::array RmsNorm::composed(const Arrays& inputs) {
  const OptionalArray weight = inputs.size() > 1 ? OptionalArray(inputs[1]) : OptionalArray();
  return mx::fast::rms_norm(inputs[0], weight, eps_, stream());
}

mx::array Rope::composed(const Arrays& inputs) {
  return mx::fast::rope(inputs[0], 2 * inputs[2].shape(0), traditional_, std::nullopt, scale_,
                        inputs[1], mx::reciprocal(inputs[2], stream()), stream());
}

mx::array Activate::composed(const Arrays& inputs) {
  const mx::Stream s = stream();
  const mx::array& x = inputs[0];
  const auto number = [&](double value) { return mx::array(value, x.dtype()); };
  mx::array gate = mx::sigmoid(x, s);
  if (activation_ == cpu::Activation::kGeluApprox) {
    const mx::array cube = mx::multiply(number(0.044715), mx::power(x, number(3), s), s);
    const mx::array inner =
        mx::multiply(number(std::sqrt(2 * std::numbers::inv_pi)), mx::add(x, cube, s), s);
    gate = mx::multiply(number(0.5), mx::add(number(1), mx::tanh(inner, s), s), s);
  }
  const mx::array active = mx::multiply(x, gate, s);
  return inputs.size() > 1 ? mx::multiply(active, inputs[1], s) : active;
}

mx::array LogSumExp::composed(const Arrays& inputs) {
  return mx::logsumexp(inputs[0], -1, true, stream());
}

}  // namespace mlx_paged

#include "csrc/cpu/layers/layer_ops.h"

#include <cmath>
#include <memory>

#include "csrc/cpu/layers/layer_primitives.h"
#include "csrc/validate.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

template <typename Primitive, typename... Config>
mx::array make(Arrays inputs, mx::StreamOrDevice stream, Config... config) {
  auto primitive = std::make_shared<Primitive>(mx::to_stream(stream), config...);
  const mx::Shape shape = primitive->output_shapes(inputs)[0];
  const mx::Dtype dtype = inputs[0].dtype();
  return mx::array(shape, dtype, std::move(primitive), std::move(inputs));
}

}  // namespace

mx::array rms_norm(const mx::array& x, const OptionalArray& weight, float eps,
                   mx::StreamOrDevice stream) {
  check_floating("rms_norm", "x", x);
  require(x.ndim() >= 1, "rms_norm", "x is a scalar: expected at least one axis");
  Arrays inputs = {x};
  if (weight) {
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1), "rms_norm", "weight has ",
            weight->size(), " elements in ", weight->ndim(), " axes: expected x's last axis, ",
            x.shape(-1));
    require(weight->dtype() == x.dtype(), "rms_norm", "weight has dtype ", weight->dtype(),
            " but x has ", x.dtype(), ": expected the same");
    inputs.push_back(*weight);
  }
  return make<RmsNorm>(std::move(inputs), stream, eps);
}

mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& frequencies,
               float scale, bool traditional, mx::StreamOrDevice stream) {
  check_floating("rope", "x", x);
  require(x.ndim() == 3 || x.ndim() == 4, "rope", "x has ", x.ndim(), " axes: expected 3 or 4");
  require(frequencies.ndim() == 1 && frequencies.dtype() == mx::float32, "rope",
          "frequencies has dtype ", frequencies.dtype(), " and ", frequencies.ndim(),
          " axes: expected float32 and one");
  require(frequencies.size() > 0 && 2 * frequencies.shape(0) <= x.shape(-1), "rope",
          "frequencies has ", frequencies.size(),
          " elements: expected 1 to half of x's last axis, ", x.shape(-1) / 2);
  require(mx::issubdtype(offset.dtype(), mx::integer), "rope", "offset has dtype ", offset.dtype(),
          ": expected integers");
  require(offset.ndim() <= 1 && (offset.size() == 1 || offset.shape(0) == x.shape(0)), "rope",
          "offset has ", offset.size(), " elements in ", offset.ndim(),
          " axes: expected one, or one for each of ", x.shape(0), " sequences");
  const mx::array offsets = mx::astype(offset, mx::int32, stream);
  return make<Rope>({x, offsets, frequencies}, stream, scale, traditional);
}

mx::array rope_frequencies(int dims, float base, mx::StreamOrDevice stream) {
  require(dims > 0 && dims % 2 == 0, "rope_frequencies", "dims is ", dims,
          ": expected a positive even number");
  const int pairs = dims / 2;
  const mx::array exponents = mx::arange(0, -pairs, -1, mx::float32, stream);
  const mx::array step(std::log(base) / static_cast<float>(pairs), mx::float32);
  return mx::exp(mx::multiply(exponents, step, stream), stream);
}

mx::array activate(const mx::array& x, const OptionalArray& factor, cpu::Activation activation,
                   mx::StreamOrDevice stream) {
  check_floating("activate", "x", x);
  Arrays inputs = {x};
  if (factor) {
    require(factor->shape() == x.shape() && factor->dtype() == x.dtype(), "activate", "factor has ",
            factor->size(), " elements of ", factor->dtype(), ": expected x's shape and dtype, ",
            x.size(), " elements of ", x.dtype());
    inputs.push_back(*factor);
  }
  return make<Activate>(std::move(inputs), stream, activation);
}

mx::array log_sum_exp(const mx::array& x, mx::StreamOrDevice stream) {
  check_floating("log_sum_exp", "x", x);
  require(x.ndim() >= 1 && x.shape(-1) > 0, "log_sum_exp",
          "x has no elements on its last axis: expected at least one");
  return make<LogSumExp>({x}, stream);
}

}  // namespace mlx_paged

// Primitives of ops that run on CPUs only.
#pragma once

#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "csrc/cpu/task.h"
#include "csrc/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_paged {

// The primitive of an op with kOutputs outputs that runs on CPUs only. Transformations use
// Op::composed, the same results by MLX's own operations: a function that mx.compile traced while a
// model was served may be differentiated later.
template <typename Op, size_t kOutputs>
class ComposedPrimitive : public cpu::TaskPrimitive {
 public:
  ComposedPrimitive(mx::Stream stream, Op op) : cpu::TaskPrimitive(stream), op_(op) {}

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[mlx_paged] this op runs on CPUs only");
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override {
    return mx::jvp(function_of(argnums, primals), chosen(primals, argnums), tangents).second;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays&) override {
    return mx::vjp(function_of(argnums, primals), chosen(primals, argnums), cotangents).second;
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const Function function = [this](const Arrays& all) { return composed(all); };
    const std::vector<int> first(kOutputs, 0);
    return {mx::vmap(function, axes, first)(inputs), first};
  }

  const char* name() const override { return Op::kName; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return op_ == static_cast<const ComposedPrimitive&>(other).op_;
  }

 protected:
  Op op_;

 private:
  using Function = std::function<Arrays(const Arrays&)>;

  Arrays composed(const Arrays& inputs) { return {op_.composed(inputs, stream())}; }

  // `composed` as a function of the inputs `argnums`.
  Function function_of(const std::vector<int>& argnums, const Arrays& inputs) {
    return [this, argnums, inputs](const Arrays& some) {
      Arrays all = inputs;
      for (size_t i = 0; i < argnums.size(); ++i) {
        all[argnums[i]] = some[i];
      }
      return composed(all);
    };
  }

  static Arrays chosen(const Arrays& arrays, const std::vector<int>& argnums) {
    Arrays some;
    for (const int i : argnums) {
      some.push_back(arrays[i]);
    }
    return some;
  }
};

}  // namespace mlx_paged

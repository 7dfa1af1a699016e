// The primitives behind layer_ops.h.
#pragma once

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "csrc/cpu/task.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_paged {

// The primitive of an op that runs on CPUs only and has one output. Transformations use `composed`,
// the same result by MLX's own operations: a function that mx.compile traced while a model was
// served may be differentiated later.
template <typename Op>
class LayerPrimitive : public cpu::TaskPrimitive {
 public:
  LayerPrimitive(mx::Stream stream, Op op) : cpu::TaskPrimitive(stream), op_(op) {}

  // Computes on several threads if that pays.
  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    if constexpr (requires { op_.task(inputs, outputs[0]); }) {
      return op_.task(inputs, outputs[0]);
    } else {
      return task_of_rows(inputs, outputs[0]);
    }
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[mlx_paged.layers] this op runs on CPUs only");
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
    return {mx::vmap(function, axes, {0})(inputs), {0}};
  }

  const char* name() const override { return Op::kName; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return op_ == static_cast<const LayerPrimitive&>(other).op_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {Op::shape(inputs)};
  }

 private:
  using Function = std::function<Arrays(const Arrays&)>;

  auto task_of_rows(const Arrays& inputs, mx::array& out) const {
    // Elements of one task. For fewer elements, waking a thread costs more than it saves.
    constexpr int64_t kElementsOfTask = 1 << 16;
    const int64_t count = Op::count(inputs[0]);
    const int64_t elements_each = inputs[0].size() / std::max<int64_t>(1, count);
    const int64_t range =
        std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, elements_each));
    return [count, range, compute = op_.kernel(inputs, out)] {
      cpu::parallel_for((count + range - 1) / range,
                        [&](int64_t i) { compute(i * range, std::min(count, (i + 1) * range)); });
    };
  }

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

  Op op_;
};

}  // namespace mlx_paged

// The primitives behind layer_ops.h.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "csrc/cpu/composed_primitive.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/ops.h"

namespace mlx_paged {

// The primitive of an op that runs on CPUs only and has one output.
template <typename Op>
class LayerPrimitive : public ComposedPrimitive<Op, 1> {
 public:
  using ComposedPrimitive<Op, 1>::ComposedPrimitive;

  // Computes on several threads if that pays.
  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    if constexpr (requires { this->op_.task(inputs, outputs[0]); }) {
      return this->op_.task(inputs, outputs[0]);
    } else {
      return task_of_rows(inputs, outputs[0]);
    }
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {Op::shape(inputs)};
  }

 private:
  auto task_of_rows(const Arrays& inputs, mx::array& out) const {
    // Elements of one task. For fewer elements, waking a thread costs more than it saves.
    constexpr int64_t kElementsOfTask = 1 << 16;
    const int64_t count = Op::count(inputs[0]);
    const int64_t elements_each = inputs[0].size() / std::max<int64_t>(1, count);
    const int64_t range =
        std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, elements_each));
    return [count, range, compute = this->op_.kernel(inputs, out)] {
      cpu::parallel_for((count + range - 1) / range,
                        [&](int64_t i) { compute(i * range, std::min(count, (i + 1) * range)); });
    };
  }
};

}  // namespace mlx_paged

// Primitives that one task computes on a CPU.
#pragma once

#include <functional>

#include "csrc/cpu/mlx_args.h"
#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged::cpu {

class TaskPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  // Gives the outputs memory. The task computes them later, on the stream's thread, while other
  // code holds the memory of inputs and outputs.
  virtual std::function<void()> task(const Arrays& inputs, Arrays& outputs) = 0;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    encoder_for(stream(), inputs, outputs).dispatch(task(inputs, outputs));
  }
};

}  // namespace mlx_paged::cpu

// The primitives behind layer_ops.h. They run on CPUs only.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "csrc/cpu/layers/layer_ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// Each has one output. It has the shape of the first input, except for LogSumExp. Transformations
// use MLX's own operations: a function that mx.compile traced while a model was served may be
// differentiated later.
class LayerPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const Arrays&, Arrays&) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

 private:
  // The same result by MLX's own operations.
  virtual mx::array composed(const Arrays& inputs) = 0;

  using Function = std::function<Arrays(const Arrays&)>;

  // `composed` as a function of the inputs `argnums`.
  Function function_of(const std::vector<int>& argnums, const Arrays& inputs);
};

// Inputs x and, if there is one, the weight.
class RmsNorm : public LayerPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : LayerPrimitive(stream), eps_(eps) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "PagedRmsNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  mx::array composed(const Arrays& inputs) override;
  float eps_;
};

// Inputs x, offset, frequencies.
class Rope : public LayerPrimitive {
 public:
  Rope(mx::Stream stream, float scale, bool traditional)
      : LayerPrimitive(stream), scale_(scale), traditional_(traditional) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "PagedRope"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  mx::array composed(const Arrays& inputs) override;
  float scale_;
  bool traditional_;
};

// Inputs x and, if there is one, the factor.
class Activate : public LayerPrimitive {
 public:
  Activate(mx::Stream stream, cpu::Activation activation)
      : LayerPrimitive(stream), activation_(activation) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "PagedActivate"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 private:
  mx::array composed(const Arrays& inputs) override;
  cpu::Activation activation_;
};

// Input x; the output has one element on the last axis.
class LogSumExp : public LayerPrimitive {
 public:
  using LayerPrimitive::LayerPrimitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "PagedLogSumExp"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

 private:
  mx::array composed(const Arrays& inputs) override;
};

}  // namespace mlx_paged

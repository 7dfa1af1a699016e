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

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 protected:
  // The same result by MLX's own operations.
  virtual mx::array composed(const std::vector<mx::array>& inputs) = 0;

 private:
  using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

  // `composed` as a function of the inputs `argnums`.
  Function function_of(const std::vector<int>& argnums, const std::vector<mx::array>& inputs);
};

// Inputs x and, if there is one, the weight.
class RmsNorm : public LayerPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : LayerPrimitive(stream), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedRmsNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  mx::array composed(const std::vector<mx::array>& inputs) override;

 private:
  float eps_;
};

// Inputs x, offset, frequencies.
class Rope : public LayerPrimitive {
 public:
  Rope(mx::Stream stream, float scale, bool traditional)
      : LayerPrimitive(stream), scale_(scale), traditional_(traditional) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedRope"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  mx::array composed(const std::vector<mx::array>& inputs) override;

 private:
  float scale_;
  bool traditional_;
};

// Inputs x and, if there is one, the factor.
class Activate : public LayerPrimitive {
 public:
  Activate(mx::Stream stream, cpu::Activation activation)
      : LayerPrimitive(stream), activation_(activation) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedActivate"; }
  bool is_equivalent(const mx::Primitive& other) const override;

 protected:
  mx::array composed(const std::vector<mx::array>& inputs) override;

 private:
  cpu::Activation activation_;
};

// Input x; the output has one element on the last axis.
class LogSumExp : public LayerPrimitive {
 public:
  using LayerPrimitive::LayerPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedLogSumExp"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 protected:
  mx::array composed(const std::vector<mx::array>& inputs) override;
};

}  // namespace mlx_paged

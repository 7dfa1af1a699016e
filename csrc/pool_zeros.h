// The primitive behind pool_zeros.
#pragma once

#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// No inputs.
class PoolZeros : public mx::UnaryPrimitive {
 public:
  explicit PoolZeros(mx::Stream stream) : mx::UnaryPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& out) override;
  const char* name() const override { return "PoolZeros"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

}  // namespace mlx_paged

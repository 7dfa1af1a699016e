// The primitive behind copy_blocks.
#pragma once

#include <vector>

#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// Inputs k_cache, v_cache, block_pairs; outputs the two caches, sharing their buffers.
class CopyBlocks : public mx::Primitive {
 public:
  explicit CopyBlocks(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "CopyBlocks"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
};

}  // namespace mlx_paged

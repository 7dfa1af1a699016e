// The primitive behind write_kv.
#pragma once

#include <vector>

#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// Inputs k, v, k_cache, v_cache, slot_mapping; outputs the two caches, sharing their buffers.
class WriteKV : public mx::Primitive {
 public:
  explicit WriteKV(mx::Stream stream) : mx::Primitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "WriteKV"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
};

}  // namespace mlx_paged

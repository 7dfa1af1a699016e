// Reads of a pool by ops of MLX's own.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// Another primitive, whose first input is memory of a pool. MLX orders its reads before later
// writes only if it knows that the memory is written in place.
class PoolRead : public mx::Primitive {
 public:
  explicit PoolRead(std::shared_ptr<mx::Primitive> read)
      : mx::Primitive(read->stream()), read_(std::move(read)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PoolRead"; }

 private:
  std::shared_ptr<mx::Primitive> read_;
};

}  // namespace mlx_paged

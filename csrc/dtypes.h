// MLX's dtypes as the CPU kernels name them.
#pragma once

#include <stdexcept>

#include "csrc/cpu/attention/attention_args.h"
#include "mlx/dtype.h"

namespace mlx_paged {

inline cpu::DType cpu_dtype(mlx::core::Dtype dtype) {
  switch (dtype) {
    case mlx::core::float32:
      return cpu::DType::kFloat32;
    case mlx::core::float16:
      return cpu::DType::kFloat16;
    case mlx::core::bfloat16:
      return cpu::DType::kBFloat16;
    case mlx::core::bool_:
      return cpu::DType::kBool;
    default:
      throw std::logic_error("[mlx_paged] dtype without a CPU kernel");
  }
}

}  // namespace mlx_paged

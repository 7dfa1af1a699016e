// MLX arrays in the terms of the Metal kernels.
#pragma once

#include <stdexcept>
#include <string>

#include "mlx/array.h"

namespace mlx_paged {

// The element type's name in Metal.
inline std::string metal_type(const mlx::core::array& a) {
  switch (a.dtype()) {
    case mlx::core::float32:
      return "float";
    case mlx::core::float16:
      return "half";
    case mlx::core::bfloat16:
      return "bfloat";
    default:
      throw std::logic_error("no Metal kernel for this dtype");
  }
}

}  // namespace mlx_paged

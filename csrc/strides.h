// Strides of MLX arrays.
#pragma once

#include <cstdint>

#include "mlx/array.h"

namespace mlx_paged {

// Copies the first kCount strides of an array, in elements.
template <size_t kCount>
void copy_strides(const mlx::core::array& a, int64_t (&strides)[kCount]) {
  for (size_t axis = 0; axis < kCount; ++axis) {
    strides[axis] = a.strides(static_cast<int>(axis));
  }
}

}  // namespace mlx_paged

// Strides of MLX arrays as plain numbers.
#pragma once

#include <cstdint>

#include "mlx/array.h"

namespace mlx_paged {

// The first strides of an array in elements, as many as there is room for.
template <size_t kCount>
void copy_strides(const mlx::core::array& a, int64_t (&strides)[kCount]) {
  for (size_t axis = 0; axis < kCount; ++axis) {
    strides[axis] = a.strides(static_cast<int>(axis));
  }
}

}  // namespace mlx_paged

// MLX arrays as the plain views that the pool kernels take.
#pragma once

#include "csrc/cpu/pool_ops.h"
#include "mlx/array.h"

namespace mlx_paged::cpu {

inline PoolView pool_view(mlx::core::array& cache) {
  const auto itemsize = static_cast<int64_t>(cache.itemsize());
  return {cache.data<std::byte>(),
          cache.strides(0) * itemsize,
          cache.strides(1) * itemsize,
          cache.strides(2) * itemsize,
          cache.shape(0),
          cache.shape(1),
          cache.shape(2),
          static_cast<int>(cache.shape(3) * itemsize)};
}

inline RowsView rows_view(const mlx::core::array& rows) {
  const auto itemsize = static_cast<int64_t>(rows.itemsize());
  return {rows.data<std::byte>(),
          rows.strides(0) * itemsize,
          rows.strides(1) * itemsize,
          rows.strides(2) * itemsize,
          rows.shape(0),
          static_cast<int>(itemsize)};
}

inline IndexView index_view(const mlx::core::array& indices) {
  return {indices.data<int32_t>(), indices.strides(0), indices.ndim() > 1 ? indices.strides(1) : 0};
}

}  // namespace mlx_paged::cpu

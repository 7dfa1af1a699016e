// What the Metal kernels take for granted of a pool.
#pragma once

#include <sstream>
#include <stdexcept>

#include "csrc/validate.h"
#include "mlx/array.h"

namespace mlx_paged {

// Neighbouring elements that a lane moves at once.
constexpr int kVector = 4;

// Whether an array of rows begins at a whole vector of its memory, and so does every one of them.
inline bool has_whole_vectors(const mlx::core::array& rows) {
  const int last = static_cast<int>(rows.ndim()) - 1;
  bool is_whole = rows.offset() % static_cast<int64_t>(kVector * rows.itemsize()) == 0;
  is_whole &= rows.shape(last) <= 1 || rows.strides(last) == 1;
  for (int axis = 0; axis < last; ++axis) {
    is_whole &= rows.shape(axis) <= 1 || rows.strides(axis) % kVector == 0;
  }
  return is_whole;
}

// Throws std::runtime_error unless check_pool_layout is content with the pool and it has whole
// vectors.
inline void check_metal_pool(const char* op, const char* argument, const mlx::core::array& pool,
                             bool writable) {
  check_pool_layout(op, argument, pool, writable);
  if (!has_whole_vectors(pool)) {
    std::ostringstream message;
    message << "[" << op << "] " << argument << " begins at element "
            << pool.offset() / static_cast<int64_t>(pool.itemsize())
            << " of its memory, with strides " << pool.strides(0) << ", " << pool.strides(1)
            << " and " << pool.strides(2) << ": expected multiples of " << kVector;
    throw std::runtime_error(message.str());
  }
}

}  // namespace mlx_paged

// MLX arrays for the Metal kernels: the names of their types, and the layouts that kernels need.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

#include "csrc/validate.h"

namespace mlx_paged {

constexpr int kVector = 4;  // neighbouring elements that a lane moves at once

// The element type's name in Metal.
inline std::string metal_type(const mx::array& a) {
  static const std::map<mx::Dtype::Val, const char*> names = {
      {mx::Dtype::Val::float32, "float"},   {mx::Dtype::Val::float16, "half"},
      {mx::Dtype::Val::bfloat16, "bfloat"}, {mx::Dtype::Val::int8, "char"},
      {mx::Dtype::Val::uint8, "uchar"},     {mx::Dtype::Val::uint16, "ushort"}};
  return names.at(a.dtype().val());
}

// A pool's format within the name of a kernel.
inline std::string pool_format(const AttentionInputs& in) {
  if (!in.k_scales) {
    return metal_type(in.k_cache);
  }
  return !is_sixes(in.k_cache) ? "k8v8" : is_pairs(in.v_cache) ? "k6v4" : "k6v6";
}

// Whether every row of an array begins at a multiple of kVector elements of its memory.
inline bool has_whole_vectors(const mx::array& rows) {
  const int last = static_cast<int>(rows.ndim()) - 1;
  bool is_whole = rows.offset() % static_cast<int64_t>(kVector * rows.itemsize()) == 0;
  is_whole &= rows.shape(last) <= 1 || rows.strides(last) == 1;
  for (int axis = 0; axis < last; ++axis) {
    is_whole &= rows.shape(axis) <= 1 || rows.strides(axis) % kVector == 0;
  }
  return is_whole;
}

// Throws unless check_pool_layout accepts the pool and has_whole_vectors is true.
inline void check_metal_pool(const char* op, const char* argument, const mx::array& pool,
                             bool writable) {
  check_pool_layout(op, argument, pool, writable);
  if (!has_whole_vectors(pool)) {
    fail<std::runtime_error>(
        op, argument, " begins at element ", pool.offset() / static_cast<int64_t>(pool.itemsize()),
        " of its memory, with strides ", pool.strides(0), ", ", pool.strides(1), " and ",
        pool.strides(2), ": expected multiples of ", kVector);
  }
}

}  // namespace mlx_paged

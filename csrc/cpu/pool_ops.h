// In-place edits of keys or values [H_kv, N, S, D] of a layer's pool: any layout with dense rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlx_paged::cpu {

// Strides in bytes.
struct PoolView {
  std::byte* data;
  int64_t head_stride;
  int64_t block_stride;
  int64_t token_stride;
  int num_heads;
  int num_blocks;
  int block_size;
  int row_bytes;
};

// Rows [T, H_kv, D] to write; strides in bytes.
struct RowsView {
  const std::byte* data;
  int64_t token_stride;
  int64_t head_stride;
  int64_t element_stride;
  int num_tokens;
  int itemsize;
};

// A vector or matrix of int32; strides in elements.
struct IndexView {
  const int32_t* data;
  int64_t row_stride;
  int64_t column_stride;

  int32_t operator()(int64_t row, int64_t column = 0) const {
    return data[row * row_stride + column * column_stride];
  }
};

// Writes one head's rows to their slots, in order.
void write_head(const PoolView& pool, const RowsView& rows, const IndexView& slots, int head);

// Copies one head's part of each (source, destination) pair, in order.
void copy_head(const PoolView& pool, const IndexView& pairs, int num_pairs, int head);

}  // namespace mlx_paged::cpu

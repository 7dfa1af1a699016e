#include "csrc/cpu/pool_ops.h"

#include <cstring>

namespace mlx_paged::cpu {

namespace {

void copy_row(std::byte* to, const std::byte* from, const RowsView& rows, int row_bytes) {
  if (rows.element_stride == rows.itemsize) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  for (int offset = 0; offset < row_bytes; offset += rows.itemsize) {
    std::memcpy(to + offset, from, rows.itemsize);
    from += rows.element_stride;
  }
}

}  // namespace

void write_head(const PoolView& pool, const RowsView& rows, const IndexView& slots, int head) {
  const int64_t num_slots = int64_t{pool.num_blocks} * pool.block_size;
  std::byte* to = pool.data + head * pool.head_stride;
  const std::byte* from = rows.data + head * rows.head_stride;
  for (int token = 0; token < rows.num_tokens; ++token) {
    const int64_t slot = slots(token);
    if (slot < 0 || slot >= num_slots) {
      continue;
    }
    copy_row(to + slot / pool.block_size * pool.block_stride +
                 slot % pool.block_size * pool.token_stride,
             from + token * rows.token_stride, rows, pool.row_bytes);
  }
}

void copy_head(const PoolView& pool, const IndexView& pairs, int num_pairs, int head) {
  std::byte* blocks = pool.data + head * pool.head_stride;
  const bool dense = pool.token_stride == pool.row_bytes;
  const auto inside = [&](int32_t block) { return block >= 0 && block < pool.num_blocks; };
  for (int i = 0; i < num_pairs; ++i) {
    const int32_t source = pairs(i, 0);
    const int32_t destination = pairs(i, 1);
    if (!inside(source) || !inside(destination) || source == destination) {
      continue;
    }
    const std::byte* from = blocks + source * pool.block_stride;
    std::byte* to = blocks + destination * pool.block_stride;
    if (dense) {
      std::memcpy(to, from, size_t(pool.row_bytes) * pool.block_size);
      continue;
    }
    for (int token = 0; token < pool.block_size; ++token) {
      std::memcpy(to + token * pool.token_stride, from + token * pool.token_stride, pool.row_bytes);
    }
  }
}

}  // namespace mlx_paged::cpu

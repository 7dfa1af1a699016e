// The keys and values of one key tile, found through the block table; see simd.h for the rules of
// inclusion.
#pragma once

#include "csrc/cpu/attention/attention_kernel.h"
#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr int kCacheLine = 64;

// Scores are computed for up to this many keys at once, so that the pointers behind the last key
// up to a multiple of it must be readable.
inline constexpr int kKeyGroup = 16;

// Keys [begin, begin + num_keys) of one sequence and KV head. T is the cache's element type.
template <typename T>
struct KeyTile {
  int32_t begin;
  int32_t num_keys;
  bool is_full;    // no entry points to zeros
  bool has_holes;  // some keys are in blocks outside the pool
  const T* k[kKeyTile];
  const T* v[kKeyTile];
  float hole_bias[kKeyTile];  // -inf for such keys, else 0; unset if there are none
};

// Points keys [first, kKeyTile) to zeros.
template <typename T>
void fill(KeyTile<T>& tile, int32_t first, int32_t end, const T* zeros) {
  for (int32_t i = first; i < end; ++i) {
    tile.k[i] = tile.v[i] = zeros;
  }
}

// The tile at `begin`, limited to keys [key_begin, key_end). Those before key_begin, those in holes
// and the unused entries point to zeros.
template <typename T>
void locate(const AttentionArgs& args, const RowTile& rows, int32_t begin, int32_t key_begin,
            int32_t key_end, const T* zeros, KeyTile<T>& tile) {
  tile.begin = begin;
  tile.num_keys = key_end - begin < kKeyTile ? key_end - begin : kKeyTile;
  tile.is_full = tile.num_keys == kKeyTile && key_begin <= begin;
  tile.has_holes = false;
  const T* k_head = static_cast<const T*>(args.k) + rows.kv_head * args.k_strides[0];
  const T* v_head = static_cast<const T*>(args.v) + rows.kv_head * args.v_strides[0];
  const int64_t k_stride = args.k_strides[2];
  const int64_t v_stride = args.v_strides[2];
  const int32_t* table = args.block_tables + rows.batch * args.block_tables_strides[0];

  int32_t i = key_begin > begin ? key_begin - begin : 0;
  fill(tile, 0, i, zeros);
  while (i < tile.num_keys) {
    const int32_t block = (begin + i) / args.block_size;
    const int32_t offset = begin + i - block * args.block_size;
    const int32_t left = args.block_size - offset;
    const int32_t end = i + left < tile.num_keys ? i + left : tile.num_keys;
    const int32_t id = table[block * args.block_tables_strides[1]];
    if (id < 0 || id >= args.num_blocks) {
      if (!tile.has_holes) {
        tile.has_holes = true;
        tile.is_full = false;
        __builtin_memset(tile.hole_bias, 0, sizeof tile.hole_bias);
      }
      fill(tile, i, end, zeros);
      for (; i < end; ++i) {
        tile.hole_bias[i] = -kInfinity;
      }
      continue;
    }
    const T* k = k_head + id * args.k_strides[1] + offset * args.k_strides[2];
    const T* v = v_head + id * args.v_strides[1] + offset * args.v_strides[2];
    for (; i < end; ++i, k += k_stride, v += v_stride) {
      tile.k[i] = k;
      tile.v[i] = v;
    }
  }
  fill(tile, i, kKeyTile, zeros);
}

// From the tile of one KV head to that of another at the same position, if all its keys are in the
// pool.
template <typename T>
bool move_head(const AttentionArgs& args, int32_t num_heads, const KeyTile<T>& from,
               KeyTile<T>& to) {
  if (!from.is_full) {
    return false;
  }
  to.begin = from.begin;
  to.num_keys = kKeyTile;
  to.is_full = true;
  to.has_holes = false;
  for (int32_t i = 0; i < kKeyTile; ++i) {
    to.k[i] = from.k[i] + num_heads * args.k_strides[0];
    to.v[i] = from.v[i] + num_heads * args.v_strides[0];
  }
  return true;
}

// Asks for a cache line in the second-level cache: a tile and its successor together would evict
// each other from the first level.
//
// Always inlined, as its callers here are: gcc finds a function that does nothing else to have no
// effect, and drops calls of it.
[[gnu::always_inline]] inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 2);
}

// Asks the second-level cache for a line that is about to be used. A load would wait there behind
// the lines that the memory was asked for, and the products behind it.
[[gnu::always_inline]] inline void prefetch_soon(const void* address) {
  __builtin_prefetch(address, 0, 3);
}

// So many keys lie between a value that is used and the one asked for meanwhile: 2 KB of a panel of
// 64 columns.
template <typename T>
inline constexpr int kSoon = 32 / sizeof(T);

template <typename T>
[[gnu::always_inline]] inline void prefetch_rows(const T* const* rows, int32_t count,
                                                 int32_t width) {
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t d = 0; d < width; d += kCacheLine / sizeof(T)) {
      prefetch(rows[i] + d);
    }
  }
}

// Asks for a tile while another is used, a cache line at a time in the order in which they lie in
// memory: the keys, then the values, then the last value over and over. The products ask as often
// as they read lines, evenly, since a burst delays the loads behind it.
template <typename T>
class Ahead {
 public:
  Ahead(const KeyTile<T>& tile, int32_t head_dim, int32_t value_dim)
      : row_(tile.k),
        last_(tile.k + kKeyTile - 1),
        row_bytes_(head_dim * static_cast<int32_t>(sizeof(T))),
        values_(tile.v),
        value_bytes_(value_dim * static_cast<int32_t>(sizeof(T))) {}

  [[gnu::always_inline]] void ask() {
    prefetch(reinterpret_cast<const char*>(*row_) + offset_);
    offset_ += kCacheLine;
    if (offset_ >= row_bytes_) {
      next_row();
    }
  }

  // How many lines to ask for whenever `read` lines of values are read, so that those left last as
  // long as the values.
  int32_t pace(int32_t read) const {
    const int32_t left = static_cast<int32_t>(last_ + 1 - row_) * row_bytes_ +
                         (values_ ? kKeyTile * value_bytes_ : 0);
    const int32_t all = kKeyTile * value_bytes_;
    return left < all ? (read * left + all - 1) / all : read;
  }

 private:
  [[gnu::always_inline]] void next_row() {
    offset_ = 0;
    if (row_ != last_) {
      ++row_;
    } else if (values_) {
      row_ = values_;
      last_ = values_ + kKeyTile - 1;
      row_bytes_ = value_bytes_;
      values_ = nullptr;
    }
  }

  const T* const* row_;
  const T* const* last_;
  int32_t offset_ = 0;
  int32_t row_bytes_;
  const T* const* values_;  // if still to come
  int32_t value_bytes_;
};

struct NothingAhead {
  void ask() {}
};

// Asks for one line of each block that holds keys of the tile at `begin`: the translation of its
// page's address takes longer than the lines that follow.
template <typename T>
[[gnu::always_inline]] inline void prefetch_pages(const AttentionArgs& args, const RowTile& rows,
                                                  int32_t begin, int32_t key_end) {
  const T* k_head = static_cast<const T*>(args.k) + rows.kv_head * args.k_strides[0];
  const T* v_head = static_cast<const T*>(args.v) + rows.kv_head * args.v_strides[0];
  const int32_t* table = args.block_tables + rows.batch * args.block_tables_strides[0];
  const int32_t end = key_end - begin < kKeyTile ? key_end : begin + kKeyTile;
  for (int32_t key = begin; key < end; key += args.block_size) {
    const int32_t id = table[key / args.block_size * args.block_tables_strides[1]];
    if (id >= 0 && id < args.num_blocks) {
      prefetch(k_head + id * args.k_strides[1]);
      prefetch(v_head + id * args.v_strides[1]);
    }
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

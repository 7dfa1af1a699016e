// Finds the keys and values of one key tile through the block table, and prefetches them. See
// simd.h for the rules of inclusion.
#pragma once

#include <type_traits>

#include "csrc/cpu/attention/attention_kernel.h"
#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr int kCacheLine = 64;

// Scores are computed for up to this many keys at once. So the pointers after the last key must be
// readable up to the next multiple.
inline constexpr int kKeyGroup = 16;

// The formats of a pool: T is the type of its elements, or Int8, Int6 or K6V4 for elements with
// scales.
struct K6V4;

template <typename T>
using Key = std::conditional_t<std::is_same_v<T, K6V4>, Int6, T>;
template <typename T>
using Value = std::conditional_t<std::is_same_v<T, K6V4>, Int4Pair, T>;
template <typename T>
inline constexpr bool kScaled = kBits<Key<T>> <= 8;

// Keys [begin, begin + num_keys) of one sequence and KV head, of a pool of format T.
template <typename T>
struct KeyTile {
  int32_t begin;
  int32_t num_keys;
  bool is_full;    // all entries point to keys of the pool
  bool has_holes;  // some keys are in blocks outside the pool
  const Key<T>* k[kKeyTile];
  const Value<T>* v[kKeyTile];
  Float16 k_scales[kScaled<T> ? kKeyTile : 1];
  Float16 v_scales[kScaled<T> ? kKeyTile : 1];  // unless values are pairs
  const Float16* v_groups[kIsPair<Value<T>> ? kKeyTile : 1];
  float hole_bias[kKeyTile];  // -inf for such keys, else 0; unset if there are none
};

template <typename T>
void drop_value(KeyTile<T>& tile, int32_t key, const void* zeros) {
  tile.v[key] = static_cast<const Value<T>*>(zeros);
  if constexpr (kIsPair<Value<T>>) {
    tile.v_groups[key] = static_cast<const Float16*>(zeros);
  } else if constexpr (kScaled<T>) {
    tile.v_scales[key] = {0};
  }
}

// Points keys [first, kKeyTile) to zeros.
template <typename T>
void fill(KeyTile<T>& tile, int32_t first, int32_t end, const void* zeros) {
  for (int32_t i = first; i < end; ++i) {
    tile.k[i] = static_cast<const Key<T>*>(zeros);
    if constexpr (kScaled<T>) {
      tile.k_scales[i] = {0};
    }
    drop_value(tile, i, zeros);
  }
}

// Points keys [first, end) to rows of an array from `from` on.
template <typename E>
void point(const E** rows, int32_t first, int32_t end, const E* from, int64_t stride) {
  for (int32_t i = first; i < end; ++i, from += stride) {
    rows[i] = from;
  }
}

inline void copy(Float16* to, int32_t first, int32_t end, const Float16* from, int64_t stride) {
  if (stride == 1) {
    __builtin_memcpy(to + first, from, (end - first) * sizeof(Float16));
    return;
  }
  for (int32_t i = first; i < end; ++i, from += stride) {
    to[i] = *from;
  }
}

// A block of one KV head.
template <typename E>
const E* block_at(const View<void, 3>& cache, int32_t kv_head, int32_t id) {
  return static_cast<const E*>(cache.data) + kv_head * cache.strides[0] + id * cache.strides[1];
}

// The tile at `begin`, limited to keys [key_begin, key_end). All other entries, and keys in blocks
// outside the pool, point to zeros.
template <typename T>
void locate(const AttentionArgs& args, const RowTile& rows, int32_t begin, int32_t key_begin,
            int32_t key_end, const void* zeros, KeyTile<T>& tile) {
  tile.begin = begin;
  tile.num_keys = key_end - begin < kKeyTile ? key_end - begin : kKeyTile;
  tile.is_full = tile.num_keys == kKeyTile && key_begin <= begin;
  tile.has_holes = false;
  const int32_t* table = args.block_tables.data + rows.batch * args.block_tables.strides[0];

  int32_t i = key_begin > begin ? key_begin - begin : 0;
  fill(tile, 0, i, zeros);
  while (i < tile.num_keys) {
    const int32_t block = (begin + i) / args.block_size;
    const int32_t offset = begin + i - block * args.block_size;
    const int32_t left = args.block_size - offset;
    const int32_t end = i + left < tile.num_keys ? i + left : tile.num_keys;
    const int32_t id = table[block * args.block_tables.strides[1]];
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
    const auto place = [&]<typename E>(const E** to, const View<void, 3>& cache) {
      const E* block = block_at<E>(cache, rows.kv_head, id);
      point(to, i, end, block + offset * cache.strides[2], cache.strides[2]);
    };
    place(tile.k, args.k);
    place(tile.v, args.v);
    if constexpr (kScaled<T>) {
      const auto place_scales = [&](Float16* to, const View<void, 3>& scales) {
        const Float16* from = block_at<Float16>(scales, rows.kv_head, id);
        copy(to, i, end, from + offset * scales.strides[2], scales.strides[2]);
      };
      place_scales(tile.k_scales, args.k_scales);
      if constexpr (kIsPair<Value<T>>) {
        place(tile.v_groups, args.v_scales);
      } else {
        place_scales(tile.v_scales, args.v_scales);
      }
    }
    i = end;
  }
  fill(tile, i, kKeyTile, zeros);
}

// Makes the tile of another KV head at the same position by moving the pointers. Returns false, and
// does nothing, if not all entries point to keys of the pool, or if they have scales.
template <typename T>
bool move_head(const AttentionArgs& args, int32_t num_heads, const KeyTile<T>& from,
               KeyTile<T>& to) {
  if (kScaled<T> || !from.is_full) {
    return false;
  }
  to.begin = from.begin;
  to.num_keys = kKeyTile;
  to.is_full = true;
  to.has_holes = false;
  for (int32_t i = 0; i < kKeyTile; ++i) {
    to.k[i] = from.k[i] + num_heads * args.k.strides[0];
    to.v[i] = from.v[i] + num_heads * args.v.strides[0];
  }
  return true;
}

// Prefetches a cache line into the second-level cache. The first level is too small for two tiles.
//
// This function and its callers here are always inlined: gcc believes that a function that only
// prefetches has no effect, and removes calls of it.
[[gnu::always_inline]] inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 2);
}

// Moves a line that is used soon from the second-level cache to the first. Otherwise its load would
// wait for the lines that are prefetched from memory, and the products would wait for the load.
[[gnu::always_inline]] inline void prefetch_soon(const void* address) {
  __builtin_prefetch(address, 0, 3);
}

// prefetch_soon runs this many keys ahead of the value in use: 2 KB of a panel of 64 columns.
template <typename T>
inline constexpr int kSoon = 64 / bytes_of<T>(2);

template <typename T>
[[gnu::always_inline]] inline void prefetch_rows(const T* const* rows, int32_t count,
                                                 int32_t width) {
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t byte = 0; byte < bytes_of<T>(width); byte += kCacheLine) {
      prefetch(reinterpret_cast<const char*>(rows[i]) + byte);
    }
  }
}

// Prefetches one tile while another is in use: one cache line for each call of `ask`, in the order
// of memory. Keys come first, then values; after the end it repeats the last value. The products
// call `ask` once for each line that they read: a burst of prefetches would delay the next loads.
template <typename T>
class PrefetchCursor {
 public:
  PrefetchCursor(const KeyTile<T>& tile, int32_t head_dim, int32_t value_dim)
      : row_(rows(tile.k)),
        last_(row_ + kKeyTile - 1),
        row_bytes_(bytes_of<Key<T>>(head_dim)),
        values_(rows(tile.v)),
        value_bytes_(bytes_of<Value<T>>(value_dim)) {}

  [[gnu::always_inline]] void ask() {
    prefetch(*row_ + offset_);
    offset_ += kCacheLine;
    if (offset_ >= row_bytes_) {
      next_row();
    }
  }

  // How many lines to prefetch for every `read` lines of values, so that the remaining lines are
  // spread over all values.
  int32_t pace(int32_t read) const {
    const int32_t left = static_cast<int32_t>(last_ + 1 - row_) * row_bytes_ +
                         (values_ ? kKeyTile * value_bytes_ : 0);
    const int32_t all = kKeyTile * value_bytes_;
    return left < all ? (read * left + all - 1) / all : read;
  }

 private:
  template <typename E>
  static const char* const* rows(const E* const* pointers) {
    return reinterpret_cast<const char* const*>(pointers);
  }

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

  const char* const* row_;
  const char* const* last_;
  int32_t offset_ = 0;
  int32_t row_bytes_;
  const char* const* values_;  // null once they have begun
  int32_t value_bytes_;
};

struct NoPrefetch {
  void ask() {}
};

// Prefetches one line of each block that holds keys of the tile at `begin`, and its scales. This
// translates the page's address, which takes longer than loading the other lines.
template <typename T>
[[gnu::always_inline]] inline void prefetch_pages(const AttentionArgs& args, const RowTile& rows,
                                                  int32_t begin, int32_t key_end) {
  const int32_t* table = args.block_tables.data + rows.batch * args.block_tables.strides[0];
  const int32_t end = key_end - begin < kKeyTile ? key_end : begin + kKeyTile;
  for (int32_t key = begin; key < end; key += args.block_size) {
    const int32_t id = table[key / args.block_size * args.block_tables.strides[1]];
    if (id >= 0 && id < args.num_blocks) {
      prefetch(block_at<Key<T>>(args.k, rows.kv_head, id));
      prefetch(block_at<Value<T>>(args.v, rows.kv_head, id));
      if constexpr (kScaled<T>) {
        prefetch(block_at<Float16>(args.k_scales, rows.kv_head, id));
        prefetch(block_at<Float16>(args.v_scales, rows.kv_head, id));
      }
    }
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

// Scores and outputs of a row tile with few rows, directly from the pool. Lanes are dimensions, so
// keys are read in the order of memory. See simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/scales.h"

namespace mlx_paged::cpu::KERNEL_ISA {

// scores[r][key] = q[r] . k[key] for kRows rows and as many keys as the accumulators allow.
// If kAsk, prefetches as many lines as it reads.
template <int kRows, bool kAsk, typename T>
[[gnu::always_inline]] inline void score_block(const float* q, int32_t q_stride, int32_t head_dim,
                                               const Key<T>* const* k, PrefetchCursor<T>& cursor,
                                               float* scores) {
  constexpr int kKeys = kAccumulators / kRows;
  static_assert(kKeyGroup % kKeys == 0);
  Floats sum[kAccumulators];
#pragma GCC unroll 16
  for (int i = 0; i < kAccumulators; ++i) {
    sum[i] = Floats{};
  }
  const auto add = [&](int32_t d, auto load_key) __attribute__((always_inline)) {
    Floats q_d[kRows];
    for (int r = 0; r < kRows; ++r) {
      q_d[r] = load(q + r * q_stride + d);
    }
#pragma GCC unroll 16
    for (int key = 0; key < kKeys; ++key) {
      const Floats k_d = load_key(element(k[key], d));
      if (kAsk && bytes_of<Key<T>>(d) % kCacheLine < bytes_of<Key<T>>(kLanes)) {
        cursor.ask();
      }
      for (int r = 0; r < kRows; ++r) {
        sum[r * kKeys + key] += k_d * q_d[r];
      }
    }
  };
  int32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    add(d, [](const Key<T>* from) { return load(from); });
  }
  if (d < head_dim) {
    add(d, [=](const Key<T>* from) { return load_partial(from, head_dim - d); });
  }
  float totals[kAccumulators];
  for (int i = 0; i < kAccumulators; i += kLanes) {
    store(totals + i, sum_each<kLanes>(sum + i));
  }
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(scores + r * kKeyTile, totals + r * kKeys, sizeof(float) * kKeys);
  }
}

template <int kRows, bool kAsk, typename T>
[[gnu::noinline]] void score_rows(const KeyTile<T>& tile, PrefetchCursor<T>& cursor, const float* q,
                                  int32_t q_stride, int32_t head_dim, float* scores) {
  constexpr int kKeys = kAccumulators / kRows;
  for (int32_t key = 0; key < tile.num_keys; key += kKeys) {
    score_block<kRows, kAsk>(q, q_stride, head_dim, tile.k + key, cursor, scores + key);
  }
}

// kRows rows of o = o * rescale + weights . v over the tile's keys, for kColumns registers of
// columns; in scaled formats plus `sums`. If kPartial, only the first `width` columns exist.
// If kAsk, prefetches `pace` lines for each key, but not more than it reads.
template <int kRows, int kColumns, bool kPartial, bool kAsk, typename T>
[[gnu::noinline]] void accumulate_block(const KeyTile<T>& tile, PrefetchCursor<T>& cursor,
                                        int32_t pace, int32_t column, int32_t width,
                                        const float* weights, const float* sums,
                                        const float* rescale, float* o, int32_t o_stride) {
  using V = Value<T>;
  constexpr int kLines = (bytes_of<V>(kColumns * kLanes) + kCacheLine - 1) / kCacheLine;
  Floats sum[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = load(o + r * o_stride + c * kLanes) * rescale[r];
      if constexpr (kIsPair<V>) {
        sum[r][c] += sums[r];
      }
    }
  }
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    const V* row = element(tile.v[key], column);
    if (kAsk && kSoon<V> < kKeyTile && key + kSoon<V> < tile.num_keys) {
      for (int line = 0; line < kLines; ++line) {
        const V* soon = element(tile.v[key + kSoon<V>], column);
        prefetch_soon(reinterpret_cast<const char*>(soon) + line * kCacheLine);
      }
    }
    Floats v[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      v[c] = kPartial ? load_partial(row, width) : load(element(row, c * kLanes));
    }
#pragma GCC unroll 4
    for (int line = 0; kAsk && line < kLines; ++line) {
      if (line < pace) {
        cursor.ask();
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = broadcast(weights[r * kKeyTile + key]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        sum[r][c] += weight * v[c];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      store(o + r * o_stride + c * kLanes, sum[r][c]);
    }
  }
}

template <int kRows, bool kAsk, typename T>
void accumulate_rows(const KeyTile<T>& tile, PrefetchCursor<T>& cursor, int32_t column, int32_t end,
                     const float* weights, const float* sums, const float* rescale, float* o,
                     int32_t o_stride) {
  constexpr int kPanelBytes = bytes_of<Value<T>>(kColumnBlock * kLanes);
  const int32_t pace = kAsk ? cursor.pace((kPanelBytes + kCacheLine - 1) / kCacheLine) : 0;
  const auto panel = [&]<int kColumns, bool kPartial>(int32_t first) {
    accumulate_block<kRows, kColumns, kPartial, kAsk>(tile, cursor, pace, first, end - first,
                                                      weights, sums, rescale, o + first, o_stride);
  };
  for (; column + kColumnBlock * kLanes <= end; column += kColumnBlock * kLanes) {
    panel.template operator()<kColumnBlock, false>(column);
  }
  for (; column + kLanes <= end; column += kLanes) {
    panel.template operator()<1, false>(column);
  }
  if (column < end) {
    panel.template operator()<1, true>(column);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

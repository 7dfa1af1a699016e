// Scores of a row tile with few rows. A register holds the queries of several rows side by side, so
// the final sum over lanes is short. See simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/key_tile.h"
#include "csrc/cpu/attention/row_blocks.h"

#if defined(__AVX512F__)

namespace mlx_paged::cpu::KERNEL_ISA {

// A register of sums holds this many lanes for each of kRowBlock rows.
inline constexpr int kRowLanes = kLanes / kRowBlock;

// This many keys share a load of queries.
inline constexpr int kSharedKeys = 8;

// Rearranges queries [num_rows, D], row stride q_stride, as [row block, D / kDims, kRowBlock,
// kDims]. D must be a multiple of kDims. Missing rows of the last block are zeros.
template <int kDims, typename Element>
void interleave_rows(const Element* q, int32_t q_stride, int32_t num_rows, int32_t head_dim,
                     Element* to) {
  for (int32_t block = 0; block < num_rows; block += kRowBlock) {
    for (int32_t d = 0; d < head_dim; d += kDims) {
      for (int32_t r = block; r < block + kRowBlock; ++r, to += kDims) {
        if (r < num_rows) {
          __builtin_memcpy(to, q + r * q_stride + d, kDims * sizeof(Element));
        } else {
          __builtin_memset(to, 0, kDims * sizeof(Element));
        }
      }
    }
  }
}

// Adds up the kRowLanes lanes of each row: scores[r][key], times scale, of a block of rows and a
// group of keys.
[[gnu::always_inline]] inline void store_scores(Floats* sum, float scale, float* scores) {
#pragma GCC unroll 8
  for (int key = 0; key < kSharedKeys; key += kRowLanes) {
    float totals[kLanes];
    const auto add = [](Floats a, Floats b) { return a + b; };
    store(totals, fold_each<kRowLanes, kRowLanes / 2>(sum + key, add) * scale);
    for (int r = 0; r < kRowBlock; ++r) {
      __builtin_memcpy(scores + r * kKeyTile + key, totals + r * kRowLanes,
                       sizeof(float) * kRowLanes);
    }
  }
}

// A product of interleaved rows uses kDims dimensions of each row at a time.
struct Float32Dims {
  using Element = float;
  static constexpr int kDims = kRowLanes;

  static Floats multiply_add(Floats sum, const float* k, const float* q) {
    return sum + _mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(k)) * load(q);
  }
};

// scores[r][key] = q[r] . k[key] * scale for a block of rows and a group of keys. If kAsk,
// prefetches as many lines as it reads.
template <typename Dims, bool kAsk, typename T>
[[gnu::noinline]] void score_interleaved(const typename Dims::Element* q, const T* const* k,
                                         int32_t head_dim, float scale, PrefetchCursor<T>& cursor,
                                         float* scores) {
  constexpr int kLines = Dims::kDims * kSharedKeys * sizeof(T) / kCacheLine;
  Floats sum[kSharedKeys];
#pragma GCC unroll 8
  for (int key = 0; key < kSharedKeys; ++key) {
    sum[key] = Floats{};
  }
  for (int32_t d = 0; d < head_dim; d += Dims::kDims, q += kRowBlock * Dims::kDims) {
#pragma GCC unroll 8
    for (int key = 0; key < kSharedKeys; ++key) {
      sum[key] = Dims::multiply_add(sum[key], k[key] + d, q);
    }
    for (int line = 0; kAsk && line < kLines; ++line) {
      cursor.ask();
    }
  }
  store_scores(sum, scale, scores);
}

// The same for all rows and keys.
template <typename Dims, typename T>
void score_interleaved_rows(const typename Dims::Element* q, int32_t num_rows,
                            const KeyTile<T>& tile, int32_t head_dim, float scale,
                            PrefetchCursor<T>& cursor, float* scores) {
  for (int32_t key = 0; key < tile.num_keys; key += kSharedKeys) {
    score_interleaved<Dims, true>(q, tile.k + key, head_dim, scale, cursor, scores + key);
    for (int32_t r = kRowBlock; r < num_rows; r += kRowBlock) {
      score_interleaved<Dims, false>(q + r * head_dim, tile.k + key, head_dim, scale, cursor,
                                     scores + r * kKeyTile + key);
    }
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

#endif

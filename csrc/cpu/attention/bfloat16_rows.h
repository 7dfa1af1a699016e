// Scores and outputs of a row tile with few rows in bfloat16. The instructions multiply pairs of
// bfloat16 and add the products in float32. See simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/interleaved_rows.h"

#if defined(__AVX512BF16__)

namespace mlx_paged::cpu::KERNEL_ISA {

// sum + a . b over pairs of bfloat16, one pair a lane.
inline Floats dot_pairs(Floats sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
}

struct BFloat16Dims {
  using Element = BFloat16;
  static constexpr int kDims = 2 * kRowLanes;

  static Floats multiply_add(Floats sum, const BFloat16* k, const BFloat16* q) {
    const __m128i dims = _mm_loadu_si128(reinterpret_cast<const __m128i*>(k));
    return dot_pairs(sum, _mm512_maskz_broadcast_i32x4(0xffff, dims), _mm512_loadu_si512(q));
  }
};

// The caller's queries of a row tile: neither rotated nor scaled.
inline void given_queries(const AttentionArgs& args, const RowTile& rows, BFloat16* to) {
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    const QueryRow& row = rows.rows[r];
    const BFloat16* from = static_cast<const BFloat16*>(args.q) + rows.batch * args.q_strides[0] +
                           row.head * args.q_strides[1] + row.token * args.q_strides[2];
    if (args.q_strides[3] == 1) {
      __builtin_memcpy(to + r * args.head_dim, from, args.head_dim * sizeof(BFloat16));
      continue;
    }
    for (int32_t d = 0; d < args.head_dim; ++d) {
      to[r * args.head_dim + d] = from[d * args.q_strides[3]];
    }
  }
}

// Weights rounded to bfloat16, [num_rows, kKeyTile].
inline void round_weights(const float* weights, int32_t num_rows, BFloat16* to) {
  for (int32_t i = 0; i < num_rows * kKeyTile; i += 2 * kLanes) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(load(weights + i + kLanes), load(weights + i));
    __builtin_memcpy(to + i, &pairs, sizeof pairs);
  }
}

// Interleaves the elements of two registers: of their first halves, or of their second halves.
template <int kFirst, size_t... kElement>
inline __m512i alternate(__m512i a, __m512i b, std::index_sequence<kElement...>) {
  typedef uint16_t Elements __attribute__((vector_size(64)));
  return __builtin_bit_cast(
      __m512i,
      __builtin_shufflevector(__builtin_bit_cast(Elements, a), __builtin_bit_cast(Elements, b),
                              (kFirst + kElement / 2 + kElement % 2 * 2 * kLanes)...));
}

// kRows rows of o = o * rescale + weights . v over the tile's keys, for kPairs registers of
// columns, each of 2 * kLanes. Reads an even number of keys: the weight of a key after the last is
// 0. If kAsk, prefetches `pace` lines for each pair of keys, but not more than it reads.
template <int kRows, int kPairs, bool kAsk>
[[gnu::noinline]] void accumulate_pairs(const KeyTile<BFloat16>& tile,
                                        PrefetchCursor<BFloat16>& cursor, int32_t pace,
                                        int32_t column, const BFloat16* weights,
                                        const float* rescale, float* o, int32_t o_stride) {
  constexpr int kColumns = 2 * kPairs;
  constexpr auto kElements = std::make_index_sequence<2 * kLanes>();
  Floats sum[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = load(o + r * o_stride + c * kLanes) * rescale[r];
    }
  }
  for (int32_t key = 0; key < tile.num_keys; key += 2) {
    if (kAsk && key + kSoon<BFloat16> < tile.num_keys) {
      for (int c = 0; c < kColumns; c += 2) {
        const int32_t element = column + c * kLanes;
        prefetch_soon(tile.v[key + kSoon<BFloat16>] + element);
        prefetch_soon(tile.v[key + kSoon<BFloat16> + 1] + element);
      }
    }
    __m512i v[kColumns];
    for (int c = 0; c < kColumns; c += 2) {
      const __m512i a = _mm512_loadu_si512(tile.v[key] + column + c * kLanes);
      const __m512i b = _mm512_loadu_si512(tile.v[key + 1] + column + c * kLanes);
      v[c] = alternate<0>(a, b, kElements);
      v[c + 1] = alternate<kLanes>(a, b, kElements);
    }
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + r * kKeyTile + key, sizeof pair);
      const __m512i weight = _mm512_set1_epi32(pair);
      for (int c = 0; c < kColumns; ++c) {
        sum[r][c] = dot_pairs(sum[r][c], v[c], weight);
      }
#pragma GCC unroll 4
      for (int line = r * kColumns / kRows; kAsk && line < (r + 1) * kColumns / kRows; ++line) {
        if (line < pace) {
          cursor.ask();
        }
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

// The same for all columns, a multiple of 2 * kLanes.
template <int kRows, bool kAsk>
void accumulate_pair_rows(const KeyTile<BFloat16>& tile, PrefetchCursor<BFloat16>& cursor,
                          int32_t value_dim, const BFloat16* weights, const float* rescale,
                          float* o, int32_t o_stride) {
  const int32_t pace = kAsk ? cursor.pace(4) : 0;
  int32_t column = 0;
  for (; column + 4 * kLanes <= value_dim; column += 4 * kLanes) {
    accumulate_pairs<kRows, 2, kAsk>(tile, cursor, pace, column, weights, rescale, o + column,
                                     o_stride);
  }
  for (; column < value_dim; column += 2 * kLanes) {
    accumulate_pairs<kRows, 1, kAsk>(tile, cursor, pace, column, weights, rescale, o + column,
                                     o_stride);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

#endif

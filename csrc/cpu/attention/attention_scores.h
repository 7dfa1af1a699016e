// From q.k to softmax weights, for one row and one key tile. See simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/key_tile.h"
#include "csrc/cpu/simd_math.h"

namespace mlx_paged::cpu::KERNEL_ISA {

// 0, 1, 2, ...
inline Floats lane_indices() {
  Floats lanes = {};
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = static_cast<float>(i);
  }
  return lanes;
}

// Hides keys outside [first, end), and the lanes after the last key.
inline void hide_outside(int32_t first, int32_t end, int32_t num_keys, float* scores) {
  if (first <= 0 && end >= (num_keys + kLanes - 1) / kLanes * kLanes) {
    return;
  }
  for (int32_t i = 0; i < num_keys; i += kLanes) {
    const Floats key = lane_indices() + static_cast<float>(i);
    Floats s = load(scores + i);
    s = key < static_cast<float>(first) ? broadcast(-kInfinity) : s;
    s = key < static_cast<float>(end) ? s : broadcast(-kInfinity);
    store(scores + i, s);
  }
}

// The number that element `at` of a mask adds to a score: -inf for False.
inline float mask_bias(const void* mask, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBool:
      return static_cast<const bool*>(mask)[at] ? 0 : -kInfinity;
    case DType::kFloat16:
      return load_one(static_cast<const Float16*>(mask) + at);
    case DType::kBFloat16:
      return load_one(static_cast<const BFloat16*>(mask) + at);
    default:
      return static_cast<const float*>(mask)[at];
  }
}

inline void add_mask(const AttentionArgs& args, const void* mask, int32_t begin, int32_t num_keys,
                     float* scores) {
  for (int32_t i = 0; i < num_keys; ++i) {
    const float bias = mask_bias(mask, args.mask_dtype, (begin + i) * args.mask.strides[3]);
    // A masked key may hold any value, also NaN.
    scores[i] = bias == -kInfinity ? bias : scores[i] + bias;
  }
}

// All changes of a score between q.k and the softmax.
template <typename T>
void adjust_scores(const AttentionArgs& args, const QueryRow& row, const KeyTile<T>& tile,
                   float* scores) {
  const bool changes = args.softcap > 0 || row.alibi_slope != 0 || tile.has_holes;
  for (int32_t i = 0; changes && i < tile.num_keys; i += kLanes) {
    Floats s = load(scores + i);
    if (args.softcap > 0) {
      s = tanh(s / args.softcap) * args.softcap;
    }
    if (row.alibi_slope != 0) {
      s += (lane_indices() + static_cast<float>(tile.begin + i - row.position)) * row.alibi_slope;
    }
    if (tile.has_holes) {
      s += load(tile.hole_bias + i);
    }
    store(scores + i, s);
  }
  if (row.mask) {
    add_mask(args, row.mask, tile.begin, tile.num_keys, scores);
  }
  hide_outside(row.key_begin - tile.begin, row.key_end - tile.begin, tile.num_keys, scores);
}

// Cache lines to prefetch for each register of weights. With fewer, memory is idle meanwhile. With
// more, loads from the cache wait for the prefetched lines.
inline constexpr int kLinesOfWeights = 4;

// Turns the scores of kRows rows into weights relative to their new running maxima. Updates m and
// l. Writes the factors that rescale o to those maxima. Reads kLanes elements of m and l.
template <int kRows, typename Prefetch>
[[gnu::noinline]] void update_softmax(float* scores, int32_t num_keys, float* m, float* l,
                                      float* rescale, Prefetch& cursor) {
  Floats highest[kRows];
  for (int r = 0; r < kRows; ++r) {
    highest[r] = load(scores + r * kKeyTile);
    for (int32_t i = kLanes; i < num_keys; i += kLanes) {
      highest[r] = maximum(highest[r], load(scores + r * kKeyTile + i));
    }
  }
  const Floats old_m = load(m);
  const Floats new_m = maximum(old_m, max_each<kRows>(highest));
  // The weights of rows that have seen no key yet stay 0.
  const Floats shift = new_m == -kInfinity ? Floats{} : new_m;
  const Floats factor = exp(old_m - shift);
  float shifts[kLanes];
  store(shifts, shift);
  Floats sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    sum[r] = Floats{};
    for (int32_t i = 0; i < num_keys; i += kLanes) {
      const Floats weight = exp(load(scores + r * kKeyTile + i) - shifts[r]);
      store(scores + r * kKeyTile + i, weight);
      sum[r] += weight;
      for (int line = 0; line < kLinesOfWeights; ++line) {
        cursor.ask();
      }
    }
  }
  store_first<kRows>(l, load(l) * factor + sum_each<kRows>(sum));
  store_first<kRows>(m, new_m);
  store_first<kRows>(rescale, factor);
}

template <typename Prefetch>
void update_softmax(float* scores, int32_t num_rows, int32_t num_keys, const SoftmaxState& state,
                    float* rescale, Prefetch& cursor) {
  int32_t row = 0;
  const auto update = [&]<int kRows>() {
    for (; row + kRows <= num_rows; row += kRows) {
      update_softmax<kRows>(scores + row * kKeyTile, num_keys, state.m + row, state.l + row,
                            rescale + row, cursor);
    }
  };
  update.template operator()<kLanes>();
  update.template operator()<4>();
  update.template operator()<1>();
}

// Replaces the values of keys that no row attends to by zeros: a weight of 0 does not hide a NaN.
template <typename T>
void drop_unattended(const float* weights, int32_t num_rows, const void* zeros, KeyTile<T>& tile) {
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    bool attended = false;
    for (int32_t r = 0; r < num_rows; ++r) {
      attended |= weights[r * kKeyTile + key] != 0;
    }
    if (!attended) {
      drop_value(tile, key, zeros);
    }
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

// The scales of a quantized key tile: a score is k_scale * (q . k), a value is v_scale * v, for
// pairs plus the minimum of its group of columns. See simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/key_tile.h"

namespace mlx_paged::cpu::KERNEL_ISA {

inline void widen(const Float16* scales, float* out) {
  for (int32_t key = 0; key < kKeyTile; key += kLanes) {
    store(out + key, load(scales + key));
  }
}

template <typename T>
void scale_scores(const KeyTile<T>& tile, int32_t num_rows, float* scores) {
  float scales[kKeyTile];
  widen(tile.k_scales, scales);
  for (int32_t r = 0; r < num_rows; ++r, scores += kKeyTile) {
    for (int32_t key = 0; key < kKeyTile; key += kLanes) {
      store(scores + key, load(scores + key) * load(scales + key));
    }
  }
}

// The scales and minima of the values in one group of columns.
struct ValueScales {
  float scale[kKeyTile];
  float minimum[kKeyTile];

  template <typename T>
  void load_group(const KeyTile<T>& tile, int32_t group) {
    if constexpr (kIsPair<Value<T>>) {
      uint32_t pairs[kKeyTile];
      for (int32_t key = 0; key < kKeyTile; ++key) {
        __builtin_memcpy(pairs + key, tile.v_groups[key] + 2 * group, sizeof *pairs);
      }
      for (int32_t key = 0; key < kKeyTile; key += kLanes) {
        Words both;
        __builtin_memcpy(&both, pairs + key, sizeof both);
        const Halves scales = __builtin_convertvector(both & 0xffff, Halves);
        const Halves minima = __builtin_convertvector(both >> 16, Halves);
        store(scale + key, load(reinterpret_cast<const Float16*>(&scales)));
        store(minimum + key, load(reinterpret_cast<const Float16*>(&minima)));
      }
    } else {
      widen(tile.v_scales, scale);
    }
  }

  // The value of a cache element.
  template <typename T>
  [[gnu::always_inline]] Floats value(int32_t key, Floats element) const {
    return kIsPair<Value<T>> ? element * scale[key] + minimum[key] : element * scale[key];
  }

  // scaled = weights * scale, and the sums of weights * minimum, for each row.
  template <typename T>
  void apply(float* weights, int32_t num_rows, int32_t num_keys, float* scaled, float* sums) const {
    for (int32_t r = 0; r < num_rows; ++r, weights += kKeyTile, scaled += kKeyTile) {
      Floats sum = {};
      // Behind the last key are weights of an earlier tile, maybe of another sequence's NaN.
      for (int32_t key = num_keys; key < kKeyTile; ++key) {
        weights[key] = 0;
      }
      for (int32_t key = 0; key < kKeyTile; key += kLanes) {
        const Floats weight = load(weights + key);
        store(scaled + key, weight * load(scale + key));
        if constexpr (kIsPair<Value<T>>) {
          sum += weight * load(minimum + key);
        }
      }
      sums[r] = sum_each<1>(&sum)[0];
    }
  }
};

// Calls body(group, first, end) for the groups of columns that share their scales.
template <typename T, typename Body>
void for_groups(int32_t value_dim, Body body) {
  const int32_t width = kIsPair<Value<T>> ? kValueGroup : value_dim;
  for (int32_t first = 0; first < value_dim; first += width) {
    body(first / width, first, first + width < value_dim ? first + width : value_dim);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

// Quantizes one row of keys or values; csrc/kv_formats.h has the formats. All arithmetic is
// float32, each operation rounded; integers round to nearest, ties to even. A row with a NaN or an
// infinity gets a scale that is not finite, so that what is read back is not finite either.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "csrc/kv_formats.h"
#include "mlx/types/half_types.h"

namespace mlx_paged::cpu {

// The nearest integer, ties to even, limited to [least, most]. NaN becomes `least`. Adding 1.5 *
// 2^23 leaves the integer in the low bits.
inline int32_t nearest(float x, float least, float most) {
  const float limited = x > least ? (x < most ? x : most) : least;
  return std::bit_cast<int32_t>(limited + 0x1.8p23f) - std::bit_cast<int32_t>(0x1.8p23f);
}

// scale = float16(max |x| / most), q = nearest(x / scale), for a `most` of 127 or 31. A scale of 0
// stores zeros.
template <int kMost>
void quantize_symmetric(const float* x, int width, std::byte* to, std::byte* scales) {
  int32_t highest = 0;  // as bits: their order is that of the numbers, and NaNs come last
  for (int d = 0; d < width; ++d) {
    highest = std::max(highest, std::bit_cast<int32_t>(x[d]) & 0x7fffffff);
  }
  const auto stored = static_cast<mlx::core::float16_t>(std::bit_cast<float>(highest) / kMost);
  std::memcpy(scales, &stored, sizeof stored);
  const float scale = static_cast<float>(stored);
  const auto q = [&](int d) { return scale == 0 ? 0 : nearest(x[d] / scale, -kMost, kMost); };
  if constexpr (kMost == 127) {
    for (int d = 0; d < width; ++d) {
      *to++ = static_cast<std::byte>(q(d));
    }
  } else {
    for (int d = 0; d < width; d += 4) {
      int32_t bits = 0;
      for (int i = 0; i < 4; ++i) {
        bits |= (q(d + i) & 63) << (6 * i);
      }
      for (int i = 0; i < 3; ++i) {
        *to++ = static_cast<std::byte>(bits >> (8 * i));
      }
    }
  }
}

// In each group minimum = float16(min x), scale = float16((max x - minimum) / 15),
// q = nearest((x - minimum) / scale).
inline void quantize_int4(const float* x, int width, std::byte* to, std::byte* scales) {
  for (int first = 0; first < width; first += kValueGroup, x += kValueGroup) {
    const int count = std::min(kValueGroup, width - first);
    float low = x[0], high = x[0], sum = 0;
    for (int d = 0; d < count; ++d) {
      low = std::min(low, x[d]);
      high = std::max(high, x[d]);
      sum += x[d] - x[d];  // NaN if one is not finite
    }
    using Half = mlx::core::float16_t;
    const auto minimum = static_cast<Half>(low + sum);
    const float from = static_cast<float>(minimum);
    const auto stored = static_cast<Half>((high - from) / 15 + sum);
    const float scale = static_cast<float>(stored);
    const Half pair[] = {stored, minimum};
    std::memcpy(scales, pair, sizeof pair);
    scales += sizeof pair;
    const auto q = [&](int d) { return scale == 0 ? 0 : nearest((x[d] - from) / scale, 0, 15); };
    for (int d = 0; d < count; d += 2) {
      *to++ = static_cast<std::byte>(q(d) | q(d + 1) << 4);
    }
  }
}

}  // namespace mlx_paged::cpu

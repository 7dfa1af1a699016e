// How a pool stores keys and values.
//
//   kv_bits  k_cache             k_scales     v_cache               v_scales
//   none     [.., D]             none         [.., D_v], same type  none
//   8        int8 [D]            float16 [1]  int8 [D_v]            float16 [1]
//   6        uint16 [3 * D / 8]  float16 [1]  uint16 [3 * D_v / 8]  float16 [1]
//   4        uint16 [3 * D / 8]  float16 [1]  uint8 [D_v / 2]       float16 [2 * groups]
//
// All arrays are [H_kv, N, S, columns]. Elements of 8 and of 6 bits are scale * q, q from -127 to
// 127 or from -31 to 31. Four elements of 6 bits fill three bytes, in two's complement: element i
// has bits 6i to 6i + 5 of them, counted from the low end of the first byte. Three 16-bit words
// hold two such fours: D is a multiple of 8.
//
// A byte of 4-bit values holds column 2i in its low half and column 2i + 1 in its high half. Each
// group of kValueGroup columns, of which the last may be narrower, has a scale and a minimum, one
// after the other: an element is minimum + scale * q, q from 0 to 15. csrc/cpu/quantize.h has the
// rounding.
#pragma once

namespace mlx_paged {

inline constexpr int kValueGroup = 64;

}  // namespace mlx_paged

// <metal_integer> and <metal_relational>
#pragma once

#include "elementwise.h"

namespace emulator {
template <class T>
using unsigned_of = __make_unsigned(T);
}

namespace metal {

#define EMULATOR_INTEGER(T)                                                                 \
  EMULATOR_INLINE constexpr T max(T x, T y) { return x < y ? y : x; }                       \
  EMULATOR_INLINE constexpr T min(T x, T y) { return y < x ? y : x; }                       \
  EMULATOR_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }  \
  EMULATOR_INLINE constexpr T max3(T x, T y, T z) { return max(max(x, y), z); }             \
  EMULATOR_INLINE constexpr T min3(T x, T y, T z) { return min(min(x, y), z); }             \
  EMULATOR_INLINE constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }                     \
  EMULATOR_INLINE constexpr emulator::unsigned_of<T> absdiff(T x, T y) {                    \
    typedef emulator::unsigned_of<T> U;                                                     \
    return x < y ? U(U(y) - U(x)) : U(U(x) - U(y));                                         \
  }                                                                                         \
  EMULATOR_INLINE constexpr T popcount(T x) {                                               \
    return T(__builtin_popcountg(static_cast<emulator::unsigned_of<T>>(x)));                \
  }                                                                                         \
  EMULATOR_INLINE constexpr T clz(T x) {                                                    \
    return T(__builtin_clzg(static_cast<emulator::unsigned_of<T>>(x), int(8 * sizeof(T)))); \
  }                                                                                         \
  EMULATOR_INLINE constexpr T ctz(T x) {                                                    \
    return T(__builtin_ctzg(static_cast<emulator::unsigned_of<T>>(x), int(8 * sizeof(T)))); \
  }                                                                                         \
  EMULATOR_VECTOR_1(T, abs, T)                                                              \
  EMULATOR_VECTOR_2(T, max, T, T)                                                           \
  EMULATOR_VECTOR_2(T, min, T, T)                                                           \
  EMULATOR_VECTOR_3(T, clamp, T, T, T)
EMULATOR_INTEGER(char)
EMULATOR_INTEGER(uchar)
EMULATOR_INTEGER(short)
EMULATOR_INTEGER(ushort)
EMULATOR_INTEGER(int)
EMULATOR_INTEGER(uint)
EMULATOR_INTEGER(long)
EMULATOR_INTEGER(ulong)
#undef EMULATOR_INTEGER

EMULATOR_INLINE constexpr int mulhi(int x, int y) { return int((long(x) * y) >> 32); }
EMULATOR_INLINE constexpr uint mulhi(uint x, uint y) { return uint((ulong(x) * y) >> 32); }
EMULATOR_INLINE constexpr uint rotate(uint x, uint n) { return __builtin_rotateleft32(x, n); }
EMULATOR_INLINE constexpr uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMULATOR_INLINE constexpr uint extract_bits(uint x, uint offset, uint bits) {
  return uint((ulong(x) >> offset) & ((ulong(1) << bits) - 1));
}
EMULATOR_INLINE constexpr uint insert_bits(uint x, uint inserted, uint offset, uint bits) {
  const uint mask = uint(((ulong(1) << bits) - 1) << offset);
  return (x & ~mask) | ((inserted << offset) & mask);
}

template <class T>
EMULATOR_INLINE constexpr T select(T x, T y, bool takes_y) {
  return takes_y ? y : x;
}
template <class T, int N>
EMULATOR_INLINE constexpr vec<T, N> select(vec<T, N> x, vec<T, N> y, vec<bool, N> takes_y) {
  for (int i = 0; i < N; i++) x.d[i] = takes_y.d[i] ? y.d[i] : x.d[i];
  return x;
}
template <int N>
EMULATOR_INLINE constexpr bool all(vec<bool, N> x) {
  bool result = true;
  for (int i = 0; i < N; i++) result = result && x.d[i];
  return result;
}
template <int N>
EMULATOR_INLINE constexpr bool any(vec<bool, N> x) {
  return !all(!x);
}

}  // namespace metal

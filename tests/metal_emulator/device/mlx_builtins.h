// Apple's private builtins, as far as MLX's bf16_math.h calls them.
#pragma once

#define EMULATOR_BUILTIN_1(f) \
  EMULATOR_INLINE float __metal_##f(float x, int) { return metal::f(x); }
EMULATOR_BUILTIN_1(acos)
EMULATOR_BUILTIN_1(acosh)
EMULATOR_BUILTIN_1(asin)
EMULATOR_BUILTIN_1(asinh)
EMULATOR_BUILTIN_1(atan)
EMULATOR_BUILTIN_1(atanh)
EMULATOR_BUILTIN_1(ceil)
EMULATOR_BUILTIN_1(cos)
EMULATOR_BUILTIN_1(cosh)
EMULATOR_BUILTIN_1(cospi)
EMULATOR_BUILTIN_1(exp)
EMULATOR_BUILTIN_1(exp10)
EMULATOR_BUILTIN_1(exp2)
EMULATOR_BUILTIN_1(fabs)
EMULATOR_BUILTIN_1(floor)
EMULATOR_BUILTIN_1(fract)
EMULATOR_BUILTIN_1(log)
EMULATOR_BUILTIN_1(log10)
EMULATOR_BUILTIN_1(log2)
EMULATOR_BUILTIN_1(rint)
EMULATOR_BUILTIN_1(round)
EMULATOR_BUILTIN_1(rsqrt)
EMULATOR_BUILTIN_1(sin)
EMULATOR_BUILTIN_1(sinh)
EMULATOR_BUILTIN_1(sinpi)
EMULATOR_BUILTIN_1(sqrt)
EMULATOR_BUILTIN_1(tan)
EMULATOR_BUILTIN_1(tanh)
EMULATOR_BUILTIN_1(tanpi)
EMULATOR_BUILTIN_1(trunc)
#undef EMULATOR_BUILTIN_1

#define EMULATOR_BUILTIN_2(f) \
  EMULATOR_INLINE float __metal_##f(float x, float y, int) { return metal::f(x, y); }
EMULATOR_BUILTIN_2(atan2)
EMULATOR_BUILTIN_2(divide)
EMULATOR_BUILTIN_2(fmax)
EMULATOR_BUILTIN_2(fmin)
EMULATOR_BUILTIN_2(fmod)
EMULATOR_BUILTIN_2(pow)
EMULATOR_BUILTIN_2(powr)
#undef EMULATOR_BUILTIN_2

EMULATOR_INLINE float __metal_fma(float x, float y, float z) { return metal::fma(x, y, z); }
EMULATOR_INLINE float __metal_fmax3(float x, float y, float z, int) { return metal::max3(x, y, z); }
EMULATOR_INLINE float __metal_fmin3(float x, float y, float z, int) { return metal::min3(x, y, z); }
EMULATOR_INLINE float __metal_fmedian3(float x, float y, float z, int) {
  return metal::median3(x, y, z);
}
EMULATOR_INLINE float __metal_frexp(float x, int* exponent) {
  return __builtin_frexpf(x, exponent);
}
EMULATOR_INLINE float __metal_ldexp(float x, int exponent, int) {
  return metal::ldexp(x, exponent);
}
EMULATOR_INLINE float __metal_nextafter(float x, float y) { return metal::nextafter(x, y); }

#define EMULATOR_BUILTIN_SIMD(f)       \
  template <class T>                   \
  EMULATOR_INLINE T __metal_##f(T x) { \
    return metal::f(x);                \
  }
EMULATOR_BUILTIN_SIMD(simd_max)
EMULATOR_BUILTIN_SIMD(simd_min)
EMULATOR_BUILTIN_SIMD(simd_sum)
EMULATOR_BUILTIN_SIMD(simd_product)
EMULATOR_BUILTIN_SIMD(simd_prefix_inclusive_sum)
EMULATOR_BUILTIN_SIMD(simd_prefix_exclusive_sum)
EMULATOR_BUILTIN_SIMD(simd_prefix_inclusive_product)
EMULATOR_BUILTIN_SIMD(simd_prefix_exclusive_product)
#undef EMULATOR_BUILTIN_SIMD
// Declared so that MLX's header compiles; floats have no xor.
template <class T>
T __metal_simd_xor(T);

#define EMULATOR_BUILTIN_SHUFFLE(f)              \
  template <class T>                             \
  EMULATOR_INLINE T __metal_##f(T x, ushort n) { \
    return metal::f(x, n);                       \
  }
EMULATOR_BUILTIN_SHUFFLE(simd_broadcast)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_down)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_up)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_xor)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_rotate_up)
#undef EMULATOR_BUILTIN_SHUFFLE

template <class T>
EMULATOR_INLINE T __metal_simd_shuffle_and_fill_down(T x, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(x, filling, delta, modulo);
}
template <class T>
EMULATOR_INLINE T __metal_simd_shuffle_and_fill_up(T x, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(x, filling, delta, modulo);
}
EMULATOR_INLINE ushort __metal_get_simdgroup_size(ushort) { return 32; }
EMULATOR_INLINE ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return ushort(emulator::lanes::own());
}

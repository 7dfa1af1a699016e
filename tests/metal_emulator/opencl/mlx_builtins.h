// Apple's private builtins, as far as MLX's bf16_math.h calls them.
#pragma once

#include "types.h"

#define EMULATOR_BUILTIN_1(f) float __metal_##f(float, int);
#define EMULATOR_BUILTIN_2(f) float __metal_##f(float, float, int);
#define EMULATOR_BUILTIN_3(f) float __metal_##f(float, float, float, int);
#define EMULATOR_BUILTIN_LANES(f) \
  template <class T>              \
  T __metal_##f(T);
#define EMULATOR_BUILTIN_SHUFFLE(f) \
  template <class T>                \
  T __metal_##f(T, ushort);
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
EMULATOR_BUILTIN_2(atan2)
EMULATOR_BUILTIN_2(divide)
EMULATOR_BUILTIN_2(fmax)
EMULATOR_BUILTIN_2(fmin)
EMULATOR_BUILTIN_2(fmod)
EMULATOR_BUILTIN_2(pow)
EMULATOR_BUILTIN_2(powr)
EMULATOR_BUILTIN_3(fmax3)
EMULATOR_BUILTIN_3(fmedian3)
EMULATOR_BUILTIN_3(fmin3)
float __metal_fma(float, float, float);
float __metal_frexp(float, __private int*);
float __metal_ldexp(float, int, int);
float __metal_nextafter(float, float);
EMULATOR_BUILTIN_LANES(simd_max)
EMULATOR_BUILTIN_LANES(simd_min)
EMULATOR_BUILTIN_LANES(simd_prefix_exclusive_product)
EMULATOR_BUILTIN_LANES(simd_prefix_exclusive_sum)
EMULATOR_BUILTIN_LANES(simd_prefix_inclusive_product)
EMULATOR_BUILTIN_LANES(simd_prefix_inclusive_sum)
EMULATOR_BUILTIN_LANES(simd_product)
EMULATOR_BUILTIN_LANES(simd_sum)
EMULATOR_BUILTIN_LANES(simd_xor)
EMULATOR_BUILTIN_SHUFFLE(simd_broadcast)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_down)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_rotate_down)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_rotate_up)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_up)
EMULATOR_BUILTIN_SHUFFLE(simd_shuffle_xor)
template <class T>
T __metal_simd_shuffle_and_fill_down(T, T, ushort, ushort);
template <class T>
T __metal_simd_shuffle_and_fill_up(T, T, ushort, ushort);
ushort __metal_get_simdgroup_size(ushort);

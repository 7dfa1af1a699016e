// Vector forms of a scalar function `f`. They are plain overloads, not templates, so that calls
// which Metal finds ambiguous, max(uint, int) for one, are ambiguous here too.
#pragma once

#include "vector.h"

#define EMULATOR_VECTOR_1_OF_SIZE(R, f, T, N)            \
  EMULATOR_INLINE constexpr vec<R, N> f(vec<T, N> x) {   \
    vec<R, N> result{};                                  \
    for (int i = 0; i < N; i++) result.d[i] = f(x.d[i]); \
    return result;                                       \
  }
#define EMULATOR_VECTOR_2_OF_SIZE(R, f, T, U, N)                    \
  EMULATOR_INLINE constexpr vec<R, N> f(vec<T, N> x, vec<U, N> y) { \
    vec<R, N> result{};                                             \
    for (int i = 0; i < N; i++) result.d[i] = f(x.d[i], y.d[i]);    \
    return result;                                                  \
  }
#define EMULATOR_VECTOR_3_OF_SIZE(R, f, T, U, V, N)                              \
  EMULATOR_INLINE constexpr vec<R, N> f(vec<T, N> x, vec<U, N> y, vec<V, N> z) { \
    vec<R, N> result{};                                                          \
    for (int i = 0; i < N; i++) result.d[i] = f(x.d[i], y.d[i], z.d[i]);         \
    return result;                                                               \
  }

#define EMULATOR_VECTOR_1(R, f, T)      \
  EMULATOR_VECTOR_1_OF_SIZE(R, f, T, 2) \
  EMULATOR_VECTOR_1_OF_SIZE(R, f, T, 3) \
  EMULATOR_VECTOR_1_OF_SIZE(R, f, T, 4)
#define EMULATOR_VECTOR_2(R, f, T, U)      \
  EMULATOR_VECTOR_2_OF_SIZE(R, f, T, U, 2) \
  EMULATOR_VECTOR_2_OF_SIZE(R, f, T, U, 3) \
  EMULATOR_VECTOR_2_OF_SIZE(R, f, T, U, 4)
#define EMULATOR_VECTOR_3(R, f, T, U, V)      \
  EMULATOR_VECTOR_3_OF_SIZE(R, f, T, U, V, 2) \
  EMULATOR_VECTOR_3_OF_SIZE(R, f, T, U, V, 3) \
  EMULATOR_VECTOR_3_OF_SIZE(R, f, T, U, V, 4)

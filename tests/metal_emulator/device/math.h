// <metal_math>: functions of float and half, scalar and vector. half goes through float, which
// rounds once.
#pragma once

#include "abi.h"
#include "elementwise.h"

namespace emulator {
constexpr float pi = 3.14159265358979f;

// Whether neither is NaN: MLX compiles max and min as fast:: ones, which may make anything of NaN.
EMULATOR_INLINE constexpr bool numbers_only(float x, float y) {
#ifdef EMULATOR_REPORTS_NOTHING
  return true;
#else
  const bool has_nan = x != x || y != y;
  if (has_nan) emulator_report_undefined("fast maximum or minimum of NaN");
  return !has_nan;
#endif
}
}  // namespace emulator

namespace metal {

#define EMULATOR_MATH_1(f, expression)                                   \
  EMULATOR_INLINE constexpr float f(float x) { return expression; }      \
  EMULATOR_INLINE constexpr half f(half x) { return half(f(float(x))); } \
  EMULATOR_VECTOR_1(float, f, float)                                     \
  EMULATOR_VECTOR_1(half, f, half)
#define EMULATOR_MATH_2(f, expression)                                                     \
  EMULATOR_INLINE constexpr float f(float x, float y) { return expression; }               \
  EMULATOR_INLINE constexpr half f(half x, half y) { return half(f(float(x), float(y))); } \
  EMULATOR_VECTOR_2(float, f, float, float)                                                \
  EMULATOR_VECTOR_2(half, f, half, half)
#define EMULATOR_MATH_TEST(f, expression)                          \
  EMULATOR_INLINE constexpr bool f(float x) { return expression; } \
  EMULATOR_INLINE constexpr bool f(half x) { return f(float(x)); } \
  EMULATOR_VECTOR_1(bool, f, float)                                \
  EMULATOR_VECTOR_1(bool, f, half)

EMULATOR_MATH_1(acos, __builtin_acosf(x))
EMULATOR_MATH_1(acosh, __builtin_acoshf(x))
EMULATOR_MATH_1(asin, __builtin_asinf(x))
EMULATOR_MATH_1(asinh, __builtin_asinhf(x))
EMULATOR_MATH_1(atan, __builtin_atanf(x))
EMULATOR_MATH_1(atanh, __builtin_atanhf(x))
EMULATOR_MATH_1(ceil, __builtin_ceilf(x))
EMULATOR_MATH_1(cos, __builtin_cosf(x))
EMULATOR_MATH_1(cosh, __builtin_coshf(x))
EMULATOR_MATH_1(cospi, __builtin_cosf(emulator::pi* x))
EMULATOR_MATH_1(exp, __builtin_expf(x))
EMULATOR_MATH_1(exp10, __builtin_powf(10.0f, x))
EMULATOR_MATH_1(exp2, __builtin_exp2f(x))
EMULATOR_MATH_1(fabs, __builtin_fabsf(x))
EMULATOR_MATH_1(floor, __builtin_floorf(x))
EMULATOR_MATH_1(fract, x - __builtin_floorf(x))
EMULATOR_MATH_1(log, __builtin_logf(x))
EMULATOR_MATH_1(log10, __builtin_log10f(x))
EMULATOR_MATH_1(log2, __builtin_log2f(x))
EMULATOR_MATH_1(rint, __builtin_rintf(x))
EMULATOR_MATH_1(round, __builtin_roundf(x))
EMULATOR_MATH_1(rsqrt, 1.0f / __builtin_sqrtf(x))
EMULATOR_MATH_1(sin, __builtin_sinf(x))
EMULATOR_MATH_1(sinh, __builtin_sinhf(x))
EMULATOR_MATH_1(sinpi, __builtin_sinf(emulator::pi* x))
EMULATOR_MATH_1(sqrt, __builtin_sqrtf(x))
EMULATOR_MATH_1(tan, __builtin_tanf(x))
EMULATOR_MATH_1(tanh, __builtin_tanhf(x))
EMULATOR_MATH_1(tanpi, __builtin_tanf(emulator::pi* x))
EMULATOR_MATH_1(trunc, __builtin_truncf(x))

EMULATOR_MATH_2(atan2, __builtin_atan2f(x, y))
EMULATOR_MATH_2(copysign, __builtin_copysignf(x, y))
EMULATOR_MATH_2(divide, x / y)
EMULATOR_MATH_2(fdim, __builtin_fdimf(x, y))
EMULATOR_MATH_2(fmax, emulator::numbers_only(x, y) ? __builtin_fmaxf(x, y) : __builtin_nanf(""))
EMULATOR_MATH_2(fmin, emulator::numbers_only(x, y) ? __builtin_fminf(x, y) : __builtin_nanf(""))
EMULATOR_MATH_2(fmod, __builtin_fmodf(x, y))
EMULATOR_MATH_2(nextafter, __builtin_nextafterf(x, y))
EMULATOR_MATH_2(pow, __builtin_powf(x, y))
EMULATOR_MATH_2(powr, __builtin_powf(x, y))

EMULATOR_MATH_1(abs, __builtin_fabsf(x))
EMULATOR_MATH_1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
EMULATOR_MATH_1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
EMULATOR_MATH_2(max, fmax(x, y))
EMULATOR_MATH_2(min, fmin(x, y))

EMULATOR_MATH_TEST(isfinite, __builtin_fabsf(x) < __builtin_inff())
EMULATOR_MATH_TEST(isinf, __builtin_fabsf(x) == __builtin_inff())
EMULATOR_MATH_TEST(isnan, x != x)
EMULATOR_MATH_TEST(signbit, (as_type<uint32_t>(x) >> 31) != 0)

#define EMULATOR_MATH_OF_TYPE(T)                                                                   \
  EMULATOR_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }         \
  EMULATOR_INLINE constexpr T max3(T x, T y, T z) { return max(max(x, y), z); }                    \
  EMULATOR_INLINE constexpr T min3(T x, T y, T z) { return min(min(x, y), z); }                    \
  EMULATOR_INLINE constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); } \
  EMULATOR_INLINE constexpr T mix(T x, T y, T a) { return x + (y - x) * a; }                       \
  EMULATOR_INLINE constexpr T ldexp(T x, int exponent) {                                           \
    return T(__builtin_ldexpf(float(x), exponent));                                                \
  }                                                                                                \
  EMULATOR_VECTOR_3(T, clamp, T, T, T)                                                             \
  EMULATOR_VECTOR_3(T, mix, T, T, T)                                                               \
  EMULATOR_VECTOR_2(T, ldexp, T, int)
EMULATOR_MATH_OF_TYPE(float)
EMULATOR_MATH_OF_TYPE(half)
#undef EMULATOR_MATH_OF_TYPE

EMULATOR_INLINE constexpr float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMULATOR_INLINE constexpr half fma(half x, half y, half z) {
  return half(__builtin_fma(double(x), double(y), double(z)));
}
EMULATOR_VECTOR_3(float, fma, float, float, float)
EMULATOR_VECTOR_3(half, fma, half, half, half)

EMULATOR_INLINE float frexp(float x, int& exponent) { return __builtin_frexpf(x, &exponent); }
EMULATOR_INLINE float modf(float x, float& whole) { return __builtin_modff(x, &whole); }

#define EMULATOR_DOT_OF_SIZE(T, N)                                              \
  EMULATOR_INLINE constexpr T dot(vec<T, N> x, vec<T, N> y) {                   \
    T sum = T(0);                                                               \
    for (int i = 0; i < N; i++) sum = T(sum + x.d[i] * y.d[i]);                 \
    return sum;                                                                 \
  }                                                                             \
  EMULATOR_INLINE constexpr T length_squared(vec<T, N> x) { return dot(x, x); } \
  EMULATOR_INLINE constexpr T length(vec<T, N> x) { return sqrt(dot(x, x)); }
EMULATOR_DOT_OF_SIZE(float, 2)
EMULATOR_DOT_OF_SIZE(float, 3)
EMULATOR_DOT_OF_SIZE(float, 4)
EMULATOR_DOT_OF_SIZE(half, 2)
EMULATOR_DOT_OF_SIZE(half, 3)
EMULATOR_DOT_OF_SIZE(half, 4)
#undef EMULATOR_DOT_OF_SIZE

// The fast and the precise variants differ on a GPU only, but for what the fast exponentials make
// of NaN and infinities, and fast maxima and minima of NaN: no document tells, so that here it is
// what nobody would hope for.
#define EMULATOR_USE_VARIANTS                                                                      \
  using metal::abs, metal::acos, metal::acosh, metal::asin, metal::asinh, metal::atan,             \
      metal::atan2, metal::atanh, metal::ceil, metal::clamp, metal::copysign, metal::cos,          \
      metal::cosh, metal::cospi, metal::divide, metal::exp10, metal::fabs, metal::fdim,            \
      metal::floor, metal::fma, metal::fmod, metal::fract, metal::frexp, metal::ldexp, metal::log, \
      metal::log10, metal::log2, metal::mix, metal::nextafter, metal::pow, metal::powr,            \
      metal::rint, metal::round, metal::rsqrt, metal::saturate, metal::sign, metal::sin,           \
      metal::sinh, metal::sinpi, metal::sqrt, metal::tan, metal::tanh, metal::tanpi, metal::trunc;
namespace fast {
EMULATOR_USE_VARIANTS
using metal::fmax, metal::fmin, metal::max, metal::max3, metal::median3, metal::min, metal::min3;
#define EMULATOR_FAST_EXPONENTIAL(f)                                         \
  EMULATOR_INLINE constexpr float f(float x) {                               \
    return isfinite(x) ? metal::f(x) : isinf(x) ? __builtin_nanf("") : 1.0f; \
  }                                                                          \
  EMULATOR_VECTOR_1(float, f, float)
EMULATOR_FAST_EXPONENTIAL(exp)
EMULATOR_FAST_EXPONENTIAL(exp2)
#undef EMULATOR_FAST_EXPONENTIAL
}  // namespace fast
namespace precise {
EMULATOR_USE_VARIANTS
using metal::exp, metal::exp2;
// Of two numbers, one of them NaN, the other one.
EMULATOR_MATH_2(fmax, __builtin_fmaxf(x, y))
EMULATOR_MATH_2(fmin, __builtin_fminf(x, y))
EMULATOR_MATH_2(max, __builtin_fmaxf(x, y))
EMULATOR_MATH_2(min, __builtin_fminf(x, y))
}  // namespace precise
#undef EMULATOR_USE_VARIANTS
#undef EMULATOR_MATH_1
#undef EMULATOR_MATH_2
#undef EMULATOR_MATH_TEST

}  // namespace metal

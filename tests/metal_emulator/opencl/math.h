// Declarations of <metal_math>, <metal_integer>, <metal_relational> and <metal_geometric>.
#pragma once

#include "overloads.h"
#include "types.h"

#define EMULATOR_MATH                             \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, acos)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, acosh)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, asin)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, asinh)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, atan)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, atanh)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, ceil)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, cos)        \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, cosh)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, cospi)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, exp)        \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, exp10)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, exp2)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, fabs)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, floor)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, fract)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, log)        \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, log10)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, log2)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, rint)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, round)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, rsqrt)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, saturate)   \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, sign)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, sin)        \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, sinh)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, sinpi)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, sqrt)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, tan)        \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, tanh)       \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, tanpi)      \
  EMULATOR_FOR_FLOATS(EMULATOR_UNARY, trunc)      \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, atan2)     \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, copysign)  \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, divide)    \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, fdim)      \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, fmax)      \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, fmin)      \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, fmod)      \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, nextafter) \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, pow)       \
  EMULATOR_FOR_FLOATS(EMULATOR_BINARY, powr)      \
  EMULATOR_FOR_FLOATS(EMULATOR_TERNARY, fma)      \
  EMULATOR_FOR_FLOATS(EMULATOR_TERNARY, mix)      \
  EMULATOR_FOR_ALL(EMULATOR_UNARY, abs)           \
  EMULATOR_FOR_ALL(EMULATOR_BINARY, max)          \
  EMULATOR_FOR_ALL(EMULATOR_BINARY, min)          \
  EMULATOR_FOR_ALL(EMULATOR_TERNARY, clamp)       \
  EMULATOR_FOR_ALL(EMULATOR_TERNARY, max3)        \
  EMULATOR_FOR_ALL(EMULATOR_TERNARY, min3)        \
  EMULATOR_FOR_ALL(EMULATOR_TERNARY, median3)

namespace metal {

EMULATOR_MATH
namespace fast {
EMULATOR_MATH
}
namespace precise {
EMULATOR_MATH
}

EMULATOR_FOR_FLOATS(EMULATOR_TEST, isfinite)
EMULATOR_FOR_FLOATS(EMULATOR_TEST, isinf)
EMULATOR_FOR_FLOATS(EMULATOR_TEST, isnan)
EMULATOR_FOR_FLOATS(EMULATOR_TEST, signbit)
bool isfinite(bfloat);
bool isinf(bfloat);
bool isnan(bfloat);
EMULATOR_DOT(dot, float)
EMULATOR_DOT(dot, half)
EMULATOR_LENGTH(length, float)
EMULATOR_LENGTH(length, half)
EMULATOR_LENGTH(length_squared, float)
EMULATOR_LENGTH(length_squared, half)
float ldexp(float, int);
half ldexp(half, int);
float frexp(float, __private int&);
float modf(float, __private float&);

EMULATOR_FOR_ALL(EMULATOR_SELECT, select)
EMULATOR_FOR_INTEGERS(EMULATOR_UNARY, popcount)
EMULATOR_FOR_INTEGERS(EMULATOR_UNARY, clz)
EMULATOR_FOR_INTEGERS(EMULATOR_UNARY, ctz)
EMULATOR_FOR_INTEGERS(EMULATOR_BINARY, absdiff)
EMULATOR_FOR_INTEGERS(EMULATOR_BINARY, mulhi)
EMULATOR_FOR_INTEGERS(EMULATOR_BINARY, rotate)
uint reverse_bits(uint);
uint extract_bits(uint, uint, uint);
uint insert_bits(uint, uint, uint, uint);
template <class V, class Mask>
V select(V, V, Mask);
template <class V>
bool all(V);
template <class V>
bool any(V);

}  // namespace metal

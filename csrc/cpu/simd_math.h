// Exponential, hyperbolic tangent, sine and cosine of a register; see simd.h for the rules of
// inclusion.
#pragma once

#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

// exp(x) = 2^n * (1 + p) with n the nearest integer to x / ln 2. Cody and Waite's two-part ln 2
// keeps the remainder r exact. p is a minimax polynomial of e^r - 1 on |r| <= ln(2) / 2: its
// relative error of 3e-9 in e^r is below float32's rounding.
struct Exponential {
  Floats p;
  Ints n;
};

inline Exponential reduced_exp(Floats x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is in the low bits of the sum.
  constexpr float kRound = 0x1.8p23f;
  const Floats shifted = x * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.3814466739776026e-3f + 8.368780429082682e-3f;
  p = p * r + 4.1668394217422716e-2f;
  p = p * r + 1.66665201076265e-1f;
  p = p * r + 4.9999993412469657e-1f;
  p = p * (r * r) + r;
  return {p, __builtin_bit_cast(Ints, shifted) - __builtin_bit_cast(Ints, broadcast(kRound))};
}

// Arguments below this give 0 (exp) or -1 (exp_minus_one): exp(-87) is still a normal number.
inline constexpr float kMinExponent = -87.0f;

// e^x for x <= 0, NaN for NaN; relative error 1e-7, 0 below e^-87.
inline Floats exp(Floats x) {
  const auto [p, n] = reduced_exp(x);
  const Floats y = __builtin_bit_cast(Floats, __builtin_bit_cast(Ints, p + 1.0f) + (n << 23));
  return x < kMinExponent ? Floats{} : y;
}

// e^x for x >= 0, NaN for NaN; relative error 1e-7, infinite above e^88.
inline Floats exp_of_positive(Floats x) {
  const auto [p, n] = reduced_exp(x);
  const Floats y = __builtin_bit_cast(Floats, __builtin_bit_cast(Ints, p + 1.0f) + (n << 23));
  return x > 88.0f ? broadcast(__builtin_inff()) : y;
}

// e^x - 1 for x <= 0; absolute error 1e-7, exact near 0.
inline Floats exp_minus_one(Floats x) {
  const auto [p, n] = reduced_exp(x);
  const Floats power = __builtin_bit_cast(Floats, (n + 127) << 23);
  return x < kMinExponent ? broadcast(-1.0f) : power * p + (power - 1.0f);
}

inline Floats tanh(Floats x) {
  const Floats y = exp_minus_one(x < 0 ? x + x : -(x + x));  // e^(-2|x|) - 1
  const Floats positive = -y / (y + 2.0f);
  return x < 0 ? -positive : positive;
}

typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));

struct SineCosine {
  Floats sine;
  Floats cosine;
};

// Sine and cosine for |x| < 2^31, absolute error 1e-7. The argument is reduced by multiples of
// pi / 2 in double precision, whose first part of 33 bits times an integer is exact; on the
// remainder, at most pi / 4, the polynomials are Moshier's (Cephes, sinf and cosf).
inline SineCosine sine_cosine(Floats x) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer in the low bits
  const Doubles wide = __builtin_convertvector(x, Doubles);
  const Doubles shifted = wide * 0.63661977236758134 + kRound;
  const Doubles n = shifted - kRound;
  const Doubles reduced = (wide - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
  const Floats r = __builtin_convertvector(reduced, Floats);
  const Ints quadrant = __builtin_convertvector(__builtin_bit_cast(Longs, shifted), Ints);
  const Floats z = r * r;
  Floats sine = z * -1.9515295891e-4f + 8.3321608736e-3f;
  sine = sine * z - 1.6666654611e-1f;
  sine = sine * (z * r) + r;
  Floats cosine = z * 2.443315711809948e-5f - 1.388731625493765e-3f;
  cosine = cosine * z + 4.166664568298827e-2f;
  cosine = cosine * (z * z) - z * 0.5f + 1.0f;
  const Floats s = (quadrant & 1) == 0 ? sine : cosine;
  const Floats c = (quadrant & 1) == 0 ? cosine : sine;
  return {(quadrant & 2) == 0 ? s : -s, ((quadrant + 1) & 2) == 0 ? c : -c};
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

// bfloat: converts to float implicitly, from float only explicitly, as in Metal.
#pragma once

#include "traits.h"

struct bfloat {
  uint16_t bits;

  bfloat() = default;
  explicit constexpr bfloat(float value) : bits(rounded(value)) {}
  explicit constexpr bfloat(half value) : bits(rounded(float(value))) {}
  template <class Integer, class = metal::enable_if_t<__is_integral(Integer)>>
  constexpr bfloat(Integer value) : bits(rounded(float(value))) {}

  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

 private:
  // Round to nearest, ties to even; NaNs stay NaNs.
  static constexpr uint16_t rounded(float value) {
    const uint32_t wide = __builtin_bit_cast(uint32_t, value);
    if ((wide & 0x7fffffffu) > 0x7f800000u) return uint16_t((wide >> 16) | 0x40);
    return uint16_t((wide + 0x7fffu + ((wide >> 16) & 1)) >> 16);
  }
};

EMULATOR_INLINE constexpr bfloat operator"" bf(long double value) { return bfloat(float(value)); }

// With another bfloat or an integer the result has type Same, with float or half type Wider.
#define EMULATOR_BFLOAT_OPERATOR(op, Same, Wider)                                                \
  EMULATOR_INLINE constexpr Same operator op(bfloat a, bfloat b) {                               \
    return Same(float(a) op float(b));                                                           \
  }                                                                                              \
  EMULATOR_INLINE constexpr Wider operator op(bfloat a, float b) { return float(a) op b; }       \
  EMULATOR_INLINE constexpr Wider operator op(float a, bfloat b) { return a op float(b); }       \
  EMULATOR_INLINE constexpr Wider operator op(bfloat a, half b) { return float(a) op float(b); } \
  EMULATOR_INLINE constexpr Wider operator op(half a, bfloat b) { return float(a) op float(b); } \
  template <class Integer, class = metal::enable_if_t<__is_integral(Integer)>>                   \
  EMULATOR_INLINE constexpr Same operator op(bfloat a, Integer b) {                              \
    return Same(float(a) op float(b));                                                           \
  }                                                                                              \
  template <class Integer, class = metal::enable_if_t<__is_integral(Integer)>>                   \
  EMULATOR_INLINE constexpr Same operator op(Integer a, bfloat b) {                              \
    return Same(float(a) op float(b));                                                           \
  }
EMULATOR_BFLOAT_OPERATOR(+, bfloat, float)
EMULATOR_BFLOAT_OPERATOR(-, bfloat, float)
EMULATOR_BFLOAT_OPERATOR(*, bfloat, float)
EMULATOR_BFLOAT_OPERATOR(/, bfloat, float)
EMULATOR_BFLOAT_OPERATOR(<, bool, bool)
EMULATOR_BFLOAT_OPERATOR(>, bool, bool)
EMULATOR_BFLOAT_OPERATOR(<=, bool, bool)
EMULATOR_BFLOAT_OPERATOR(>=, bool, bool)
EMULATOR_BFLOAT_OPERATOR(==, bool, bool)
EMULATOR_BFLOAT_OPERATOR(!=, bool, bool)
#undef EMULATOR_BFLOAT_OPERATOR

EMULATOR_INLINE constexpr bfloat operator-(bfloat a) {
  return __builtin_bit_cast(bfloat, uint16_t(a.bits ^ 0x8000));
}
EMULATOR_INLINE constexpr bfloat operator+(bfloat a) { return a; }

#define EMULATOR_BFLOAT_ASSIGNMENT(op)                                  \
  template <class B>                                                    \
  EMULATOR_INLINE constexpr bfloat& operator op## = (bfloat & a, B b) { \
    return a = bfloat(float(a) op float(b));                            \
  }
EMULATOR_BFLOAT_ASSIGNMENT(+)
EMULATOR_BFLOAT_ASSIGNMENT(-)
EMULATOR_BFLOAT_ASSIGNMENT(*)
EMULATOR_BFLOAT_ASSIGNMENT(/)
#undef EMULATOR_BFLOAT_ASSIGNMENT

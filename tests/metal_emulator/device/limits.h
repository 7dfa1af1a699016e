// <metal_limits>
#pragma once

#include "bfloat.h"

namespace metal {

template <class T>
struct numeric_limits;

#define EMULATOR_INTEGER_LIMITS(T, lowest_value, highest_value) \
  template <>                                                   \
  struct numeric_limits<T> {                                    \
    static constexpr bool is_specialized = true;                \
    static constexpr T min() { return lowest_value; }           \
    static constexpr T max() { return highest_value; }          \
    static constexpr T lowest() { return lowest_value; }        \
  };
EMULATOR_INTEGER_LIMITS(bool, false, true)
EMULATOR_INTEGER_LIMITS(char, -128, 127)
EMULATOR_INTEGER_LIMITS(signed char, -128, 127)
EMULATOR_INTEGER_LIMITS(uchar, 0, 255)
EMULATOR_INTEGER_LIMITS(short, -32768, 32767)
EMULATOR_INTEGER_LIMITS(ushort, 0, 65535)
EMULATOR_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
EMULATOR_INTEGER_LIMITS(uint, 0, 4294967295u)
EMULATOR_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
EMULATOR_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef EMULATOR_INTEGER_LIMITS

// Each value as the bits of Unsigned.
#define EMULATOR_FLOAT_LIMITS(T, Unsigned, least, greatest, epsilon_bits, infinite, nan) \
  template <>                                                                            \
  struct numeric_limits<T> {                                                             \
    static constexpr bool is_specialized = true;                                         \
    static constexpr T min() { return as_type<T>(Unsigned(least)); }                     \
    static constexpr T max() { return as_type<T>(Unsigned(greatest)); }                  \
    static constexpr T lowest() { return -max(); }                                       \
    static constexpr T epsilon() { return as_type<T>(Unsigned(epsilon_bits)); }          \
    static constexpr T infinity() { return as_type<T>(Unsigned(infinite)); }             \
    static constexpr T quiet_NaN() { return as_type<T>(Unsigned(nan)); }                 \
  };
EMULATOR_FLOAT_LIMITS(float, uint32_t, 0x00800000, 0x7f7fffff, 0x34000000, 0x7f800000, 0x7fc00000)
EMULATOR_FLOAT_LIMITS(half, uint16_t, 0x0400, 0x7bff, 0x1400, 0x7c00, 0x7e00)
EMULATOR_FLOAT_LIMITS(bfloat, uint16_t, 0x0080, 0x7f7f, 0x3c00, 0x7f80, 0x7fc0)
#undef EMULATOR_FLOAT_LIMITS

}  // namespace metal

// Metal's scalar types, except bfloat.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
typedef _Float16 half;

#define EMULATOR_INLINE inline __attribute__((always_inline))

EMULATOR_INLINE constexpr half operator""h(long double value) { return half(value); }
EMULATOR_INLINE constexpr half operator""h(unsigned long long value) { return half(value); }

template <class To, class From>
EMULATOR_INLINE constexpr To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  if constexpr (__is_trivially_copyable(To) && __is_trivially_copyable(From)) {
    return __builtin_bit_cast(To, value);
  } else {
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
  }
}

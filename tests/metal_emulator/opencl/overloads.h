// Macros that declare one function for many types.
#pragma once

#define EMULATOR_WITH_VECTORS(DECLARE, f, T) \
  DECLARE(f, T)                              \
  DECLARE(f, T##2)                           \
  DECLARE(f, T##3)                           \
  DECLARE(f, T##4)
#define EMULATOR_FOR_FLOATS(DECLARE, f)    \
  EMULATOR_WITH_VECTORS(DECLARE, f, float) \
  EMULATOR_WITH_VECTORS(DECLARE, f, half)
#define EMULATOR_FOR_SMALL_INTEGERS(DECLARE, f) \
  EMULATOR_WITH_VECTORS(DECLARE, f, char)       \
  EMULATOR_WITH_VECTORS(DECLARE, f, uchar)      \
  EMULATOR_WITH_VECTORS(DECLARE, f, short)      \
  EMULATOR_WITH_VECTORS(DECLARE, f, ushort)     \
  EMULATOR_WITH_VECTORS(DECLARE, f, int)        \
  EMULATOR_WITH_VECTORS(DECLARE, f, uint)
#define EMULATOR_FOR_INTEGERS(DECLARE, f) \
  EMULATOR_FOR_SMALL_INTEGERS(DECLARE, f) \
  EMULATOR_WITH_VECTORS(DECLARE, f, long) \
  EMULATOR_WITH_VECTORS(DECLARE, f, ulong)
#define EMULATOR_FOR_ALL(DECLARE, f) \
  EMULATOR_FOR_INTEGERS(DECLARE, f)  \
  EMULATOR_FOR_FLOATS(DECLARE, f)
// What simdgroup functions take.
#define EMULATOR_FOR_LANE_DATA(DECLARE, f) \
  EMULATOR_FOR_SMALL_INTEGERS(DECLARE, f)  \
  EMULATOR_FOR_FLOATS(DECLARE, f)

#define EMULATOR_UNARY(f, T) T f(T);
#define EMULATOR_BINARY(f, T) T f(T, T);
#define EMULATOR_TERNARY(f, T) T f(T, T, T);
#define EMULATOR_TEST(f, T) bool f(T);
#define EMULATOR_SELECT(f, T) T f(T, T, bool);
#define EMULATOR_DOT(f, T) \
  T f(T##2, T##2);         \
  T f(T##3, T##3);         \
  T f(T##4, T##4);
#define EMULATOR_LENGTH(f, T) \
  T f(T##2);                  \
  T f(T##3);                  \
  T f(T##4);
#define EMULATOR_SHUFFLE(f, T) T f(T, ushort);
#define EMULATOR_FILL(f, T) \
  T f(T, T, ushort);        \
  T f(T, T, ushort, ushort);

// Metal's scalar and vector types and <metal_type_traits> in C++ for OpenCL.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

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
typedef unsigned long uintptr_t;
typedef __bf16 bfloat;

#define EMULATOR_VECTORS_OF_SIZE(T, N)                \
  typedef T T##N __attribute__((ext_vector_type(N))); \
  typedef T##N packed_##T##N;
#define EMULATOR_VECTORS(T)      \
  EMULATOR_VECTORS_OF_SIZE(T, 2) \
  EMULATOR_VECTORS_OF_SIZE(T, 3) \
  EMULATOR_VECTORS_OF_SIZE(T, 4)
EMULATOR_VECTORS(char)
EMULATOR_VECTORS(uchar)
EMULATOR_VECTORS(short)
EMULATOR_VECTORS(ushort)
EMULATOR_VECTORS(int)
EMULATOR_VECTORS(uint)
EMULATOR_VECTORS(long)
EMULATOR_VECTORS(ulong)
EMULATOR_VECTORS(half)
EMULATOR_VECTORS(bfloat)
EMULATOR_VECTORS(float)
#undef EMULATOR_VECTORS
#undef EMULATOR_VECTORS_OF_SIZE
// OpenCL has no vectors of bool; as far as address spaces go, others will do.
typedef uchar2 bool2;
typedef uchar3 bool3;
typedef uchar4 bool4;

template <class To, class From>
To as_type(From);
// The translation writes float4(x, y, z, w) as emulator_make<float4>(x, y, z, w).
template <class Vector, class... Elements>
constexpr Vector emulator_make(Elements...) {
  return Vector(0);
}

namespace emulator {
template <int id, class T>
__local T& threadgroup_variable();
void emulator_report_assertion(__constant const char*);
}  // namespace emulator

namespace metal {

template <bool condition, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool condition, class T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool condition, class T, class F>
using conditional_t = typename conditional<condition, T, F>::type;

template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class T>
struct remove_cv {
  typedef T type;
};
template <class T>
struct remove_cv<const T> {
  typedef T type;
};
template <class T>
struct remove_cv<volatile T> {
  typedef T type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<__constant T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__global T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__local T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__private T> {
  typedef T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <class A, class B>
constexpr __constant bool is_same_v = __is_same(A, B);
template <class A, class B>
constexpr __constant bool is_convertible_v = __is_convertible(A, B);
template <class T>
constexpr __constant bool is_integral_v = __is_integral(T);
template <class T>
constexpr __constant bool is_floating_point_v = __is_floating_point(T);
template <class T>
constexpr __constant bool is_arithmetic_v = __is_arithmetic(T);
template <class T>
constexpr __constant bool is_unsigned_v = __is_unsigned(T);
template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};
template <class B>
struct _negation : bool_constant<!B::value> {};

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T>
struct numeric_limits {
  static constexpr T min() { return T(0); }
  static constexpr T max() { return T(1); }
  static constexpr T lowest() { return T(0); }
  static constexpr T infinity() { return T(1); }
  static constexpr T quiet_NaN() { return T(1); }
  static constexpr T epsilon() { return T(1); }
};

template <class T, size_t N>
struct array {
  T elements[N];
};

}  // namespace metal

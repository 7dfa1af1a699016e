// <metal_type_traits>
#pragma once

#include "scalars.h"

struct bfloat;

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

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

template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;

template <class T>
struct remove_volatile {
  typedef T type;
};
template <class T>
struct remove_volatile<volatile T> {
  typedef T type;
};
template <class T>
using remove_volatile_t = typename remove_volatile<T>::type;

template <class T>
struct remove_cv {
  typedef remove_const_t<remove_volatile_t<T>> type;
};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_pointer {
  typedef T type;
};
template <class T>
struct remove_pointer<T*> {
  typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;

template <class T>
using remove_addrspace_t = T;
template <class T>
using decay_t = remove_cv_t<remove_reference_t<T>>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <class T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <class T>
struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T>
struct is_floating_point : bool_constant<is_same<T, float>::value || is_same<T, half>::value ||
                                         is_same<T, bfloat>::value> {};
template <class T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};

template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <class A, class B>
constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class T>
constexpr bool is_integral_v = is_integral<T>::value;
template <class T>
constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T>
constexpr bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr bool is_pointer_v = is_pointer<T>::value;
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;

template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};
template <class B>
struct _negation : bool_constant<!B::value> {};

template <class T>
using uniform = T;
template <class T>
EMULATOR_INLINE constexpr T make_uniform(T value) {
  return value;
}

}  // namespace metal

// vec<T, N> and its names: float4, half2, packed_float3, ...
#pragma once

#include "bfloat.h"

namespace metal {
template <class T, int N>
struct vec;
}

namespace emulator {

using metal::vec;

// How many elements a constructor argument contributes.
template <class T>
struct element_count : metal::integral_constant<int, metal::is_arithmetic_v<T> ? 1 : 0> {};
template <class T, int N>
struct element_count<vec<T, N>> : metal::integral_constant<int, N> {};

// The elements, under all their names. Swizzles are properties, so that a vector stays as plain as
// an array; swizzles.py generates them.
template <class T, int N>
struct vector_elements;
template <class T>
struct alignas(2 * sizeof(T)) vector_elements<T, 2> {
  union {
    T d[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
  };
#include "swizzles_2.h"
};
template <class T>
struct alignas(4 * sizeof(T)) vector_elements<T, 3> {
  union {
    T d[3];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
  };
#include "swizzles_3.h"
};
template <class T>
struct alignas(4 * sizeof(T)) vector_elements<T, 4> {
  union {
    T d[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
  };
#include "swizzles_4.h"
};

// MLX also writes vec<T, 1> and vec<T, 8> as plain storage.
template <class T>
struct vector_elements<T, 1> {
  union {
    T d[1];
    T x;
  };
};
template <class T>
struct alignas(8 * sizeof(T)) vector_elements<T, 8> {
  T d[8];
};

}  // namespace emulator

namespace metal {

template <class T, int N>
struct vec : emulator::vector_elements<T, N> {
  typedef T value_type;
  using emulator::vector_elements<T, N>::d;

  vec() = default;
  EMULATOR_INLINE constexpr vec(T value) : emulator::vector_elements<T, N>{} {
    for (int i = 0; i < N; i++) d[i] = value;
  }
  template <class S,
            class = enable_if_t<is_arithmetic_v<S> && !is_same_v<S, T> && is_convertible_v<S, T>>>
  EMULATOR_INLINE constexpr vec(S value) : vec(T(value)) {}
  template <class U, class = enable_if_t<!is_same_v<U, T>>>
  EMULATOR_INLINE explicit constexpr vec(const vec<U, N>& other)
      : emulator::vector_elements<T, N>{} {
    for (int i = 0; i < N; i++) d[i] = T(other.d[i]);
  }
  // From scalars and shorter vectors that have N elements together.
  template <
      class A, class B, class... C,
      class = enable_if_t<emulator::element_count<A>::value + emulator::element_count<B>::value +
                              (0 + ... + emulator::element_count<C>::value) ==
                          N>>
  EMULATOR_INLINE constexpr vec(A a, B b, C... rest) : emulator::vector_elements<T, N>{} {
    int next = 0;
    append(next, a);
    append(next, b);
    (append(next, rest), ...);
  }

#ifdef EMULATOR_CHECKS_ALIGNMENT
  // UBSan checks the addresses that references bind to, not those of plain copies.
  EMULATOR_INLINE constexpr vec(const vec& other) : emulator::vector_elements<T, N>{} {
    *this = other;
  }
  EMULATOR_INLINE constexpr vec& operator=(const vec& other) {
    for (int i = 0; i < N; i++) d[i] = other.d[i];
    return *this;
  }
#endif

  EMULATOR_INLINE constexpr T& operator[](int i) { return d[i]; }
  EMULATOR_INLINE constexpr const T& operator[](int i) const { return d[i]; }

#define EMULATOR_ARITHMETIC(op)                                    \
  friend EMULATOR_INLINE constexpr vec operator op(vec a, vec b) { \
    vec result{};                                                  \
    for (int i = 0; i < N; i++) result.d[i] = T(a.d[i] op b.d[i]); \
    return result;                                                 \
  }                                                                \
  EMULATOR_INLINE constexpr vec& operator op## = (vec other) { return *this = *this op other; }
  EMULATOR_ARITHMETIC(+)
  EMULATOR_ARITHMETIC(-)
  EMULATOR_ARITHMETIC(*)
  EMULATOR_ARITHMETIC(/)
  EMULATOR_ARITHMETIC(%)
  EMULATOR_ARITHMETIC(&)
  EMULATOR_ARITHMETIC(|)
  EMULATOR_ARITHMETIC(^)
  EMULATOR_ARITHMETIC(<<)
  EMULATOR_ARITHMETIC(>>)
#undef EMULATOR_ARITHMETIC

#define EMULATOR_COMPARISON(op)                                             \
  friend EMULATOR_INLINE constexpr vec<bool, N> operator op(vec a, vec b) { \
    vec<bool, N> result{};                                                  \
    for (int i = 0; i < N; i++) result.d[i] = a.d[i] op b.d[i];             \
    return result;                                                          \
  }
  EMULATOR_COMPARISON(<)
  EMULATOR_COMPARISON(>)
  EMULATOR_COMPARISON(<=)
  EMULATOR_COMPARISON(>=)
  EMULATOR_COMPARISON(==)
  EMULATOR_COMPARISON(!=)
  EMULATOR_COMPARISON(&&)
  EMULATOR_COMPARISON(||)
#undef EMULATOR_COMPARISON

#define EMULATOR_UNARY(Result, op)                                                    \
  friend EMULATOR_INLINE constexpr Result operator op(vec a) {                        \
    Result result{};                                                                  \
    for (int i = 0; i < N; i++) result.d[i] = typename Result::value_type(op a.d[i]); \
    return result;                                                                    \
  }
  using bools = vec<bool, N>;
  EMULATOR_UNARY(vec, +)
  EMULATOR_UNARY(vec, -)
  EMULATOR_UNARY(vec, ~)
  EMULATOR_UNARY(bools, !)
#undef EMULATOR_UNARY

 private:
  template <class A>
  EMULATOR_INLINE constexpr void append(int& next, A value) {
    if constexpr (is_arithmetic_v<A>) {
      d[next++] = T(value);
    } else {
      for (int i = 0; i < emulator::element_count<A>::value; i++) d[next++] = T(value[i]);
    }
  }
};

// Elements without padding or extra alignment.
template <class T, int N>
struct packed_vec {
  T d[N];

  packed_vec() = default;
  EMULATOR_INLINE packed_vec(vec<T, N> value) {
    for (int i = 0; i < N; i++) d[i] = value.d[i];
  }
  EMULATOR_INLINE operator vec<T, N>() const {
    vec<T, N> result;
    for (int i = 0; i < N; i++) result.d[i] = d[i];
    return result;
  }
  EMULATOR_INLINE T& operator[](int i) { return d[i]; }
  EMULATOR_INLINE const T& operator[](int i) const { return d[i]; }
};

}  // namespace metal

#define EMULATOR_NAME_VECTORS_OF_SIZE(T, N) \
  typedef metal::vec<T, N> T##N;            \
  typedef metal::packed_vec<T, N> packed_##T##N;
#define EMULATOR_NAME_VECTORS(T)      \
  EMULATOR_NAME_VECTORS_OF_SIZE(T, 2) \
  EMULATOR_NAME_VECTORS_OF_SIZE(T, 3) \
  EMULATOR_NAME_VECTORS_OF_SIZE(T, 4)
EMULATOR_NAME_VECTORS(bool)
EMULATOR_NAME_VECTORS(char)
EMULATOR_NAME_VECTORS(uchar)
EMULATOR_NAME_VECTORS(short)
EMULATOR_NAME_VECTORS(ushort)
EMULATOR_NAME_VECTORS(int)
EMULATOR_NAME_VECTORS(uint)
EMULATOR_NAME_VECTORS(long)
EMULATOR_NAME_VECTORS(ulong)
EMULATOR_NAME_VECTORS(half)
EMULATOR_NAME_VECTORS(float)
EMULATOR_NAME_VECTORS(bfloat)
#undef EMULATOR_NAME_VECTORS
#undef EMULATOR_NAME_VECTORS_OF_SIZE

// metal::float4 and float4 are both in use.
namespace metal {
using ::bfloat2, ::bfloat3, ::bfloat4, ::bool2, ::bool3, ::bool4, ::char2, ::char3, ::char4;
using ::float2, ::float3, ::float4, ::half2, ::half3, ::half4, ::int2, ::int3, ::int4;
using ::long2, ::long3, ::long4, ::short2, ::short3, ::short4, ::uchar2, ::uchar3, ::uchar4;
using ::uint2, ::uint3, ::uint4, ::ulong2, ::ulong3, ::ulong4, ::ushort2, ::ushort3, ::ushort4;
}  // namespace metal

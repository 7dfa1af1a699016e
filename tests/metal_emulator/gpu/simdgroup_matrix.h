// 8x8 matrices: two elements of a lane, in the layout of the emulator's own simdgroup_matrix.
#pragma once

#include "simdgroup.h"

namespace metal {

template <class T, int rows, int columns>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  EMULATOR_INLINE explicit simdgroup_matrix(T diagonal) : elements(diagonal) {}
  EMULATOR_INLINE vec<T, 2>& thread_elements() { return elements; }
  EMULATOR_INLINE const vec<T, 2>& thread_elements() const { return elements; }

  vec<T, 2> elements;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int rows, int columns = rows>
EMULATOR_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> matrix;
  matrix.elements = vec<T, 2>(value);
  return matrix;
}

// The address of the first of a lane's two elements, and how far away the other is.
template <class T>
struct Elements {
  EMULATOR_INLINE Elements(T* source, ulong elements_per_row, ulong2 origin, bool is_transposed) {
    const uint lane = emulator::lanes::own(), quad = lane / 4;
    const ulong row = (quad & 4) + lane / 2 % 4, column = (quad & 2) * 2 + lane % 2 * 2;
    const ulong y = is_transposed ? column : row, x = is_transposed ? row : column;
    first = source + (origin.y + y) * elements_per_row + origin.x + x;
    step = is_transposed ? elements_per_row : 1;
  }
  T* first;
  ulong step;
};

template <class T>
EMULATOR_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const T* source,
                                    ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                    bool is_transposed = false) {
  const Elements<const T> of_lane(source, elements_per_row, origin, is_transposed);
  for (int i = 0; i < 2; i++) matrix.elements[i] = of_lane.first[i * of_lane.step];
}
template <class T>
EMULATOR_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, T* target,
                                     ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                     bool is_transposed = false) {
  const Elements<T> of_lane(target, elements_per_row, origin, is_transposed);
  for (int i = 0; i < 2; i++) of_lane.first[i * of_lane.step] = matrix.elements[i];
}

// As many registers as the lane's elements fill.
typedef uint Registers __attribute__((ext_vector_type(2)));
template <class T>
EMULATOR_INLINE auto registers_of(const simdgroup_matrix<T, 8, 8>& matrix) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(Registers, matrix.elements);
  } else {
    return __builtin_bit_cast(uint, matrix.elements);
  }
}

template <class D, class A, class B, class C>
EMULATOR_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                   const simdgroup_matrix<A, 8, 8>& a,
                                                   const simdgroup_matrix<B, 8, 8>& b,
                                                   const simdgroup_matrix<C, 8, 8>& c) {
  auto result = registers_of(d);
  asm("; matrix multiplication %0, %1, %2, %3"
      : "=v"(result)
      : "v"(registers_of(a)), "v"(registers_of(b)), "0"(registers_of(c)));
  d.elements = __builtin_bit_cast(decltype(d.elements), result);
}
template <class D, class A, class B>
EMULATOR_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                        const simdgroup_matrix<A, 8, 8>& a,
                                        const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal

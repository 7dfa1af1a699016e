// <metal_simdgroup_matrix>: 8x8 matrices, two elements per lane, in the layout that MLX's
// BaseMMAFrag::get_coord relies on.
#pragma once

#include "simdgroup.h"

namespace emulator::fragment {

struct Coordinate {
  uint row, column;  // of the first of the lane's two elements; the other is to its right
};

EMULATOR_INLINE Coordinate coordinate(uint lane) {
  const uint quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2};
}
EMULATOR_INLINE uint lane_of(uint row, uint column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

// Small numbers are multiplied in 32 bits: the instruction finds the rows of a matrix, so that this
// is no 64-bit multiplication of the kernel.
EMULATOR_INLINE ulong row_offset(ulong row, ulong elements_per_row) {
  return (row | elements_per_row) >> 15 == 0 ? uint(row) * uint(elements_per_row)
                                             : row * elements_per_row;
}

// The address of element i (0 or 1) of this lane in a matrix that begins at `source`.
template <class T>
EMULATOR_INLINE T* element_address(T* source, ulong elements_per_row, metal::ulong2 origin,
                                   bool is_transposed, uint i) {
  const auto [row, column] = coordinate(lanes::own());
  const ulong y = is_transposed ? column + i : row, x = is_transposed ? row : column + i;
  return source + row_offset(origin.y + y, elements_per_row) + origin.x + x;
}

}  // namespace emulator::fragment

namespace metal {

template <class T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "simdgroup_matrix is 8x8");

  simdgroup_matrix() = default;
  EMULATOR_INLINE explicit simdgroup_matrix(T diagonal) {
    const auto [row, column] = emulator::fragment::coordinate(emulator::lanes::own());
    elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
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

template <class T, class Source>
EMULATOR_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const Source* source,
                                    ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                    bool is_transposed = false) {
  static_assert(is_same_v<T, Source>, "simdgroup_load does not convert");
  emulator::lanes::exchange(0, "simdgroup_load");
  for (uint i = 0; i < 2; i++)
    matrix.elements[i] =
        *emulator::fragment::element_address(source, elements_per_row, origin, is_transposed, i);
}

template <class T, class Target>
EMULATOR_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, Target* target,
                                     ulong elements_per_row = 8, ulong2 origin = ulong2(0, 0),
                                     bool is_transposed = false) {
  static_assert(is_same_v<T, Target>, "simdgroup_store does not convert");
  emulator::lanes::exchange(0, "simdgroup_store");
  for (uint i = 0; i < 2; i++)
    *emulator::fragment::element_address(target, elements_per_row, origin, is_transposed, i) =
        matrix.elements[i];
}

// d = a b + c, accumulated in float in order of the inner index.
template <class D, class A, class B, class C>
EMULATOR_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                   const simdgroup_matrix<A, 8, 8>& a,
                                                   const simdgroup_matrix<B, 8, 8>& b,
                                                   const simdgroup_matrix<C, 8, 8>& c) {
  const char* name = "simdgroup_multiply_accumulate";
  struct Operands {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  const emulator::LaneValues* values =
      emulator::lanes::exchange(Operands{a.elements, b.elements}, name);
  if (values->active != 0xffffffffu) emulator::emulator_report_inactive_lane(name);
  const auto [row, column] = emulator::fragment::coordinate(emulator::lanes::own());
  float sum[2] = {float(c.elements[0]), float(c.elements[1])};
  for (uint k = 0; k < 8; k++) {
    auto of_lane = [&](uint lane) { return static_cast<const Operands*>(values->value[lane]); };
    const float left = float(of_lane(emulator::fragment::lane_of(row, k))->a[k % 2]);
    const vec<B, 2>& right = of_lane(emulator::fragment::lane_of(k, column))->b;
    sum[0] += left * float(right[0]);
    sum[1] += left * float(right[1]);
  }
  d.elements = vec<D, 2>(D(sum[0]), D(sum[1]));
}

template <class D, class A, class B>
EMULATOR_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d,
                                        const simdgroup_matrix<A, 8, 8>& a,
                                        const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal

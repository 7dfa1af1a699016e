// Declarations of <metal_compute>, <metal_simdgroup>, <metal_simdgroup_matrix>, <metal_atomic>.
#pragma once

#include "overloads.h"
#include "types.h"

// OpenCL has types of these names.
#define atomic_bool emulator_atomic_bool
#define atomic_int emulator_atomic_int
#define atomic_uint emulator_atomic_uint
#define atomic_ulong emulator_atomic_ulong
#define atomic_float emulator_atomic_float

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_sum)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_product)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_max)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_min)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_broadcast_first)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_prefix_inclusive_sum)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_prefix_exclusive_sum)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_prefix_inclusive_product)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, simd_prefix_exclusive_product)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, quad_sum)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, quad_max)
EMULATOR_FOR_LANE_DATA(EMULATOR_UNARY, quad_min)
EMULATOR_FOR_SMALL_INTEGERS(EMULATOR_UNARY, simd_and)
EMULATOR_FOR_SMALL_INTEGERS(EMULATOR_UNARY, simd_or)
EMULATOR_FOR_SMALL_INTEGERS(EMULATOR_UNARY, simd_xor)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_broadcast)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle_xor)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle_up)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle_down)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle_rotate_up)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, simd_shuffle_rotate_down)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, quad_broadcast)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, quad_shuffle)
EMULATOR_FOR_LANE_DATA(EMULATOR_SHUFFLE, quad_shuffle_xor)
EMULATOR_FOR_LANE_DATA(EMULATOR_FILL, simd_shuffle_and_fill_up)
EMULATOR_FOR_LANE_DATA(EMULATOR_FILL, simd_shuffle_and_fill_down)
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

template <class T, int rows, int columns>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 2>& thread_elements() __private { return elements; }
  vec<T, 2> elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int rows, int columns = rows>
simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private D&, __private A&, __private B&, __private C&);
template <class D, class A, class B>
void simdgroup_multiply(__private D&, __private A&, __private B&);

#define EMULATOR_MATRIX_MEMORY(space)                                                              \
  template <class T>                                                                               \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, \
                      bool = false);                                                               \
  template <class T>                                                                               \
  void simdgroup_store(__private simdgroup_matrix<T, 8, 8>&, space T*, ulong = 8, ulong2 = 0,      \
                       bool = false);
EMULATOR_MATRIX_MEMORY(__global)
EMULATOR_MATRIX_MEMORY(__local)

enum memory_order { memory_order_relaxed };
template <class T>
struct _atomic {
  T value;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<bool> atomic_bool;
typedef _atomic<int> atomic_int;
typedef _atomic<uint> atomic_uint;
typedef _atomic<ulong> atomic_ulong;
typedef _atomic<float> atomic_float;

#define EMULATOR_ATOMIC_FETCH(space, name) \
  template <class T>                       \
  T atomic_fetch_##name##_explicit(volatile space _atomic<T>*, T, memory_order);
#define EMULATOR_ATOMICS(space)                                                           \
  template <class T>                                                                      \
  T atomic_load_explicit(const volatile space _atomic<T>*, memory_order);                 \
  template <class T>                                                                      \
  void atomic_store_explicit(volatile space _atomic<T>*, T, memory_order);                \
  template <class T>                                                                      \
  T atomic_exchange_explicit(volatile space _atomic<T>*, T, memory_order);                \
  template <class T>                                                                      \
  bool atomic_compare_exchange_weak_explicit(volatile space _atomic<T>*, __private T*, T, \
                                             memory_order, memory_order);                 \
  EMULATOR_ATOMIC_FETCH(space, add)                                                       \
  EMULATOR_ATOMIC_FETCH(space, sub)                                                       \
  EMULATOR_ATOMIC_FETCH(space, max)                                                       \
  EMULATOR_ATOMIC_FETCH(space, min)                                                       \
  EMULATOR_ATOMIC_FETCH(space, and)                                                       \
  EMULATOR_ATOMIC_FETCH(space, or)                                                        \
  EMULATOR_ATOMIC_FETCH(space, xor)
EMULATOR_ATOMICS(__global)
EMULATOR_ATOMICS(__local)
#undef EMULATOR_ATOMICS
#undef EMULATOR_ATOMIC_FETCH

}  // namespace metal

using metal::mem_flags;

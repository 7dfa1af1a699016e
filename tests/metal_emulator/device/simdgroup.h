// <metal_compute> and <metal_simdgroup>: barriers and what lanes tell each other.
#pragma once

#include "abi.h"
#include "integer.h"
#include "math.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
EMULATOR_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}

EMULATOR_INLINE void threadgroup_barrier(mem_flags flags) {
  emulator::emulator_barrier(emulator::BarrierScope::threadgroup, uint(flags));
}
EMULATOR_INLINE void simdgroup_barrier(mem_flags flags) {
  emulator::emulator_barrier(emulator::BarrierScope::simdgroup, uint(flags));
}

}  // namespace metal

namespace emulator {

// Metal's simdgroup functions take no 64-bit types, no bool and no bfloat. MLX adds bfloat itself.
template <class T>
constexpr bool is_simd_data = metal::is_arithmetic_v<T> && sizeof(T) <= 4;
template <>
constexpr bool is_simd_data<bool> = false;
template <>
constexpr bool is_simd_data<bfloat> = false;
template <class T, int N>
constexpr bool is_simd_data<metal::vec<T, N>> = is_simd_data<T>;
template <class T>
using if_simd_data = metal::enable_if_t<is_simd_data<T>, int>;

namespace lanes {

EMULATOR_INLINE uint own() { return emulator_position()->lane; }

template <class T>
EMULATOR_INLINE LaneValues* exchange(const T& value, const char* operation) {
  static_assert(sizeof(T) <= kMaxExchangeBytes);
  return emulator_exchange(&value, sizeof(T), operation);
}

EMULATOR_INLINE bool is_active(const LaneValues* values, uint lane) {
  return lane < kSimdWidth && (values->active >> lane & 1);
}

EMULATOR_INLINE uint first_active(const LaneValues* values) {
  return uint(__builtin_ctz(values->active));
}

// The value of one lane. Undefined in Metal if that lane is not there: reported.
template <class T>
EMULATOR_INLINE T value_of(const LaneValues* values, uint lane, const char* operation) {
  T value;
  if (is_active(values, lane)) {
    __builtin_memcpy(&value, values->value[lane], sizeof(T));
  } else {
    emulator_report_inactive_lane(operation);
    __builtin_memset(&value, 0x7f, sizeof(T));
  }
  return value;
}

// A tree over the active lanes. The first lane to ask computes it for all.
template <class T, class Combine>
EMULATOR_INLINE T reduce(const T& own_value, const char* operation, Combine combine) {
  LaneValues* values = exchange(own_value, operation);
  T result;
  if (values->is_reduced) {
    __builtin_memcpy(&result, values->reduction, sizeof(T));
    return result;
  }
  T partial[kSimdWidth];
  bool is_there[kSimdWidth];
  for (uint i = 0; i < kSimdWidth; i++) {
    is_there[i] = is_active(values, i);
    if (is_there[i]) __builtin_memcpy(&partial[i], values->value[i], sizeof(T));
  }
  for (uint half_width = kSimdWidth / 2; half_width > 0; half_width /= 2) {
    for (uint i = 0; i < half_width; i++) {
      if (!is_there[i + half_width]) continue;
      partial[i] =
          is_there[i] ? combine(partial[i], partial[i + half_width]) : partial[i + half_width];
      is_there[i] = true;
    }
  }
  result = partial[0];
  __builtin_memcpy(values->reduction, &result, sizeof(T));
  values->is_reduced = true;
  return result;
}

// Combines the lanes before this one, and this one if `count_of_own` is 1.
template <class T, class Combine>
EMULATOR_INLINE T scan(T own_value, T start, uint count_of_own, const char* operation,
                       Combine combine) {
  const LaneValues* values = exchange(own_value, operation);
  const uint end = own() + count_of_own;
  for (uint i = 0; i < end; i++) {
    if (is_active(values, i)) start = combine(start, value_of<T>(values, i, operation));
  }
  return start;
}

template <class T>
struct WithFilling {
  T data, filling;
};

}  // namespace lanes

}  // namespace emulator

namespace metal {

#define EMULATOR_REDUCTION(name, expression)                                             \
  template <class T, emulator::if_simd_data<T> = 0>                                      \
  EMULATOR_INLINE T name(T data) {                                                       \
    return emulator::lanes::reduce(data, #name, [](T a, T b) { return T(expression); }); \
  }
EMULATOR_REDUCTION(simd_sum, a + b)
EMULATOR_REDUCTION(simd_product, a* b)
EMULATOR_REDUCTION(simd_max, max(a, b))
EMULATOR_REDUCTION(simd_min, min(a, b))
EMULATOR_REDUCTION(simd_and, a& b)
EMULATOR_REDUCTION(simd_or, a | b)
EMULATOR_REDUCTION(simd_xor, a ^ b)
#undef EMULATOR_REDUCTION

EMULATOR_INLINE bool simd_all(bool value) {
  return emulator::lanes::reduce(int(value), "simd_all", [](int a, int b) { return a & b; }) != 0;
}
EMULATOR_INLINE bool simd_any(bool value) {
  return emulator::lanes::reduce(int(value), "simd_any", [](int a, int b) { return a | b; }) != 0;
}

#define EMULATOR_SCAN(name, start, count_of_own, op)                  \
  template <class T, emulator::if_simd_data<T> = 0>                   \
  EMULATOR_INLINE T name(T data) {                                    \
    return emulator::lanes::scan(data, T(start), count_of_own, #name, \
                                 [](T a, T b) { return T(a op b); }); \
  }
EMULATOR_SCAN(simd_prefix_inclusive_sum, 0, 1, +)
EMULATOR_SCAN(simd_prefix_exclusive_sum, 0, 0, +)
EMULATOR_SCAN(simd_prefix_inclusive_product, 1, 1, *)
EMULATOR_SCAN(simd_prefix_exclusive_product, 1, 0, *)
#undef EMULATOR_SCAN

// `lane` says whose value this lane takes; `own` is this lane, `n` the argument.
#define EMULATOR_SHUFFLE(name, lane)                                             \
  template <class T, emulator::if_simd_data<T> = 0>                              \
  EMULATOR_INLINE T name(T data, ushort n) {                                     \
    const emulator::LaneValues* values = emulator::lanes::exchange(data, #name); \
    [[maybe_unused]] const uint own = emulator::lanes::own();                    \
    return emulator::lanes::value_of<T>(values, lane, #name);                    \
  }
EMULATOR_SHUFFLE(simd_broadcast, n)
EMULATOR_SHUFFLE(simd_shuffle, n)
EMULATOR_SHUFFLE(simd_shuffle_xor, own ^ n)
EMULATOR_SHUFFLE(simd_shuffle_down, own + n < 32 ? own + n : own)
EMULATOR_SHUFFLE(simd_shuffle_up, own >= n ? own - n : own)
EMULATOR_SHUFFLE(simd_shuffle_rotate_down, (own + n) % 32)
EMULATOR_SHUFFLE(simd_shuffle_rotate_up, (own - n) % 32)
EMULATOR_SHUFFLE(quad_broadcast, (own & ~3u) + n)
EMULATOR_SHUFFLE(quad_shuffle, (own & ~3u) + n)
EMULATOR_SHUFFLE(quad_shuffle_xor, own ^ (n & 3))
#undef EMULATOR_SHUFFLE

template <class T, emulator::if_simd_data<T> = 0>
EMULATOR_INLINE T simd_broadcast_first(T data) {
  const emulator::LaneValues* values = emulator::lanes::exchange(data, "simd_broadcast_first");
  return emulator::lanes::value_of<T>(values, emulator::lanes::first_active(values),
                                      "simd_broadcast_first");
}

// Shifts within segments of `modulo` lanes; lanes that come from outside take from `filling`.
template <class T, emulator::if_simd_data<T> = 0>
EMULATOR_INLINE T simd_shuffle_and_fill_down(T data, T filling, ushort delta, ushort modulo = 32) {
  const char* name = "simd_shuffle_and_fill_down";
  typedef emulator::lanes::WithFilling<T> Both;
  const emulator::LaneValues* values = emulator::lanes::exchange(Both{data, filling}, name);
  const uint from = emulator::lanes::own() % modulo + delta,
             segment = emulator::lanes::own() / modulo * modulo;
  const Both both = emulator::lanes::value_of<Both>(values, segment + from % modulo, name);
  return from < modulo ? both.data : both.filling;
}
template <class T, emulator::if_simd_data<T> = 0>
EMULATOR_INLINE T simd_shuffle_and_fill_up(T data, T filling, ushort delta, ushort modulo = 32) {
  const char* name = "simd_shuffle_and_fill_up";
  typedef emulator::lanes::WithFilling<T> Both;
  const emulator::LaneValues* values = emulator::lanes::exchange(Both{data, filling}, name);
  const uint from = emulator::lanes::own() % modulo + modulo - delta;
  const uint segment = emulator::lanes::own() / modulo * modulo;
  const Both both = emulator::lanes::value_of<Both>(values, segment + from % modulo, name);
  return from >= modulo ? both.data : both.filling;
}

#define EMULATOR_QUAD_REDUCTION(name, expression)                                            \
  template <class T, emulator::if_simd_data<T> = 0>                                          \
  EMULATOR_INLINE T name(T data) {                                                           \
    auto combine = [](T a, T b) { return T(expression); };                                   \
    const emulator::LaneValues* values = emulator::lanes::exchange(data, #name);             \
    const uint quad = emulator::lanes::own() & ~3u;                                          \
    auto at = [&](uint i) { return emulator::lanes::value_of<T>(values, quad + i, #name); }; \
    return combine(combine(at(0), at(1)), combine(at(2), at(3)));                            \
  }
EMULATOR_QUAD_REDUCTION(quad_sum, a + b)
EMULATOR_QUAD_REDUCTION(quad_max, max(a, b))
EMULATOR_QUAD_REDUCTION(quad_min, min(a, b))
#undef EMULATOR_QUAD_REDUCTION

struct simd_vote {
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t votes = 0) : votes(votes) {}
  constexpr operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == 0xffffffffu; }
  constexpr bool any() const { return votes != 0; }
  vote_t votes;
};
EMULATOR_INLINE simd_vote simd_ballot(bool value) {
  const emulator::LaneValues* values = emulator::lanes::exchange(int(value), "simd_ballot");
  ulong votes = 0;
  for (uint i = 0; i < emulator::kSimdWidth; i++) {
    if (emulator::lanes::is_active(values, i) &&
        emulator::lanes::value_of<int>(values, i, "simd_ballot"))
      votes |= ulong(1) << i;
  }
  return simd_vote(votes);
}
EMULATOR_INLINE simd_vote simd_active_threads_mask() {
  return simd_vote(emulator::lanes::exchange(0, "simd_active_threads_mask")->active);
}
EMULATOR_INLINE bool simd_is_first() {
  return emulator::lanes::first_active(emulator::lanes::exchange(0, "simd_is_first")) ==
         emulator::lanes::own();
}

}  // namespace metal

using metal::mem_flags;

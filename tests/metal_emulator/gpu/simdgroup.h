// Barriers and simdgroup functions: one opaque instruction for each word that a lane gives.
#pragma once

#include "../device/abi.h"
#include "../device/math.h"

namespace emulator::lanes {

EMULATOR_INLINE uint own() { return __builtin_amdgcn_mbcnt_lo(~0u, 0u); }

EMULATOR_INLINE uint word(uint value) {
  uint result;
  asm("; simdgroup operation %0, %1" : "=v"(result) : "v"(value));
  return result;
}
EMULATOR_INLINE uint word(uint value, uint lane) {
  uint result;
  if (__builtin_constant_p(lane)) return word(value);
  asm("; simdgroup operation %0, %1, %2" : "=v"(result) : "v"(value), "v"(lane));
  return result;
}

template <class T, class... Lane>
EMULATOR_INLINE T exchange(T value, Lane... lane) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, word(__builtin_bit_cast(uint, value), lane...));
  } else if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(T, ushort(word(uint(__builtin_bit_cast(ushort, value)), lane...)));
  } else {
    return T(ushort(word(uint(value), lane...)));
  }
}
template <class T, int N, class... Lane>
EMULATOR_INLINE metal::vec<T, N> exchange(metal::vec<T, N> value, Lane... lane) {
  metal::vec<T, N> result;
  for (int i = 0; i < N; i++) result[i] = exchange(T(value[i]), lane...);
  return result;
}

}  // namespace emulator::lanes

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
EMULATOR_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
EMULATOR_INLINE void threadgroup_barrier(mem_flags) {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
}
EMULATOR_INLINE void simdgroup_barrier(mem_flags) {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "wavefront");
}

#define EMULATOR_OF_LANES(name)              \
  template <class T>                         \
  EMULATOR_INLINE T name(T value) {          \
    return emulator::lanes::exchange(value); \
  }
EMULATOR_OF_LANES(simd_sum)
EMULATOR_OF_LANES(simd_product)
EMULATOR_OF_LANES(simd_max)
EMULATOR_OF_LANES(simd_min)
EMULATOR_OF_LANES(simd_and)
EMULATOR_OF_LANES(simd_or)
EMULATOR_OF_LANES(simd_xor)
EMULATOR_OF_LANES(simd_all)
EMULATOR_OF_LANES(simd_any)
EMULATOR_OF_LANES(simd_broadcast_first)
EMULATOR_OF_LANES(simd_prefix_inclusive_sum)
EMULATOR_OF_LANES(simd_prefix_exclusive_sum)
EMULATOR_OF_LANES(simd_prefix_inclusive_product)
EMULATOR_OF_LANES(simd_prefix_exclusive_product)
EMULATOR_OF_LANES(quad_sum)
EMULATOR_OF_LANES(quad_max)
EMULATOR_OF_LANES(quad_min)
#undef EMULATOR_OF_LANES

#define EMULATOR_SHUFFLE(name)                           \
  template <class T>                                     \
  EMULATOR_INLINE T name(T value, ushort lane) {         \
    return emulator::lanes::exchange(value, uint(lane)); \
  }
EMULATOR_SHUFFLE(simd_broadcast)
EMULATOR_SHUFFLE(simd_shuffle)
EMULATOR_SHUFFLE(simd_shuffle_xor)
EMULATOR_SHUFFLE(simd_shuffle_down)
EMULATOR_SHUFFLE(simd_shuffle_up)
EMULATOR_SHUFFLE(simd_shuffle_rotate_down)
EMULATOR_SHUFFLE(simd_shuffle_rotate_up)
EMULATOR_SHUFFLE(quad_broadcast)
EMULATOR_SHUFFLE(quad_shuffle)
EMULATOR_SHUFFLE(quad_shuffle_xor)
#undef EMULATOR_SHUFFLE

template <class T>
EMULATOR_INLINE T simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort = 32) {
  return emulator::lanes::own() + delta < 32 ? simd_shuffle_down(value, delta) : filling;
}
template <class T>
EMULATOR_INLINE T simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort = 32) {
  return emulator::lanes::own() >= delta ? simd_shuffle_up(value, delta) : filling;
}

struct simd_vote {
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t votes = 0) : votes(votes) {}
  constexpr operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == 0xffffffffu; }
  constexpr bool any() const { return votes != 0; }
  vote_t votes;
};
EMULATOR_INLINE simd_vote simd_ballot(bool value) {
  return simd_vote(emulator::lanes::word(uint(value)));
}
EMULATOR_INLINE bool simd_is_first() { return emulator::lanes::own() == 0; }

}  // namespace metal

using metal::mem_flags;

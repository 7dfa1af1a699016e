// <metal_atomic>. Threads take turns only at barriers and simdgroup operations, so plain memory
// operations are atomic here; what a GPU's memory orders mean cannot be seen.
#pragma once

#include "abi.h"
#include "integer.h"
#include "math.h"

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

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

}  // namespace metal

namespace emulator::atomics {

using metal::_atomic;

// With builtin atomics, which the compiler's instrumentation leaves alone.
template <class T>
EMULATOR_INLINE T load(const volatile _atomic<T>* object) {
  T value;
  __atomic_load(const_cast<T*>(&object->value), &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
EMULATOR_INLINE void store(volatile _atomic<T>* object, T value) {
  __atomic_store(const_cast<T*>(&object->value), &value, __ATOMIC_RELAXED);
}
template <class T>
EMULATOR_INLINE void announce(const volatile _atomic<T>* object, bool loads, bool stores) {
  emulator_atomic_access(object, sizeof(T), loads, stores);
}

}  // namespace emulator::atomics

namespace metal {

template <class T>
EMULATOR_INLINE T atomic_load_explicit(const volatile _atomic<T>* object, memory_order) {
  emulator::atomics::announce(object, true, false);
  return emulator::atomics::load(object);
}

template <class T>
EMULATOR_INLINE void atomic_store_explicit(volatile _atomic<T>* object, T value, memory_order) {
  emulator::atomics::announce(object, false, true);
  emulator::atomics::store(object, value);
}

template <class T>
EMULATOR_INLINE T atomic_exchange_explicit(volatile _atomic<T>* object, T value, memory_order) {
  emulator::atomics::announce(object, true, true);
  const T old = emulator::atomics::load(object);
  emulator::atomics::store(object, value);
  return old;
}

template <class T>
EMULATOR_INLINE bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* object, T* expected,
                                                           T desired, memory_order, memory_order) {
  emulator::atomics::announce(object, true, true);
  const T old = emulator::atomics::load(object);
  const bool is_expected = __builtin_memcmp(&old, expected, sizeof(T)) == 0;
  if (is_expected) emulator::atomics::store(object, desired);
  *expected = old;
  return is_expected;
}

#define EMULATOR_ATOMIC_FETCH(name, expression)                                            \
  template <class T>                                                                       \
  EMULATOR_INLINE T atomic_fetch_##name##_explicit(volatile _atomic<T>* object, T operand, \
                                                   memory_order) {                         \
    emulator::atomics::announce(object, true, true);                                       \
    const T old = emulator::atomics::load(object);                                         \
    emulator::atomics::store(object, T(expression));                                       \
    return old;                                                                            \
  }
EMULATOR_ATOMIC_FETCH(add, old + operand)
EMULATOR_ATOMIC_FETCH(sub, old - operand)
EMULATOR_ATOMIC_FETCH(max, max(old, operand))
EMULATOR_ATOMIC_FETCH(min, min(old, operand))
EMULATOR_ATOMIC_FETCH(and, old& operand)
EMULATOR_ATOMIC_FETCH(or, old | operand)
EMULATOR_ATOMIC_FETCH(xor, old ^ operand)
#undef EMULATOR_ATOMIC_FETCH

template <class... Arguments>
EMULATOR_INLINE void atomic_thread_fence(Arguments...) {}

}  // namespace metal

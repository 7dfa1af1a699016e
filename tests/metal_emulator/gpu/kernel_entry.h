// A kernel's entry: pointers are device memory, references constant memory.
#pragma once

#include "../device/abi.h"
#include "../device/vector.h"

namespace emulator {

// What the host passes for a parameter of type T.
template <class T>
struct Wire {
  typedef uint type;  // nothing: the GPU fills it in
};
template <class T>
struct Wire<T*> {
  typedef __attribute__((address_space(1))) T* type;
};
template <class T>
struct Wire<T&> {
  typedef __attribute__((address_space(4))) T* type;
};

template <class T>
EMULATOR_INLINE T from_coordinates(uint x, uint y, uint z) {
  if constexpr (element_count<T>::value == 1) {
    return T(x);
  } else if constexpr (element_count<T>::value == 2) {
    return T(x, y);
  } else {
    return T(x, y, z);
  }
}

EMULATOR_INLINE uint size_of_threadgroup(int axis) {
  auto* sizes = (const __attribute__((address_space(4))) ushort*)__builtin_amdgcn_implicitarg_ptr();
  return sizes[6 + axis];
}
EMULATOR_INLINE uint groups_in_grid(int axis) {
  auto* counts = (const __attribute__((address_space(4))) uint*)__builtin_amdgcn_implicitarg_ptr();
  return counts[axis];
}
template <class T>
EMULATOR_INLINE T builtin_value(int builtin) {
  const uint thread[3] = {__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
                          __builtin_amdgcn_workitem_id_z()};
  const uint group[3] = {__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
                         __builtin_amdgcn_workgroup_id_z()};
  const uint sizes[3] = {size_of_threadgroup(0), size_of_threadgroup(1), size_of_threadgroup(2)};
  const uint groups[3] = {groups_in_grid(0), groups_in_grid(1), groups_in_grid(2)};
  const uint index = thread[0] + sizes[0] * (thread[1] + sizes[1] * thread[2]);
  // The same for all lanes, and in a scalar register as such.
  const uint simdgroup = __builtin_amdgcn_readfirstlane(index / kSimdWidth);
  switch (builtin) {
    case thread_position_in_threadgroup:
      return from_coordinates<T>(thread[0], thread[1], thread[2]);
    case thread_position_in_grid:
      return from_coordinates<T>(group[0] * sizes[0] + thread[0], group[1] * sizes[1] + thread[1],
                                 group[2] * sizes[2] + thread[2]);
    case threadgroup_position_in_grid:
      return from_coordinates<T>(group[0], group[1], group[2]);
    case threads_per_threadgroup:
    case dispatch_threads_per_threadgroup:
      return from_coordinates<T>(sizes[0], sizes[1], sizes[2]);
    case threadgroups_per_grid:
      return from_coordinates<T>(groups[0], groups[1], groups[2]);
    case threads_per_grid:
      return from_coordinates<T>(groups[0] * sizes[0], groups[1] * sizes[1], groups[2] * sizes[2]);
    case thread_index_in_threadgroup:
      return from_coordinates<T>(index, 0, 0);
    case thread_index_in_simdgroup:
      return from_coordinates<T>(lanes::own(), 0, 0);
    case simdgroup_index_in_threadgroup:
      return from_coordinates<T>(simdgroup, 0, 0);
    case simdgroups_per_threadgroup:
      return from_coordinates<T>(sizes[0] * sizes[1] * sizes[2] / kSimdWidth, 0, 0);
    case threads_per_simdgroup:
      return from_coordinates<T>(kSimdWidth, 0, 0);
    case quadgroup_index_in_threadgroup:
      return from_coordinates<T>(index / 4, 0, 0);
    case thread_index_in_quadgroup:
      return from_coordinates<T>(lanes::own() % 4, 0, 0);
  }
  __builtin_trap();
}

extern __attribute__((address_space(3))) char threadgroup_memory[];

template <class T>
struct Argument {
  EMULATOR_INLINE static T get(uint, const Parameter& parameter) {
    return builtin_value<T>(parameter.index);
  }
};
template <class T>
struct Argument<T*> {
  EMULATOR_INLINE static T* get(typename Wire<T*>::type pointer, const Parameter& parameter) {
    const bool is_device = parameter.kind == ParameterKind::buffer;
    return is_device ? (T*)pointer : (T*)(void*)threadgroup_memory;
  }
};
template <class T>
struct Argument<T&> {
  EMULATOR_INLINE static T& get(typename Wire<T&>::type pointer, const Parameter&) {
    return *(T*)pointer;
  }
};

template <int... indices>
struct IndexSequence {};
template <class, int... indices>
using IntegerSequence = IndexSequence<indices...>;

template <auto kernel>
struct Entry;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Entry<kernel> {
  static constexpr int parameter_count = sizeof...(Parameters);

  template <int... indices>
  EMULATOR_INLINE static void call(const Parameter* rows, IndexSequence<indices...>,
                                   typename Wire<Parameters>::type... arguments) {
    [[clang::always_inline]] kernel(Argument<Parameters>::get(arguments, rows[indices])...);
  }
  template <class Rows>
  __attribute__((amdgpu_kernel)) static void run(typename Wire<Parameters>::type... arguments) {
    call(Rows::rows(), __make_integer_seq<IntegerSequence, int, parameter_count>(), arguments...);
  }
};

// A `threadgroup` variable of type T.
template <int id, class T>
__attribute__((address_space(3), loader_uninitialized)) T threadgroup_storage;
template <int id, class T>
EMULATOR_INLINE T& threadgroup_variable() {
  return *(T*)&threadgroup_storage<id, T>;
}

}  // namespace emulator

#define EMULATOR_KERNEL(id, name, function, parameters)   \
  [[gnu::used]] static auto* const emulator_kernel_##id = \
      &emulator::Entry<function>::run<parameters<emulator::Entry<function>::parameter_count>>;

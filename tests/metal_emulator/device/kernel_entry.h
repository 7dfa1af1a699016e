// How the runtime calls a kernel: the translated source lists each kernel's parameters and
// registers it with EMULATOR_KERNEL.
#pragma once

#include "abi.h"
#include "vector.h"

namespace emulator {

// Every compiled library has its own list.
static const Kernel* first_kernel = nullptr;

struct RegisteredKernel : Kernel {
  RegisteredKernel(const char* name, void (*run)(const Parameter*), const Parameter* parameters,
                   int count)
      : Kernel{name, run, parameters, count, first_kernel} {
    first_kernel = this;
  }
};

extern "C" __attribute__((visibility("default"), used)) inline const Kernel* emulator_kernels() {
  return first_kernel;
}

inline bool is_present(const Parameter& parameter) {
  return !parameter.is_present || parameter.is_present();
}

// Scalars take the first of three coordinates, vectors as many as they have.
template <class T>
T from_coordinates(unsigned x, unsigned y, unsigned z) {
  if constexpr (element_count<T>::value == 1) {
    return T(x);
  } else if constexpr (element_count<T>::value == 2) {
    return T(x, y);
  } else {
    return T(x, y, z);
  }
}
template <class T>
T from_coordinates(const unsigned (&v)[3]) {
  return from_coordinates<T>(v[0], v[1], v[2]);
}

template <class T>
T builtin_value(int builtin) {
  const ThreadPosition& p = *emulator_position();
  switch (builtin) {
    case thread_position_in_threadgroup:
      return from_coordinates<T>(p.thread_in_threadgroup);
    case thread_position_in_grid: {
      unsigned v[3];
      for (int i = 0; i < 3; i++) {
        v[i] = p.threadgroup_in_grid[i] * p.dispatch_threads_per_threadgroup[i] +
               p.thread_in_threadgroup[i];
      }
      return from_coordinates<T>(v);
    }
    case threadgroup_position_in_grid:
      return from_coordinates<T>(p.threadgroup_in_grid);
    case threads_per_threadgroup:
      return from_coordinates<T>(p.threads_per_threadgroup);
    case dispatch_threads_per_threadgroup:
      return from_coordinates<T>(p.dispatch_threads_per_threadgroup);
    case threadgroups_per_grid:
      return from_coordinates<T>(p.threadgroups_per_grid);
    case threads_per_grid:
      return from_coordinates<T>(p.threads_per_grid);
    case thread_index_in_threadgroup:
      return from_coordinates<T>(p.index_in_threadgroup, 0, 0);
    case thread_index_in_simdgroup:
      return from_coordinates<T>(p.lane, 0, 0);
    case simdgroup_index_in_threadgroup:
      return from_coordinates<T>(p.simdgroup, 0, 0);
    case simdgroups_per_threadgroup:
      return from_coordinates<T>(p.simdgroups_per_threadgroup, 0, 0);
    case threads_per_simdgroup:
      return from_coordinates<T>(kSimdWidth, 0, 0);
    case quadgroup_index_in_threadgroup:
      return from_coordinates<T>(p.index_in_threadgroup / 4, 0, 0);
    case thread_index_in_quadgroup:
      return from_coordinates<T>(p.lane % 4, 0, 0);
  }
  __builtin_trap();
}

// The value of a kernel parameter of type T.
template <class T>
struct Argument {
  static T get(const Parameter& parameter) { return builtin_value<T>(parameter.index); }
};
template <class T>
struct Argument<T*> {
  static T* get(const Parameter& parameter) {
    if (parameter.kind == ParameterKind::threadgroup_memory) {
      return static_cast<T*>(emulator_threadgroup_memory(parameter.index));
    }
    return (T*)emulator_buffer(parameter.index, is_present(parameter));
  }
};
template <class T>
struct Argument<T&> {
  static T& get(const Parameter& parameter) {
    return *(T*)emulator_reference(parameter.index, sizeof(T), is_present(parameter));
  }
};

template <int... indices>
struct IndexSequence {};

template <auto kernel>
struct Entry;
template <class... Parameters, void (*kernel)(Parameters...)>
struct Entry<kernel> {
  static constexpr int parameter_count = sizeof...(Parameters);

  template <int... indices>
  static void call(const Parameter* parameters, IndexSequence<indices...>) {
    kernel(Argument<Parameters>::get(parameters[indices])...);
  }
  static void run(const Parameter* parameters) {
    call(parameters, __make_integer_seq<IntegerSequence, int, parameter_count>());
  }

 private:
  template <class, int... indices>
  using IntegerSequence = IndexSequence<indices...>;
};

// A `threadgroup` variable of type T. `id` tells it from the library's others.
template <int id, class T>
EMULATOR_INLINE T& threadgroup_variable() {
  return *(T*)emulator_threadgroup_variable(id, sizeof(T), alignof(T));
}

template <class T>
T function_constant(int id) {
  T value{};
  emulator_function_constant(id, metal::is_floating_point_v<T> ? 'f' : 'i', sizeof(T), &value);
  return value;
}

}  // namespace emulator

// `parameters<n>` is the table for the overload of n parameters.
#define EMULATOR_KERNEL(id, name, function, parameters)               \
  static const emulator::RegisteredKernel emulator_kernel_##id(       \
      name, &emulator::Entry<function>::run,                          \
      parameters<emulator::Entry<function>::parameter_count>::rows(), \
      emulator::Entry<function>::parameter_count);

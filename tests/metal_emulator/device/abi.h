// What compiled kernels and the runtime know about each other. Both include it, so it includes
// nothing: kernels must not see names that Metal does not have.
#pragma once

namespace emulator {

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxExchangeBytes = 64;

// What the lanes of one simdgroup published in one simdgroup operation.
struct LaneValues {
  const void* value[kSimdWidth];
  unsigned active;  // one bit per lane
  bool is_reduced;  // whether `reduction` holds the result: computed once per simdgroup
  alignas(16) char reduction[kMaxExchangeBytes];
};

struct ThreadPosition {
  unsigned thread_in_threadgroup[3];
  unsigned threadgroup_in_grid[3];
  unsigned threads_per_threadgroup[3];           // smaller in a partial threadgroup
  unsigned dispatch_threads_per_threadgroup[3];  // as launched
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned index_in_threadgroup;
  unsigned lane;
  unsigned simdgroup;
  unsigned simdgroups_per_threadgroup;
};

enum class ParameterKind : int { buffer, threadgroup_memory, builtin };

enum Builtin : int {
  thread_position_in_threadgroup,
  thread_position_in_grid,
  threadgroup_position_in_grid,
  threads_per_threadgroup,
  dispatch_threads_per_threadgroup,
  threadgroups_per_grid,
  threads_per_grid,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  threads_per_simdgroup,
  quadgroup_index_in_threadgroup,
  thread_index_in_quadgroup,
};

// One parameter of a kernel function.
struct Parameter {
  ParameterKind kind;
  int index;             // of the buffer, of the threadgroup memory, or a Builtin
  bool (*is_present)();  // its function_constant(...) condition; null: always present
};

struct Kernel {
  const char* name;
  void (*run)(const Parameter*);
  const Parameter* parameters;
  int parameter_count;
  const Kernel* next;
};

enum class BarrierScope : int { simdgroup, threadgroup };

constexpr unsigned kDeviceMemory = 1;       // mem_flags::mem_device
constexpr unsigned kThreadgroupMemory = 2;  // mem_flags::mem_threadgroup

extern "C" {
// Publishes `size` bytes and waits for the other lanes of the simdgroup. `convergent` keeps the
// optimiser from duplicating a call, which would look like divergence.
LaneValues* emulator_exchange(const void* data, unsigned size, const char* operation)
    __attribute__((convergent));
void emulator_barrier(BarrierScope scope, unsigned memory) __attribute__((convergent));

const ThreadPosition* emulator_position();
void* emulator_buffer(int index, bool is_present);
void* emulator_reference(int index, unsigned long size, bool is_present);
void* emulator_threadgroup_memory(int index);
void* emulator_threadgroup_variable(int id, unsigned long size, unsigned long alignment);
// Writes the constant's value, converted to the type that `type` and `size` name, to `value`.
void emulator_function_constant(int id, char type, unsigned size, void* value);

void emulator_report_inactive_lane(const char* operation);
void emulator_report_undefined(const char* what);
void emulator_report_assertion(const char* text);
// Atomics are not instrumented by the compiler; they tell about themselves.
void emulator_atomic_access(const volatile void* address, unsigned size, bool loads, bool stores);
}

}  // namespace emulator

// What compiled kernels call; declared in device/abi.h.
#include <cstring>
#include <string>

#include "export.h"
#include "function_constants.h"
#include "launch.h"

namespace emulator {
extern "C" {

EMULATOR_EXPORT LaneValues* emulator_exchange(const void* data, unsigned size,
                                              const char* operation) {
  Thread& thread = *current_launch->running;
  current_launch->check_time(__builtin_return_address(0));
  thread.publish(data, size);
  thread.is_barrier = false;
  thread.wait(ThreadState::at_simdgroup_operation, __builtin_return_address(0), operation);
  return &thread.simdgroup->values;
}

EMULATOR_EXPORT void emulator_barrier(BarrierScope scope, unsigned memory) {
  Thread& thread = *current_launch->running;
  current_launch->check_time(__builtin_return_address(0));
  const bool is_simdgroup = scope == BarrierScope::simdgroup;
  thread.is_barrier = true;
  thread.barrier_memory = memory;
  thread.wait(
      is_simdgroup ? ThreadState::at_simdgroup_operation : ThreadState::at_threadgroup_barrier,
      __builtin_return_address(0), is_simdgroup ? "simdgroup_barrier" : "threadgroup_barrier");
}

EMULATOR_EXPORT const ThreadPosition* emulator_position() {
  return &current_launch->running->position;
}

EMULATOR_EXPORT void* emulator_buffer(int index, bool is_present) {
  const DeviceBuffers& buffers = current_launch->buffers;
  return is_present && buffers[index].is_bound ? buffers[index].begin
                                               : buffers.unbound_buffer(index);
}

EMULATOR_EXPORT void* emulator_reference(int index, unsigned long size, bool is_present) {
  Launch& launch = *current_launch;
  if (!is_present) return launch.buffers.unbound_reference();
  const Buffer& buffer = launch.buffers[index];
  if (buffer.is_bound && buffer.size >= size) return buffer.begin;
  launch.findings.report(buffer.is_bound ? kind::out_of_bounds : kind::unbound, nullptr, [&] {
    return "buffer " + std::to_string(index) + " is a reference to " + std::to_string(size) +
           " bytes, bound are " + std::to_string(buffer.size);
  });
  return launch.buffers.unbound_reference();
}

EMULATOR_EXPORT void* emulator_threadgroup_memory(int index) {
  const Launch& launch = *current_launch;
  char* memory = launch.arena.dynamic_memory(index);
  return memory ? memory : launch.buffers.unbound_threadgroup_memory(index);
}

EMULATOR_EXPORT void* emulator_threadgroup_variable(int id, unsigned long size,
                                                    unsigned long alignment) {
  char* memory = current_launch->arena.variable(id, size, alignment);
  if (!memory) current_launch->abandon();  // the launch's byte limit reports it
  return memory;
}

EMULATOR_EXPORT void emulator_function_constant(int id, char type, unsigned size, void* value) {
  function_constants::read(id, type, size, value);
}

EMULATOR_EXPORT void emulator_report_inactive_lane(const char* operation) {
  Launch& launch = *current_launch;
  launch.findings.report(kind::inactive_lane, __builtin_return_address(0),
                         [&] { return std::string(operation) + " by " + launch.running->name(); });
}

EMULATOR_EXPORT void emulator_report_undefined(const char* what) {
  Launch& launch = *current_launch;
  launch.findings.report(kind::undefined, __builtin_return_address(0),
                         [&] { return std::string(what) + " by " + launch.running->name(); });
}

EMULATOR_EXPORT void emulator_report_assertion(const char* text) {
  Launch& launch = *current_launch;
  launch.findings.report(kind::assertion, __builtin_return_address(0),
                         [&] { return std::string(text) + "; " + launch.running->name(); });
}

EMULATOR_EXPORT void emulator_atomic_access(const volatile void* address, unsigned size, bool loads,
                                            bool stores) {
  AccessMonitor* monitor = current_launch->monitor.get();
  if (!monitor) return;
  const char* place = const_cast<const char*>(static_cast<const volatile char*>(address));
  if (loads) monitor->check({place, size, false, true, __builtin_return_address(0)});
  if (stores) monitor->check({place, size, true, true, __builtin_return_address(0)});
}

}  // extern "C"
}  // namespace emulator

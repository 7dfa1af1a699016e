// One GPU thread: its position, its fiber and what it waits for.
#pragma once

#include <cstring>
#include <string>

#include "../device/abi.h"
#include "fiber.h"

namespace emulator {

class Simdgroup;

enum class ThreadState { ready, at_simdgroup_operation, at_threadgroup_barrier, returned };

class Thread {
 public:
  // Stops the thread at `site` of the kernel until the scheduler makes it ready again.
  void wait(ThreadState reason, const void* site, const char* operation) {
    this->state = reason;
    this->site = site;
    this->operation = operation;
    fiber.suspend();
  }

  // Two alternating slots: a lane may publish its next value before the others have read this one.
  void publish(const void* data, unsigned size) {
    slot_ ^= 1;
    memcpy(slots_[slot_], data, size);
  }
  const void* published() const { return slots_[slot_]; }

  std::string name() const;

  ThreadPosition position;
  Fiber fiber;
  ThreadState state;
  const void* site;
  const char* operation;
  bool is_barrier;          // whether the simdgroup operation is a simdgroup_barrier
  unsigned barrier_memory;  // mem_flags of the barrier
  Simdgroup* simdgroup;

 private:
  int slot_ = 0;
  alignas(16) char slots_[2][kMaxExchangeBytes];
};

}  // namespace emulator

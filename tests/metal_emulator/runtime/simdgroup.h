// 32 consecutive threads that meet in simdgroup operations.
#pragma once

#include <vector>

#include "thread.h"

namespace emulator {

struct Launch;

// How many barriers have ordered each kind of memory.
struct BarrierCounts {
  void pass(unsigned memory) {
    if (memory & kThreadgroupMemory) threadgroup_memory++;
    if (memory & kDeviceMemory) device_memory++;
  }
  unsigned threadgroup_memory = 0;
  unsigned device_memory = 0;
};

class Simdgroup {
 public:
  void start(Launch* launch, Thread* first, int size);
  // Runs the lanes until each has reached a threadgroup barrier or returned.
  void run();

  LaneValues values;
  BarrierCounts barriers;

 private:
  void run_ready_lanes();
  // Whether any lane waits in a simdgroup operation; lets those at the same place proceed.
  bool complete_operation();
  void report_missing_lanes(const std::vector<Thread*>& present) const;

  Launch* launch_;
  std::vector<Thread*> lanes_;
};

}  // namespace emulator

// Everything that one launch of a kernel needs.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "access_monitor.h"
#include "arena.h"
#include "device_buffers.h"
#include "findings.h"
#include "image.h"
#include "order.h"
#include "threadgroup.h"

namespace emulator {

// The threadgroups and threads of a launch.
struct LaunchShape {
  unsigned threads_per_threadgroup() const {
    return threadgroup[0] * threadgroup[1] * threadgroup[2];
  }
  unsigned threadgroups() const {
    return threadgroups_per_grid[0] * threadgroups_per_grid[1] * threadgroups_per_grid[2];
  }
  // The position of the first thread of a threadgroup.
  ThreadPosition first_thread(unsigned threadgroup_index) const;

  unsigned threadgroup[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
};

struct LaunchCounts {
  uint64_t threadgroups = 0;
  uint64_t threads = 0;
  uint64_t barriers = 0;                // threadgroup_barrier, once per threadgroup
  uint64_t simdgroup_barriers = 0;      // simdgroup_barrier, once per simdgroup
  uint64_t simd_operations = 0;         // simd_sum, simd_shuffle, ..., once per simdgroup
  uint64_t simd_reductions = 0;         // those of them that combine all lanes: simd_sum, ...
  uint64_t matrix_multiplications = 0;  // those of them that multiply 8x8 matrices
  uint64_t matrix_accesses = 0;         // those of them that load or store one
};

struct Launch {
  Launch(const Kernel* kernel, const LaunchShape& shape, std::vector<size_t> threadgroup_bytes,
         std::optional<uint64_t> seed, StackPool* stacks);

  // Runs all threadgroups; returns early after a fault, which is among the findings.
  void run(bool watch_accesses, unsigned threadgroup_limit, double cpu_seconds);
  // Gives up from within a kernel thread, once the reason has been reported.
  [[noreturn]] void abandon();
  // Gives up if the kernel has used its time.
  void check_time(const void* site) {
    if (is_overdue) abandon_overdue(site);
  }

  const Kernel* kernel;
  LaunchShape shape;
  StackPool* stacks;
  Image image;
  DeviceBuffers buffers;
  Arena arena;
  Order order;
  Findings findings;
  LaunchCounts counts;
  std::unique_ptr<AccessMonitor> monitor;  // null unless accesses are watched
  std::unique_ptr<Threadgroup> threadgroup;
  Thread* running = nullptr;
  sigjmp_buf escape;
  volatile sig_atomic_t is_overdue = 0;

 private:
  void run_threadgroups();
  [[noreturn]] void abandon_overdue(const void* site);
  void report_overruns();

  std::vector<unsigned> turns_;  // a member, because a fault jumps past destructors
};

// The launch that is running. There is never more than one.
extern Launch* current_launch;

}  // namespace emulator

// The threadgroup that is running: threadgroups run one after another, each to its end.
#pragma once

#include <vector>

#include "simdgroup.h"

namespace emulator {

class Threadgroup {
 public:
  explicit Threadgroup(Launch* launch);
  void run(unsigned index);

  unsigned index = 0;  // within the grid
  BarrierCounts barriers;

  // The memory of the threads and simdgroups themselves, which kernels touch in simd functions.
  bool owns(const char* address) const;

 private:
  void start();
  // Whether any thread waits at a barrier; lets them all proceed.
  bool complete_barrier();

  Launch* launch_;
  std::vector<Thread> threads_;
  std::vector<Simdgroup> simdgroups_;
  std::vector<Simdgroup*> turns_;
  size_t size_ = 0;  // threads of this threadgroup; fewer than launched where the grid ends
};

}  // namespace emulator

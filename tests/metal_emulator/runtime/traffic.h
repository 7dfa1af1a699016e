// Bytes that a launch loads from and stores to one device buffer.
#pragma once

#include <cstdint>

namespace emulator {

// `loaded` and `stored` add up what every thread asks for. The distinct counts take each byte of
// the buffer once per simdgroup, once per threadgroup, or once per launch.
struct TrafficCounts {
  uint64_t loaded = 0;
  uint64_t stored = 0;
  uint64_t distinct_per_simdgroup = 0;
  uint64_t distinct_per_threadgroup = 0;
  uint64_t distinct_per_launch = 0;
};

// The simdgroups of the latest threadgroup that loaded some bytes. A threadgroup runs to its end
// before the next begins, so remembering one is enough.
class Readers {
 public:
  void count(uint64_t bytes, unsigned threadgroup, unsigned simdgroup, TrafficCounts& counts) {
    if (threadgroup_plus_one_ != threadgroup + 1) {
      if (threadgroup_plus_one_ == 0) counts.distinct_per_launch += bytes;
      counts.distinct_per_threadgroup += bytes;
      threadgroup_plus_one_ = threadgroup + 1;
      simdgroups_ = 0;
    }
    const uint32_t bit = uint32_t{1} << simdgroup;
    if (!(simdgroups_ & bit)) counts.distinct_per_simdgroup += bytes;
    simdgroups_ |= bit;
  }

 private:
  uint32_t threadgroup_plus_one_ = 0;
  uint32_t simdgroups_ = 0;  // one bit each
};

}  // namespace emulator

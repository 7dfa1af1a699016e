// The lines of device memory that the lanes of a simdgroup touch with one instruction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../device/abi.h"
#include "device_buffers.h"

namespace emulator {

constexpr size_t kLineBytes = 128;

// Instructions that a simdgroup executed on one buffer, and the lines that each of them touched,
// added up. A buffer begins with a line.
struct LineCounts {
  uint64_t load_instructions = 0;
  uint64_t loaded_lines = 0;
  uint64_t store_instructions = 0;
  uint64_t stored_lines = 0;
};

// Lanes run one after another until they meet. The n-th time that one of them comes to an
// instruction in between is taken to be the n-th time of them all.
class LineCounter {
 public:
  // `lane` accesses bytes [first, end) of a buffer.
  void touch(const void* site, unsigned lane, int buffer, bool is_store, size_t first, size_t end);
  // The lanes have met: what they do next are other instructions.
  void meet();
  const LineCounts& counts(int buffer) const { return counts_[buffer]; }

 private:
  struct Instruction {
    int buffer;
    bool is_store;
    size_t executions = 0;
    std::array<unsigned, kSimdWidth> executions_of_lane{};
    std::vector<std::vector<size_t>> lines;  // of each execution
  };

  std::array<LineCounts, kMaxBuffers> counts_;
  std::unordered_map<size_t, Instruction> instructions_;  // by site, buffer and kind
  std::vector<Instruction*> executed_;                    // since the lanes last met
};

}  // namespace emulator

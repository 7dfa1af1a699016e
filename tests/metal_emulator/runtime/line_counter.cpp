#include "line_counter.h"

#include <algorithm>

namespace emulator {

void LineCounter::touch(const void* site, unsigned lane, int buffer, bool is_store, size_t first,
                        size_t end) {
  static_assert(2 * kMaxBuffers < 1 << 8);
  const size_t key = reinterpret_cast<size_t>(site) << 8 | size_t(buffer) << 1 | is_store;
  Instruction& instruction = instructions_[key];
  if (instruction.executions == 0) {
    instruction.buffer = buffer;
    instruction.is_store = is_store;
    executed_.push_back(&instruction);
  }
  const size_t execution = instruction.executions_of_lane[lane]++;
  instruction.executions = std::max(instruction.executions, execution + 1);
  if (instruction.lines.size() <= execution) instruction.lines.emplace_back();
  std::vector<size_t>& lines = instruction.lines[execution];
  for (size_t line = first / kLineBytes; line * kLineBytes < end; line++) {
    const bool is_known = std::find(lines.rbegin(), lines.rend(), line) != lines.rend();
    if (!is_known) lines.push_back(line);
  }
}

void LineCounter::meet() {
  for (Instruction* instruction : executed_) {
    LineCounts& counts = counts_[instruction->buffer];
    (instruction->is_store ? counts.store_instructions : counts.load_instructions) +=
        instruction->executions;
    for (size_t i = 0; i < instruction->executions; i++) {
      (instruction->is_store ? counts.stored_lines : counts.loaded_lines) +=
          instruction->lines[i].size();
      instruction->lines[i].clear();
    }
    instruction->executions = 0;
    instruction->executions_of_lane.fill(0);
  }
  executed_.clear();
}

}  // namespace emulator

// Memory for the packed rows of a linear layer, and how its columns are divided among threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlx_paged::cpu {

// The fewest products of a task: for fewer, waking a thread costs more than it saves.
inline constexpr int64_t kProductsOfTask = 1 << 16;

// To read a weight costs as much as its products with this many rows.
inline constexpr int64_t kRowsOfRead = 8;

// The most tasks for each thread. Tasks are few, because no pass has prefetched the first weights
// of a task.
inline constexpr int64_t kTasksOfThread = 2;

// Memory of a thread for packed rows, at the start of a cache line. It stays for the next layer.
inline float* packed_rows(size_t count) {
  struct alignas(64) Line {
    float floats[16];
  };
  static thread_local std::vector<Line> memory;
  memory.resize(std::max(memory.size(), count / 16 + 1));
  return memory[0].floats;
}

}  // namespace mlx_paged::cpu

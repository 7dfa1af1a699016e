// One stack per GPU thread and the switch between them.
#pragma once

#include <cstddef>

namespace emulator {

class Fiber {
 public:
  void place(char* stack_top) { stack_top_ = stack_top; }
  // The next resume() calls `entry`, which must never return.
  void start(void (*entry)());
  // Runs the fiber until it suspends itself.
  void resume();
  // Called on the fiber: returns control to its resume().
  void suspend();

 private:
  char* stack_top_ = nullptr;
  void* own_ = nullptr;     // saved stack pointer of the fiber
  void* caller_ = nullptr;  // saved stack pointer of whoever resumed it
};

// Stacks for up to 1024 threads, each ending in an inaccessible page. Pages that are never
// touched cost nothing.
class StackPool {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;
  static constexpr size_t kGuardBytes = 4096;
  static constexpr int kStacks = 1024;

  StackPool();
  char* top(int index) const;
  bool contains(const char* address) const;
  bool is_guard(const char* address) const;

 private:
  char* base_;
};

}  // namespace emulator

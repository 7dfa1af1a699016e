// The threadgroup memory of the running threadgroup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

class Arena {
 public:
  static constexpr size_t kCapacity = 256 * 1024;  // far above any GPU's, to report by how much
  static constexpr size_t kRedZone = 64;           // between variables
  static constexpr size_t kAlignment = 16;

  // `dynamic_bytes[i]` is the size of [[threadgroup(i)]]; 0: not given.
  explicit Arena(std::vector<size_t> dynamic_bytes);
  ~Arena();
  Arena(const Arena&) = delete;

  // Empties the arena and fills it with NaN patterns.
  void reset();
  // Null if there is no such threadgroup memory.
  char* dynamic_memory(int index) const;
  // A `threadgroup` variable of the kernel. Null if the arena is full.
  char* variable(int id, size_t bytes, size_t alignment);

  bool contains(const char* address) const {
    return address >= memory_ && address < memory_ + kCapacity;
  }
  size_t offset(const char* address) const { return address - memory_; }
  bool is_allocated(size_t offset) const { return allocated_[offset]; }
  // What the GPU would allocate at most, without the red zones.
  size_t peak_bytes() const { return peak_bytes_; }

 private:
  char* place(size_t bytes, size_t alignment);

  std::vector<size_t> dynamic_bytes_;
  std::vector<char*> dynamic_memory_;
  std::vector<char*> variables_;  // by id; null: not yet placed in this threadgroup
  char* memory_;
  std::vector<bool> allocated_;
  size_t used_ = 0;
  size_t bytes_ = 0;
  size_t peak_bytes_ = 0;
};

}  // namespace emulator

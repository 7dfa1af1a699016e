// The address range of the shared library that a kernel was compiled to.
#pragma once

namespace emulator {

class Image {
 public:
  // The library that holds `address`.
  explicit Image(const void* address);
  bool contains(const char* address) const { return address >= begin_ && address < end_; }
  const char* begin() const { return begin_; }

 private:
  const char* begin_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace emulator

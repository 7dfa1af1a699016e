// Copies of the caller's arrays, each between inaccessible pages.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>

namespace emulator {

constexpr int kMaxBuffers = 31;  // Metal's limit
constexpr int kMaxThreadgroupBuffers = 31;

struct Buffer {
  bool contains(const char* address) const { return address >= begin && address < begin + size; }
  bool is_near(const char* address) const {
    return address >= mapping && address < mapping + mapping_size;
  }

  char* begin = nullptr;
  size_t size = 0;
  bool is_bound = false;
  int alias_of = -1;  // another index with this memory
  void* source = nullptr;
  char* body = nullptr;  // whole pages that hold the buffer
  size_t body_size = 0;
  char* mapping = nullptr;
  size_t mapping_size = 0;
  bool is_writable = false;
};

class DeviceBuffers {
 public:
  DeviceBuffers();
  ~DeviceBuffers();
  DeviceBuffers(const DeviceBuffers&) = delete;

  // A copy whose end abuts an inaccessible page, up to the 15 bytes that 16-byte alignment needs.
  void bind(int index, void* data, size_t size, bool is_writable);
  // `index` sees `size` bytes from `data` on of what `other` is a copy of, as when an array is both
  // input and output, or two arrays are columns of one.
  void bind_alias(int index, int other, const void* data, size_t size);
  // Copies writable buffers back to the caller's arrays.
  void copy_back() const;
  // Whether the kernel changed the bytes between the buffer's end and the inaccessible page.
  bool is_overrun(int index) const;

  const Buffer& operator[](int index) const { return buffers_[index]; }
  // The index of the buffer that `address` is in or near; nullopt for none.
  std::optional<int> find(const char* address) const;

  // Inaccessible addresses that tell which buffer (or threadgroup memory) was not bound.
  char* unbound_buffer(int index) const;
  char* unbound_threadgroup_memory(int index) const;
  bool is_unbound(const char* address) const;
  std::string unbound_name(const char* address) const;
  // Readable 0x7f bytes for unbound references: the compiler may load through a reference that
  // the kernel does not use.
  char* unbound_reference() const { return poison_; }

 private:
  std::array<Buffer, kMaxBuffers> buffers_;
  mutable int latest_ = 0;  // found last
  char* unbound_;
  char* poison_;
};

}  // namespace emulator

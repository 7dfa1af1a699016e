#include "device_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGuard = size_t{1} << 32;  // address space only; a wrong index stays inside
constexpr size_t kUnboundSlot = size_t{1} << 30;
constexpr size_t kUnboundBytes = kUnboundSlot * (kMaxBuffers + kMaxThreadgroupBuffers);
constexpr size_t kPoisonBytes = 64 * 1024;
constexpr unsigned char kSlack = 0xff;

char* reserve(size_t bytes) {
  void* memory =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

}  // namespace

DeviceBuffers::DeviceBuffers() : unbound_(reserve(kUnboundBytes)), poison_(reserve(kPoisonBytes)) {
  mprotect(poison_, kPoisonBytes, PROT_READ | PROT_WRITE);
  memset(poison_, 0x7f, kPoisonBytes);
  mprotect(poison_, kPoisonBytes, PROT_READ);
}

DeviceBuffers::~DeviceBuffers() {
  for (const Buffer& buffer : buffers_) {
    if (buffer.is_bound && buffer.alias_of < 0) munmap(buffer.mapping, buffer.mapping_size);
  }
  munmap(unbound_, kUnboundBytes);
  munmap(poison_, kPoisonBytes);
}

void DeviceBuffers::bind(int index, void* data, size_t size, bool is_writable) {
  Buffer& buffer = buffers_[index];
  buffer.is_bound = true;
  buffer.size = size;
  buffer.source = data;
  buffer.is_writable = is_writable;
  buffer.body_size = (size + kPage - 1) / kPage * kPage;
  buffer.mapping_size = buffer.body_size + 2 * kGuard;
  buffer.mapping = reserve(buffer.mapping_size);
  buffer.body = buffer.mapping + kGuard;
  buffer.begin = buffer.body + ((buffer.body_size - size) & ~size_t{15});
  if (size == 0) return;
  mprotect(buffer.body, buffer.body_size, PROT_READ | PROT_WRITE);
  memset(buffer.body, kSlack, buffer.begin - buffer.body);
  memcpy(buffer.begin, data, size);
  memset(buffer.begin + size, kSlack, buffer.body + buffer.body_size - buffer.begin - size);
  if (!is_writable) mprotect(buffer.body, buffer.body_size, PROT_READ);
}

void DeviceBuffers::bind_alias(int index, int other, const void* data, size_t size) {
  Buffer& buffer = buffers_[index];
  buffer = buffers_[other];
  buffer.alias_of = other;
  buffer.begin += static_cast<const char*>(data) - static_cast<const char*>(buffer.source);
  buffer.size = size;
}

void DeviceBuffers::copy_back() const {
  for (const Buffer& buffer : buffers_) {
    if (buffer.is_writable && buffer.alias_of < 0) memcpy(buffer.source, buffer.begin, buffer.size);
  }
}

bool DeviceBuffers::is_overrun(int index) const {
  const Buffer& buffer = buffers_[index];
  auto is_touched = [](unsigned char byte) { return byte != kSlack; };
  return std::any_of(buffer.body, buffer.begin, is_touched) ||
         std::any_of(buffer.begin + buffer.size, buffer.body + buffer.body_size, is_touched);
}

std::optional<int> DeviceBuffers::find(const char* address) const {
  if (buffers_[latest_].is_near(address)) return latest_;
  for (int i = 0; i < kMaxBuffers; i++) {
    if (buffers_[i].alias_of < 0 && buffers_[i].is_near(address)) return latest_ = i;
  }
  return std::nullopt;
}

char* DeviceBuffers::unbound_buffer(int index) const {
  return unbound_ + kUnboundSlot * index + kUnboundSlot / 2;
}

char* DeviceBuffers::unbound_threadgroup_memory(int index) const {
  return unbound_buffer(kMaxBuffers + index);
}

bool DeviceBuffers::is_unbound(const char* address) const {
  return address >= unbound_ && address < unbound_ + kUnboundBytes;
}

std::string DeviceBuffers::unbound_name(const char* address) const {
  const size_t slot = (address - unbound_) / kUnboundSlot;
  if (slot < kMaxBuffers) return "buffer " + std::to_string(slot);
  return "threadgroup memory " + std::to_string(slot - kMaxBuffers);
}

}  // namespace emulator

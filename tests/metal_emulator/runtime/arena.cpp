#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

size_t align_up(size_t n, size_t alignment) { return (n + alignment - 1) / alignment * alignment; }

}  // namespace

Arena::Arena(std::vector<size_t> dynamic_bytes)
    : dynamic_bytes_(std::move(dynamic_bytes)),
      memory_(static_cast<char*>(aligned_alloc(kRedZone, kCapacity))),
      allocated_(kCapacity),
      used_(kCapacity) {}

Arena::~Arena() { free(memory_); }

void Arena::reset() {
  memset(memory_, 0xff, used_);
  std::fill(allocated_.begin(), allocated_.begin() + used_, false);
  std::fill(variables_.begin(), variables_.end(), nullptr);
  used_ = bytes_ = 0;
  dynamic_memory_.clear();
  for (size_t bytes : dynamic_bytes_) {
    dynamic_memory_.push_back(bytes ? place(bytes, kAlignment) : nullptr);
  }
}

char* Arena::dynamic_memory(int index) const {
  return index < static_cast<int>(dynamic_memory_.size()) ? dynamic_memory_[index] : nullptr;
}

char* Arena::variable(int id, size_t bytes, size_t alignment) {
  if (id >= static_cast<int>(variables_.size())) variables_.resize(id + 1);
  if (!variables_[id]) variables_[id] = place(bytes, std::max(alignment, kAlignment));
  return variables_[id];
}

char* Arena::place(size_t bytes, size_t alignment) {
  bytes_ = align_up(bytes_, alignment) + bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  const size_t offset = align_up(used_ + kRedZone, std::max(alignment, kRedZone));
  const size_t end = offset + bytes + kRedZone;
  if (end > kCapacity) return nullptr;
  std::fill(allocated_.begin() + offset, allocated_.begin() + offset + bytes, true);
  used_ = end;
  return memory_ + offset;
}

}  // namespace emulator

// What is remembered about memory: one cell for as many bytes as kernels access together.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace emulator {

// Cells start at 16 bytes and become as small as the accesses demand: 4 in a buffer of floats.
// Cell must be trivially copyable, and all zero bytes must be a Cell that nobody touched.
template <class Cell>
class Shadow {
 public:
  explicit Shadow(size_t bytes) : bytes_(bytes), cells_(allocate(count(), &free)) {}

  // The cells of an access. References to cells end here.
  std::span<Cell> cells(size_t offset, size_t size) {
    while (offset % cell_bytes_ != 0 || size % cell_bytes_ != 0) refine();
    is_touched_ = true;
    return {&cells_[offset / cell_bytes_], size / cell_bytes_};
  }
  size_t cell_bytes() const { return cell_bytes_; }

 private:
  using Cells = std::unique_ptr<Cell[], void (*)(void*)>;

  // Zeroed pages, which the system provides when they are first touched.
  static Cells allocate(size_t count, void (*release)(void*)) {
    void* memory = calloc(count, sizeof(Cell));
    if (!memory) throw std::bad_alloc();
    return Cells(static_cast<Cell*>(memory), release);
  }
  size_t count() const { return bytes_ / cell_bytes_ + 1; }

  void refine() {
    const size_t old_count = count();
    Cells old = std::move(cells_);
    cell_bytes_ /= 2;
    cells_ = allocate(count(), &free);
    if (!is_touched_) return;
    for (size_t i = 0; i < old_count; i++) {
      for (size_t part = 2 * i; part < 2 * i + 2 && part < count(); part++) cells_[part] = old[i];
    }
  }

  size_t bytes_;
  size_t cell_bytes_ = 16;
  bool is_touched_ = false;
  Cells cells_;
};

}  // namespace emulator

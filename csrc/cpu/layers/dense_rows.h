// Gives the rows of an array of any layout as dense rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mlx/array.h"

namespace mlx_paged::cpu {

// Holds the dense copy of a row. Each thread has its own.
using RowBuffer = std::vector<std::byte>;

// A view of an array [..., width]. All axes except the last count rows. A scalar is one row of one
// element.
class DenseRows {
 public:
  explicit DenseRows(const mlx::core::array& a)
      : data_(a.data<std::byte>()),
        itemsize_(static_cast<int64_t>(a.itemsize())),
        width_(a.ndim() ? a.shape(-1) : 1),
        step_(a.ndim() ? a.strides(-1) : 1),
        count_(width_ ? static_cast<int64_t>(a.size()) / width_ : 0),
        is_contiguous_(a.flags().row_contiguous) {
    for (int axis = 0; axis + 1 < static_cast<int>(a.ndim()); ++axis) {
      axes_.push_back({a.shape(axis), a.strides(axis)});
    }
  }

  int64_t count() const { return count_; }
  int32_t width() const { return width_; }
  int64_t row_bytes() const { return width_ * itemsize_; }

  // Row r: in the array if it is dense there, otherwise a copy in `buffer`.
  const void* row(int64_t r, RowBuffer& buffer) const {
    const std::byte* from = data_ + offset(r) * itemsize_;
    if (step_ == 1 || width_ == 1) {
      return from;
    }
    buffer.resize(row_bytes());
    for (int64_t i = 0; i < width_; ++i) {
      std::memcpy(&buffer[i * itemsize_], from + i * step_ * itemsize_, itemsize_);
    }
    return buffer.data();
  }

  // All rows: the array itself if it is dense, otherwise a copy in `buffer`.
  const void* all(RowBuffer& buffer) const {
    if (is_contiguous_) {
      return data_;
    }
    RowBuffer copy;
    buffer.resize(count_ * row_bytes());
    for (int64_t r = 0; r < count_; ++r) {
      std::memcpy(&buffer[r * row_bytes()], row(r, copy), row_bytes());
    }
    return buffer.data();
  }

 private:
  struct Axis {
    int64_t size;
    int64_t stride;
  };

  // In elements.
  int64_t offset(int64_t r) const {
    if (is_contiguous_) {
      return r * width_;
    }
    int64_t at = 0;
    for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
      at += r % axis->size * axis->stride;
      r /= axis->size;
    }
    return at;
  }

  const std::byte* data_;
  int64_t itemsize_;
  int32_t width_;
  int64_t step_;
  int64_t count_;
  bool is_contiguous_;
  std::vector<Axis> axes_;
};

}  // namespace mlx_paged::cpu

// The primitive of recurrent ops, and their arrays as tasks read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/cpu/composed_primitive.h"
#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/mlx_args.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/ops.h"
#include "mlx/allocator.h"

namespace mlx_paged {

// The primitive of an op that runs on CPUs only. Its outputs have the shapes and dtypes of
// Op::forms.
template <typename Op>
class RecurrentPrimitive : public ComposedPrimitive<Op, Op::kOutputs> {
 public:
  using ComposedPrimitive<Op, Op::kOutputs>::ComposedPrimitive;

  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    return this->op_.task(inputs, outputs);
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return this->op_.forms(inputs).first;
  }
};

// The outputs of one node of the graph.
template <typename Op>
Arrays make_recurrent(Op op, Arrays inputs, mx::StreamOrDevice stream) {
  auto [shapes, dtypes] = op.forms(inputs);
  auto primitive = std::make_shared<RecurrentPrimitive<Op>>(mx::to_stream(stream), op);
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), inputs);
}

namespace cpu {

// Multiplications below which waking a thread costs more than it saves.
constexpr int64_t kRecurrentWork = 1 << 16;

// The rows of a tile: as many as first-level caches hold beside what a token brings.
inline int32_t tile_rows(int32_t columns) {
  constexpr int32_t kElements = 4096;
  return std::max(kRowsAtOnce, kElements / padded_columns(columns) / kRowsAtOnce * kRowsAtOnce);
}

// An array [B, T, ..] of up to four axes whose last axis is dense. Where it is not, all is copied
// when the task begins.
class Tokens {
 public:
  explicit Tokens(const mlx::core::array& a)
      : rows_(a), data_(a.data<std::byte>()), itemsize_(static_cast<int64_t>(a.itemsize())) {
    const int axes = static_cast<int>(a.ndim());
    is_dense_ = axes == 0 || a.strides(-1) == 1 || a.shape(-1) == 1;
    int64_t dense = 1;
    for (int axis = axes; axis-- > 0; dense *= a.shape(axis)) {
      strides_[axis] = is_dense_ ? a.strides(axis) : dense;
    }
  }

  // Before the first read.
  void prepare() {
    if (!is_dense_) {
      data_ = static_cast<const std::byte*>(rows_.all(copy_));
    }
  }

  int64_t step() const { return strides_[1]; }

  const std::byte* at(int64_t b, int64_t h = 0, int64_t i = 0) const {
    return data_ + (b * strides_[0] + h * strides_[2] + i) * itemsize_;
  }

 private:
  DenseRows rows_;
  const std::byte* data_;
  int64_t itemsize_;
  bool is_dense_;
  int64_t strides_[4] = {};
  RowBuffer copy_;
};

// The elements of an array as float32, in order.
inline std::vector<float> floats_of(const DenseRows& rows, DType dtype) {
  RowBuffer buffer;
  const void* data = rows.all(buffer);
  std::vector<float> found(rows.count() * rows.width());
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = dtype == DType::kFloat32 ? static_cast<const float*>(data)[i]
               : dtype == DType::kFloat16
                   ? static_cast<float>(static_cast<const mlx::core::float16_t*>(data)[i])
                   : static_cast<float>(static_cast<const mlx::core::bfloat16_t*>(data)[i]);
  }
  return found;
}

// A small array whose elements are read as float32.
struct SmallArray {
  explicit SmallArray(const mlx::core::array& a) : rows(a), dtype(dtype_of(a)) {}

  std::vector<float> floats() const { return floats_of(rows, dtype); }

  DenseRows rows;
  DType dtype;
};

// This thread's scratch memory, 64-byte aligned.
inline float* recurrent_scratch(int64_t count) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < count + 16) {
    memory.resize(count + 16);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

inline const RecurrentKernels& recurrent_kernels(const mlx::core::array& a) {
  return active_kernel().recurrent[static_cast<int>(dtype_of(a))];
}

// States [B, ..], those of each sequence dense. Where they are not, all are copied when the task
// begins.
class States {
 public:
  explicit States(const mlx::core::array& a)
      : rows_(a), data_(a.data<std::byte>()), step_(a.strides(0) * a.itemsize()) {
    int64_t dense = 1;
    for (int axis = static_cast<int>(a.ndim()); axis-- > 1; dense *= a.shape(axis)) {
      is_dense_ &= a.strides(axis) == dense || a.shape(axis) == 1;
    }
    if (!is_dense_) {
      step_ = dense * static_cast<int64_t>(a.itemsize());
    }
  }

  void prepare() {
    if (!is_dense_) {
      data_ = static_cast<const std::byte*>(rows_.all(copy_));
    }
  }

  const std::byte* at(int64_t b) const { return data_ + b * step_; }

 private:
  DenseRows rows_;
  const std::byte* data_;
  int64_t step_;
  bool is_dense_ = true;
  RowBuffer copy_;
};

// The tiles of an op whose outputs are [B, T, H, V] and states [B, H, V, K] float32: some rows of
// the state of one head each.
class HeadTiles {
 public:
  struct Place {
    int64_t sequence;
    int64_t head;
    int64_t row;
  };

  // `state` and `mask` may be null.
  HeadTiles(Arrays& outputs, const mlx::core::array* state, const mlx::core::array* mask)
      : tokens_(outputs[0].shape(1)),
        heads_(outputs[1].shape(1)),
        values_(outputs[1].shape(2)),
        columns_(outputs[1].shape(3)),
        rows_(std::min<int32_t>(values_, tile_rows(columns_))),
        tiles_((values_ + rows_ - 1) / rows_),
        count_(outputs[1].shape(0) * heads_ * tiles_),
        work_(static_cast<int64_t>(outputs[1].size()) * tokens_),
        itemsize_(static_cast<int64_t>(outputs[0].itemsize())),
        out_(outputs[0].data<std::byte>()),
        new_state_(outputs[1].data<float>()) {
    if (state != nullptr) {
      state_.emplace(*state);
    }
    if (mask != nullptr) {
      mask_.emplace(*mask);
    }
  }

  // Before the first tile.
  void prepare() {
    if (state_) {
      state_->prepare();
    }
    if (mask_) {
      mask_->prepare();
    }
  }

  int64_t count() const { return count_; }

  // Whether more than one thread pays.
  bool pays() const { return work_ >= kRecurrentWork; }

  // Fills in what all kinds of tiles have, and returns the place of tile i.
  Place fill(int64_t i, RecurrentTile& tile) const {
    const int64_t sequence = i / tiles_ / heads_, head = i / tiles_ % heads_;
    const int64_t row = i % tiles_ * rows_;
    const int64_t in_sequence = head * values_ + row;
    tile.tokens = tokens_;
    tile.rows = static_cast<int32_t>(std::min<int64_t>(rows_, values_ - row));
    tile.columns = columns_;
    if (mask_) {
      tile.mask = reinterpret_cast<const uint8_t*>(mask_->at(sequence));
      tile.mask_step = mask_->step();
    }
    if (state_) {
      const auto* states = reinterpret_cast<const float*>(state_->at(sequence));
      tile.state = states + in_sequence * columns_;
    }
    tile.new_state = new_state_ + (sequence * heads_ * values_ + in_sequence) * columns_;
    tile.out = out_ + (sequence * tokens_ * heads_ * values_ + in_sequence) * itemsize_;
    tile.out_step = heads_ * values_;
    tile.scratch = recurrent_scratch(scratch_of(tile.rows, columns_));
    return {sequence, head, row};
  }

 private:
  int64_t tokens_;
  int64_t heads_;
  int64_t values_;
  int32_t columns_;
  int32_t rows_;
  int64_t tiles_;
  int64_t count_;
  int64_t work_;
  int64_t itemsize_;
  std::byte* out_;
  float* new_state_;
  std::optional<States> state_;
  std::optional<Tokens> mask_;
};

}  // namespace cpu

}  // namespace mlx_paged

// The primitive of recurrent ops, and their arrays as tasks read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/mlx_args.h"
#include "csrc/cpu/task.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/ops.h"
#include "mlx/allocator.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_paged {

// The primitive of an op that runs on CPUs only. Its outputs have the shapes and dtypes of
// Op::forms. Transformations use `composed`, the same results by MLX's own operations: a function
// that mx.compile traced while a model was served may be differentiated later.
template <typename Op>
class RecurrentPrimitive : public cpu::TaskPrimitive {
 public:
  RecurrentPrimitive(mx::Stream stream, Op op) : cpu::TaskPrimitive(stream), op_(op) {}

  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    return op_.task(inputs, outputs);
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[mlx_paged.recurrent] this op runs on CPUs only");
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override {
    return mx::jvp(function_of(argnums, primals), chosen(primals, argnums), tangents).second;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays&) override {
    return mx::vjp(function_of(argnums, primals), chosen(primals, argnums), cotangents).second;
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const Function function = [this](const Arrays& all) { return op_.composed(all, stream()); };
    const std::vector<int> first(op_.forms(inputs).first.size(), 0);
    return {mx::vmap(function, axes, first)(inputs), first};
  }

  const char* name() const override { return Op::kName; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return op_ == static_cast<const RecurrentPrimitive&>(other).op_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return op_.forms(inputs).first;
  }

 private:
  using Function = std::function<Arrays(const Arrays&)>;

  // `composed` as a function of the inputs `argnums`.
  Function function_of(const std::vector<int>& argnums, const Arrays& inputs) {
    return [this, argnums, inputs](const Arrays& some) {
      Arrays all = inputs;
      for (size_t i = 0; i < argnums.size(); ++i) {
        all[argnums[i]] = some[i];
      }
      return op_.composed(all, stream());
    };
  }

  static Arrays chosen(const Arrays& arrays, const std::vector<int>& argnums) {
    Arrays some;
    for (const int i : argnums) {
      some.push_back(arrays[i]);
    }
    return some;
  }

  Op op_;
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

}  // namespace cpu

}  // namespace mlx_paged

// The operands of the layer ops. `compute` computes the rows [begin, end): the work of one thread.
// Inputs may have any layout; the output is dense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/layers/layer_kernels.h"

namespace mlx_paged::cpu {

struct RmsNormRows {
  DType dtype;
  DenseRows x;
  std::optional<DenseRows> weight;  // one row
  float eps;
  std::byte* out;

  int64_t count() const { return x.count(); }
  int64_t elements_each() const { return x.width(); }
  void compute(int64_t begin, int64_t end) const;
};

// A row is one token of one sequence with all its heads, which share the angles.
struct RopeRows {
  DType dtype;
  DenseRows x;             // [batch, heads, tokens]
  DenseRows frequencies;   // one row of float32
  const int32_t* offsets;  // sequence b's at b * offset_stride
  int64_t offset_stride;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  float scale;
  bool traditional;
  std::byte* out;

  int64_t count() const { return batch * tokens; }
  int64_t elements_each() const { return heads * x.width(); }
  void compute(int64_t begin, int64_t end) const;

 private:
  float position(int64_t sequence, int64_t token) const;
};

// `out` may be the memory of x or of the factor, if that array is dense.
struct ActivateRows {
  DType dtype;
  Activation activation;
  DenseRows x;
  std::optional<DenseRows> factor;
  std::byte* out;

  int64_t count() const { return x.count(); }
  int64_t elements_each() const { return x.width(); }
  void compute(int64_t begin, int64_t end) const;
};

// The output has one element per row.
struct LogSumExpRows {
  DType dtype;
  DenseRows x;
  std::byte* out;

  int64_t count() const { return x.count(); }
  int64_t elements_each() const { return x.width(); }
  void compute(int64_t begin, int64_t end) const;
};

}  // namespace mlx_paged::cpu

// The kernel of linear layers of few rows. It is compiled once for each instruction set
// (linear_kernels.cpp) and chosen at run time (cpu_features.h).
#pragma once

#include <cstdint>

#include "csrc/cpu/attention/attention_args.h"

namespace mlx_paged::cpu {

// Rows of x are packed with zeros after the last element, up to a multiple of this.
inline constexpr int32_t kDepthStep = 128;

constexpr int32_t padded_depth(int32_t depth) {
  return (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
}

// Floats from one packed row to the next: the elements, and what products.h needs beside them.
constexpr int64_t packed_stride(int32_t depth) { return padded_depth(depth) / 8 * int64_t{9} + 16; }

// out [rows, width] = x [rows, depth] . weight [width, depth]^T + bias. All arrays are dense.
struct LinearArgs {
  DType dtype;    // of all arrays but quantized weights
  int32_t bits;   // 4 or 8: `weight` holds unsigned integers, the first in the lowest bits; or 0.
                  // 4 without offsets: mxfp4, integers that stand for the numbers of kFloat4.
  int32_t group;  // elements that share a scale and an offset: scale * integer + offset
  int32_t depth;
  int32_t width;
  const void* weight;
  const void* scales;   // [width, depth / group]; of mxfp4 the bytes e of scales 2^(e - 127)
  const void* offsets;  // the same; null for mxfp4
  const void* bias;     // [width], or null
  void* out;
};

// The numbers of 4 bits of mxfp4: E2M1 of the OCP Microscaling Formats specification 1.0, 2023.
inline constexpr float kFloat4[16] = {0,    .5f,  1,  1.5f,  2,  3,  4,  6,
                                      -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

struct LinearKernels {
  // Packs one row of x as float32, in the order in which the kernel reads weights.
  void (*pack)(const LinearArgs& args, const void* x, float* to);

  // Computes columns [begin, end) of `rows` rows of out from the packed rows `x`. A row's result
  // does not depend on the other rows.
  void (*multiply)(const LinearArgs& args, const float* x, int32_t rows, int32_t begin, int32_t end,
                   void* out);

  // y[r] [width] += x[r] . weight for each row r of x [rows, depth] and weight [depth, width], all
  // of one dtype. Sums are float32 and rounded once. A row's result does not depend on the others.
  void (*add_products)(DType dtype, const void* x, const void* weight, int32_t rows, int32_t depth,
                       int32_t width, void* const* y);
};

// The largest depth of `add_products`.
inline constexpr int32_t kMostTerms = 512;

// The most rows that share a pass over the factors of `add_products`.
inline constexpr int32_t kRowsOfLowRank = 32;

// Columns of `out` that share a pass over x. Tasks begin at multiples of it.
inline constexpr int32_t kColumnsOfPass = 16;

// The most rows of one call of `multiply`.
inline constexpr int32_t kRowsOfPass = 128;

namespace baseline {
extern const LinearKernels kLinearKernels;
}
namespace avx2 {
extern const LinearKernels kLinearKernels;
}
namespace avx512 {
extern const LinearKernels kLinearKernels;
}
namespace avx512_vnni {
extern const LinearKernels kLinearKernels;
}

}  // namespace mlx_paged::cpu

// Kernels for one row of a model's normalisations, rotary embeddings and activations. They are
// compiled once per instruction set (layer_kernels.cpp) and chosen at run time (cpu_features.h).
//
// Elements are float32, float16 or bfloat16. Sums and functions are float32. All kernels except
// log-sum-exp round to the dtype wherever MLX's composition of operations does.
#pragma once

#include <cstdint>

#include "csrc/cpu/attention/attention_args.h"

namespace mlx_paged::cpu {

enum class Activation : int32_t { kSilu, kGeluApprox };

constexpr int32_t kMostTransformed = 4096;

// The kernels of one dtype.
struct LayerKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight over one row of `width`; weight may be null.
  void (*rms_norm)(const void* x, const void* weight, float eps, int32_t width, void* out);

  // out = activation(x) * factor, element by element; factor may be null, out may be x or factor.
  void (*activate)(Activation activation, const void* x, const void* factor, int64_t count,
                   void* out);

  // The sines and cosines [pairs] of position * frequencies, rounded to the dtype.
  void (*angles)(float position, const float* frequencies, int32_t pairs, float* sines,
                 float* cosines);

  // Rotates the dims of one head, (i, i + pairs) or, if `traditional`, (2i, 2i + 1); those from
  // 2 * pairs on pass through. `out` must not overlap x.
  void (*rotate)(const void* x, const float* sines, const float* cosines, int32_t pairs,
                 int32_t width, bool traditional, void* out);

  // Of one row: log(sum(e^x)); the first index at which x minus this sum, both and their difference
  // rounded to the dtype, is largest. NaN is above all numbers. As of all kernels with `allowed`,
  // x[i] counts as -inf where bit i % 32 of allowed[i / 32] is 0; allowed may be null.
  void (*likeliest)(const void* x, const void* allowed, int32_t width, float out[2]);

  // out = x; out may be x.
  void (*mask)(const void* x, const void* allowed, int32_t width, void* out);

  // The orthonormal Hadamard transform of each part of a row of at most kMostTransformed elements.
  // The parts are powers of two, the largest ones first. `out` may be x.
  void (*hadamard)(const void* x, int32_t width, void* out);
};

// The kernels of float32, float16 and bfloat16, in the order of DType.
using LayerKernelTable = LayerKernels[3];

namespace baseline {
extern const LayerKernelTable kLayerKernels;
}
namespace avx2 {
extern const LayerKernelTable kLayerKernels;
}
namespace avx512 {
extern const LayerKernelTable kLayerKernels;
}

}  // namespace mlx_paged::cpu

// Which build of the CPU kernels runs.
#pragma once

#include <string>
#include <vector>

#include "csrc/cpu/attention/attention_kernel.h"
#include "csrc/cpu/layers/layer_kernels.h"
#include "csrc/cpu/linear/linear_kernels.h"
#include "csrc/cpu/recurrent/recurrent_kernels.h"

namespace mlx_paged::cpu {

struct Kernel {
  // "baseline" (what the compiler targets: SSE2, NEON), "avx2", "avx512" or "avx512_vnni" (its
  // linear layers use AVX512_VNNI and AVX512_BF16, the rest is avx512's)
  const char* name;
  Attend* attend;
  const LayerKernelTable& layers;
  const LinearKernels& linear;
  const RecurrentKernelTable& recurrent;
};

// The build in use: the one that MLX_PAGED_CPU names, else the fastest that this machine can run.
// Throws std::invalid_argument if this machine cannot run the named build.
const Kernel& active_kernel();

// Names of the builds that this machine can run, slowest first.
std::vector<std::string> supported_kernel_names();

}  // namespace mlx_paged::cpu

#include "csrc/cpu/cpu_features.h"

#include <cstdlib>
#include <stdexcept>

namespace mlx_paged::cpu {

namespace {

std::vector<Kernel> find_kernels() {
  std::vector<Kernel> kernels = {{"baseline", baseline::attend, baseline::kLayerKernels,
                                  baseline::kLinearKernels, baseline::kRecurrentKernels}};
#if defined(MLX_PAGED_X86_KERNELS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx2) {
    kernels.push_back(
        {"avx2", avx2::attend, avx2::kLayerKernels, avx2::kLinearKernels, avx2::kRecurrentKernels});
  }
  if (avx512) {
    kernels.push_back({"avx512", avx512::attend, avx512::kLayerKernels, avx512::kLinearKernels,
                       avx512::kRecurrentKernels});
  }
  if (avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    kernels.push_back({"avx512_vnni", avx512::attend, avx512::kLayerKernels,
                       avx512_vnni::kLinearKernels, avx512::kRecurrentKernels});
  }
#endif
  return kernels;
}

const std::vector<Kernel>& supported_kernels() {
  static const std::vector<Kernel> kernels = find_kernels();
  return kernels;
}

const Kernel& choose_kernel() {
  const char* wanted = std::getenv("MLX_PAGED_CPU");
  if (!wanted) {
    return supported_kernels().back();
  }
  std::string names;
  for (const Kernel& kernel : supported_kernels()) {
    if (kernel.name == std::string(wanted)) {
      return kernel;
    }
    names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  }
  throw std::invalid_argument("[mlx_paged] MLX_PAGED_CPU is '" + std::string(wanted) +
                              "': expected one of " + names + " on this machine");
}

}  // namespace

const Kernel& active_kernel() {
  static const Kernel& kernel = choose_kernel();
  return kernel;
}

std::vector<std::string> supported_kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& kernel : supported_kernels()) {
    names.emplace_back(kernel.name);
  }
  return names;
}

}  // namespace mlx_paged::cpu

#include "csrc/cpu/huge_pages.h"

#if defined(__linux__)

#include <sys/mman.h>

#include <cstdint>

namespace mlx_paged::cpu {

namespace {

// Of x86-64, and of AArch64 with pages of 4 KiB.
constexpr uintptr_t kHugePage = 1 << 21;

}  // namespace

void use_huge_pages(void* data, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + size) / kHugePage * kHugePage;
  if (first < end) {
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
  }
}

}  // namespace mlx_paged::cpu

#else

namespace mlx_paged::cpu {

void use_huge_pages(void*, size_t) {}

}  // namespace mlx_paged::cpu

#endif

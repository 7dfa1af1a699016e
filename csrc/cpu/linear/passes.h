// What products share, whatever x and the weights are. Compiled once for each instruction set.
#pragma once

#include "csrc/cpu/linear/linear_kernels.h"
#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

inline constexpr int32_t kPass = kColumnsOfPass;

// Prefetches the weights of the next pass. Each step of the products asks for `step` bytes.
struct Ahead {
  const char* at;
  int64_t step;

  void ask(int steps) {
    __builtin_prefetch(at, 0, 2);
    at += steps * step;
  }
};

// Bytes of this many weights.
template <typename T>
int64_t weight_bytes(const LinearArgs& args, int64_t count) {
  return count * (args.bits ? args.bits : 8 * sizeof(T)) / 8;
}

// sums[r][c] += the sum of the lanes of sum[r * kColumns + c].
template <int kRows, int kColumns>
[[gnu::always_inline]] inline void add_totals(Floats* sum, float* sums) {
  constexpr int kFolded = kRows * kColumns < kLanes ? kRows * kColumns : kLanes;
  float totals[kRows * kColumns < kLanes ? kLanes : kRows * kColumns];
#pragma GCC unroll 4
  for (int i = 0; i < kRows * kColumns; i += kFolded) {
    store(totals + i, sum_each<kFolded>(sum + i));
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    typedef float Row __attribute__((vector_size(4 * kColumns)));
    Row before, added;
    __builtin_memcpy(&before, sums + r * kPass, sizeof before);
    __builtin_memcpy(&added, totals + r * kColumns, sizeof added);
    before += added;
    __builtin_memcpy(sums + r * kPass, &before, sizeof before);
  }
}

// Calls add(first, sums, ahead) for each pass; it adds products of columns [first, first + kPass).
// The last pass shares columns with the one before if fewer are left. A step has `weights`.
template <typename T, typename Add>
void for_passes(const LinearArgs& args, int32_t rows, int32_t begin, int32_t end, void* out,
                int32_t weights, Add add) {
  alignas(64) float sums[kRowsOfPass * kPass + kPass];
  const int32_t last = args.width > kPass ? args.width - kPass : 0;
  const int64_t step = weight_bytes<T>(args, weights) / ((rows + kRowBlock - 1) / kRowBlock);
  for (int32_t at = begin; at < end; at += kPass) {
    const int32_t first = at < last ? at : last;
    const int64_t next = weight_bytes<T>(args, int64_t{first + kPass} * args.depth);
    __builtin_memset(sums, 0, sizeof(float) * kPass * (rows + 1));
    add(first, sums, Ahead{static_cast<const char*>(args.weight) + next, step});
    const int32_t columns = end - at < kPass ? end - at : kPass;
    for (int32_t i = 0; i < columns; i += kLanes) {
      const T* bias = static_cast<const T*>(args.bias);
      const Floats added = bias ? load_up_to(bias + at + i, columns - i) : Floats{};
      for (int32_t r = 0; r < rows; ++r) {
        T* to = static_cast<T*>(out) + int64_t{r} * args.width + at + i;
        store_up_to(to, load(sums + r * kPass + at - first + i) + added, columns - i);
      }
    }
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

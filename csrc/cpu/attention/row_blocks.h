// Register blocking of the attention kernels; see simd.h for the rules of inclusion.
#pragma once

#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

// kRowBlock query rows share a load of keys or values. kColumnBlock registers of columns share a
// load of queries or weights. kAccumulators registers hold unfinished dot products. The functions
// that use them are unrolled, and are not inlined into larger functions: otherwise the compiler
// would keep the accumulators in memory.
inline constexpr int kRowBlock = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kColumnBlock = 4;
inline constexpr int kAccumulators = 16;
#else
inline constexpr int kColumnBlock = 2;
inline constexpr int kAccumulators = 8;
#endif

// Calls body<rows>(first) for blocks of kRowBlock rows, then of 2 and of 1.
template <typename Body>
void for_row_blocks(int32_t num_rows, Body body) {
  int32_t row = 0;
  for (; row + kRowBlock <= num_rows; row += kRowBlock) {
    body.template operator()<kRowBlock>(row);
  }
  for (; row + 2 <= num_rows; row += 2) {
    body.template operator()<2>(row);
  }
  for (; row < num_rows; ++row) {
    body.template operator()<1>(row);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

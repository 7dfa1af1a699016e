// What all products of linear layers share, and the products in fixed point. This is compiled once
// for each instruction set.
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
    for (int c = 0; c < kColumns; ++c) {
      sums[r * kPass + c] += totals[r * kColumns + c];
    }
  }
}

// A pass computes kPass columns of out for all rows. For each pass calls add(first, sums, ahead),
// which adds the products of columns [first, first + kPass) to the sums. If fewer columns are left,
// the last pass computes columns of the pass before again. `add` asks `ahead` for the weights of
// the next pass: once for every `weights` weights, in each block of rows, and once more for them if
// `add` unpacks weights first.
template <typename T, typename Add>
void for_passes(const LinearArgs& args, int32_t rows, int32_t begin, int32_t end, void* out,
                int32_t weights, bool unpacks, Add add) {
  alignas(64) float sums[kRowsOfPass * kPass + kPass];
  const int32_t last = args.width > kPass ? args.width - kPass : 0;
  const int32_t times = (rows + kRowBlock - 1) / kRowBlock + unpacks;
  const int64_t step = weight_bytes<T>(args, weights) / times;
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

#if defined(__AVX512VNNI__)
// Products of weights of 4 bits with x in fixed point, by instructions for bytes. The elements of x
// that meet a register of weights are a chunk. A chunk has a scale, a power of two. An element is
// two signed digits of 8 bits times the scale, the high one first: bfloat16 and float16 that are
// not far below the chunk's largest are exact. Sums of a chunk's products are too.

// Elements of a chunk. The even ones come first.
constexpr int kChunk = 128;

// The elements' floats have room for the digits. Behind them are a scale for each chunk, the first
// one 0 if the row stays float32, and the sum of each group of weights.
template <typename Float>
Float* scales_of(Float* row, int32_t depth) {
  return row + padded_depth(depth);
}
template <typename Float>
Float* sums_of(Float* row, int32_t depth) {
  return row + padded_depth(depth) + padded_depth(depth) / 32;
}

// Turns a row of floats into fixed point, unless it has elements that are not finite, or a chunk
// whose elements are too small for a scale: then returns false.
inline bool to_fixed_point(const LinearArgs& args, float* x) {
  constexpr uint32_t kShift = 14;
  const int32_t depth = padded_depth(args.depth);
  float* scales = scales_of(x, depth);
  float* sums = sums_of(x, depth);
  for (int32_t k = 0; k < depth; k += kChunk) {
    uint32_t top = 0;
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, x[k + i]) & 0x7fffffff;
      top = bits > top ? bits : top;
    }
    if (top >= 0x7f800000 || (top != 0 && top < (kShift + 1) << 23)) {
      scales[0] = 0;
      return false;
    }
    // A little more than the largest, so that the first digit is 127 at most.
    const uint32_t above = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, top) * 1.01f);
    const uint32_t exponent = top == 0 ? kShift + 1 : above >> 23;
    scales[k / kChunk] = __builtin_bit_cast(float, (exponent - kShift) << 23);
  }
  __builtin_memset(sums, 0, (depth / 32 + kLanes) * sizeof(float));
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  for (int32_t k = 0; k < depth; k += kChunk) {
    const float scale = scales[k / kChunk];
    Bytes digits[2][2][kChunk / kLanes / 2];
    for (int i = 0; i < kChunk / kLanes / 2; ++i) {
      const Floats a = load(x + k + 2 * i * kLanes) * (1 / scale);
      const Floats b = load(x + k + (2 * i + 1) * kLanes) * (1 / scale);
      const Floats halves[] = {
          __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
      Ints sum = {};
      for (int half = 0; half < 2; ++half) {
        const Ints whole = __builtin_bit_cast(Ints, _mm512_maskz_cvtps_epi32(0xffff, halves[half]));
        digits[0][half][i] = __builtin_convertvector((whole + 128) >> 8, Bytes);
        digits[1][half][i] = __builtin_convertvector(whole, Bytes);
        sum += whole;
      }
      Floats total[] = {__builtin_convertvector(sum, Floats)};
      sums[(k + 2 * i * kLanes) / args.group] += scale * sum_each<1>(total)[0];
    }
    __builtin_memcpy(x + k / 2, digits, sizeof digits);
  }
  return true;
}

// sums[r][c] += x[r] . weight[column + c], like dot_block.
template <typename T, int kRows, int kColumns>
[[gnu::noinline]] void fixed_point_block(const LinearArgs& args, const float* x, int64_t column,
                                         Ahead& ahead, float* sums) {
  constexpr int kShared = kRows < kRowBlock ? 2 : 4;  // columns that share a load of x
  const int64_t x_stride = packed_stride(args.depth);
  const int32_t groups = args.depth / args.group;
  const auto* w = static_cast<const uint8_t*>(args.weight) + column * args.depth / 2;
  const T* scales = static_cast<const T*>(args.scales) + column * groups;
  const T* offsets = static_cast<const T*>(args.offsets) + column * groups;
  Ahead next = ahead;
  Floats sum[kRows * kColumns] = {};
  for (int32_t g = 0; g < groups; g += kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kColumns; ++i) {
      sum[i] += load_up_to(offsets + i % kColumns * groups + g, groups - g) *
                load(sums_of(x + i / kColumns * x_stride, args.depth) + g);
    }
  }
  // Which of the chunk's groups a lane of weights belongs to.
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int log_group = __builtin_ctz(args.group);
  const auto group = __builtin_bit_cast(__m512i, (lane * (kChunk / kLanes)) >> log_group);
  for (int32_t k = 0; k < args.depth; k += kChunk) {
    const int32_t count = args.depth - k < kChunk ? args.depth - k : kChunk;
    const __mmask64 bytes = ~uint64_t{0} >> (64 - count / 2);
#pragma GCC unroll 16
    for (int i = 0; i < kColumns; i += kShared) {
      __m512i weights[kShared][2];
      Floats scale[kShared];
#pragma GCC unroll 4
      for (int c = 0; c < kShared; ++c) {
        const uint8_t* from = w + (int64_t{i + c} * args.depth + k) / 2;
        const auto read = __builtin_bit_cast(Words, _mm512_maskz_loadu_epi8(bytes, from));
        next.ask(1);
        weights[c][0] = __builtin_bit_cast(__m512i, read & 0x0f0f0f0f);
        weights[c][1] = __builtin_bit_cast(__m512i, (read >> 4) & 0x0f0f0f0f);
        const T* scales_here = scales + (i + c) * groups + (k >> log_group);
        const Floats few = load_partial(scales_here, count >> log_group);
        scale[c] = _mm512_maskz_permutexvar_ps(0xffff, group, few);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto* digits = reinterpret_cast<const int8_t*>(x + r * x_stride + k / 2);
        const float x_scale = scales_of(x + r * x_stride, args.depth)[k / kChunk];
#pragma GCC unroll 4
        for (int c = 0; c < kShared; ++c) {
          __m512i both = {};
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            both = v == 2 ? _mm512_maskz_slli_epi32(0xffff, both, 8) : both;
            const __m512i x_v = _mm512_loadu_si512(digits + v * 64);
            both = _mm512_dpbusd_epi32(both, weights[c][v % 2], x_v);
          }
          const Floats whole = __builtin_convertvector(__builtin_bit_cast(Ints, both), Floats);
          sum[r * kColumns + i + c] += whole * (scale[c] * broadcast(x_scale));
        }
      }
    }
  }
  ahead = next;
  add_totals<kRows, kColumns>(sum, sums);
}

template <typename T>
void multiply_fixed_point(const LinearArgs& args, const float* x, int32_t rows, int32_t begin,
                          int32_t end, void* out) {
  const auto add = [&](int32_t first, float* sums, Ahead ahead) {
    for_row_blocks(rows, [&]<int kRows>(int32_t r) {
      constexpr int kColumns = kAccumulators / kRows;
      for (int32_t c = 0; c < kPass; c += kColumns) {
        fixed_point_block<T, kRows, kColumns>(args, x + r * packed_stride(args.depth), first + c,
                                              ahead, sums + r * kPass + c);
      }
    });
  };
  for_passes<T>(args, rows, begin, end, out, kChunk, false, add);
}
#endif

}  // namespace mlx_paged::cpu::KERNEL_ISA

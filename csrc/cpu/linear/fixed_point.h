// Products of weights of 4 bits with x in fixed point, by instructions for bytes.
//
// The elements of x that meet a register of weights are a chunk. A chunk has a scale, a power of
// two. An element is two signed digits of 8 bits times the scale, the high one first: bfloat16 and
// float16 that are not far below the chunk's largest are exact. Sums of a chunk's products are too.
#pragma once

#include "csrc/cpu/linear/passes.h"

namespace mlx_paged::cpu::KERNEL_ISA {

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
// whose elements are too small for a scale.
inline void to_fixed_point(const LinearArgs& args, float* x) {
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
      return;
    }
    // A little more than the largest, so that the first digit is 127 at most.
    const uint32_t above = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, top) * 1.01f);
    const uint32_t exponent = top == 0 ? kShift + 1 : above >> 23;
    scales[k / kChunk] = __builtin_bit_cast(float, (exponent - kShift) << 23);
  }
  __builtin_memset(sums, 0, (depth / 32 + kLanes) * sizeof(float));
  for (int32_t k = 0; k < depth; k += kChunk) {
    int8_t digits[2 * kChunk];
    const float scale = scales[k / kChunk];
    for (int i = 0; i < kChunk; i += 32) {
      int32_t sum = 0;
      for (int j = 0; j < 32; ++j) {
        const float scaled = x[k + i + j] * (1 / scale);
        const int32_t whole = static_cast<int32_t>(__builtin_rintf(scaled));
        const int to = i / 2 + j / 2 + j % 2 * 64;
        sum += whole;
        digits[to] = static_cast<int8_t>((whole + 128) >> 8);
        digits[to + kChunk] = static_cast<int8_t>(whole);
      }
      sums[(k + i) / args.group] += scale * static_cast<float>(sum);
    }
    __builtin_memcpy(reinterpret_cast<int8_t*>(x) + k * 2, digits, sizeof digits);
  }
}

// Groups of a column of a panel of scales, and more to read.
constexpr int kGroupStride = 64 + kLanes;

// sums[r][c] += x[r] . w[c] over elements [begin, end), like dot_block. w, scales and offsets are
// those of `begin`.
template <int kRows, int kColumns>
[[gnu::noinline]] void fixed_point_block(const LinearArgs& args, const float* x, const uint8_t* w,
                                         const float* scales, const float* offsets, int32_t begin,
                                         int32_t end, Ahead& ahead, float* sums) {
  const int64_t x_stride = packed_stride(args.depth);
  const int64_t w_stride = int64_t{args.depth} / 2;
  const int log_group = __builtin_ctz(args.group);
  const float* x_sums = sums_of(x, args.depth) + (begin >> log_group);
  Ahead next = ahead;
  Floats sum[kRows * kColumns] = {};
  for (int32_t g = 0; g < (end - begin) >> log_group; g += kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kColumns; ++i) {
      sum[i] += load(offsets + i % kColumns * kGroupStride + g) *
                load(x_sums + i / kColumns * x_stride + g);
    }
  }
  // Which of the chunk's groups a lane of weights belongs to.
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto group = __builtin_bit_cast(__m512i, (lane * (kChunk / kLanes)) >> log_group);
  for (int32_t k = begin; k < end; k += kChunk) {
    const int32_t bytes = (end - k) / 2;
    const __mmask64 some = bytes < 64 ? (uint64_t{1} << bytes) - 1 : ~uint64_t{0};
    __m512i weights[kColumns][2];
    Floats scale[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const uint8_t* from = w + c * w_stride + (k - begin) / 2;
      const Words read = __builtin_bit_cast(Words, _mm512_maskz_loadu_epi8(some, from));
      next.ask(1);
      weights[c][0] = __builtin_bit_cast(__m512i, read & 0x0f0f0f0f);
      weights[c][1] = __builtin_bit_cast(__m512i, (read >> 4) & 0x0f0f0f0f);
      const float* scales_here = scales + c * kGroupStride + ((k - begin) >> log_group);
      scale[c] = _mm512_maskz_permutexvar_ps(0xffff, group, load(scales_here));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto* digits = reinterpret_cast<const int8_t*>(x + r * x_stride) + k * 2;
      const float x_scale = scales_of(x + r * x_stride, args.depth)[k / kChunk];
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) {
        __m512i high = {}, low = {};
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int8_t* from = digits + v * 64;
          high = _mm512_dpbusd_epi32(high, weights[c][v], _mm512_loadu_si512(from));
          low = _mm512_dpbusd_epi32(low, weights[c][v], _mm512_loadu_si512(from + kChunk));
        }
        const Ints both = (__builtin_bit_cast(Ints, high) << 8) + __builtin_bit_cast(Ints, low);
        const Floats whole = __builtin_convertvector(both, Floats);
        sum[r * kColumns + c] += whole * (scale[c] * broadcast(x_scale));
      }
    }
  }
  ahead = next;
  add_totals<kRows, kColumns>(sum, sums);
}

// The first kLanes of `count` elements; zeros after the last.
template <typename T>
Floats load_first(const T* from, int32_t count) {
  const __mmask16 first = count < kLanes ? (1u << count) - 1 : ~0u;
  const __m256i bits = _mm256_maskz_loadu_epi16(first, from);
  return load(reinterpret_cast<const T*>(&bits));
}

template <typename T>
void multiply_fixed_point(const LinearArgs& args, const float* x, int32_t rows, int32_t begin,
                          int32_t end, void* out) {
  constexpr int32_t kDepth = 2048;
  float scales[kPass * kGroupStride], offsets[kPass * kGroupStride];
  const auto add = [&](int32_t first, float* sums, Ahead ahead) {
    for (int32_t k = 0; k < args.depth; k += kDepth) {
      const int32_t stop = args.depth - k < kDepth ? args.depth : k + kDepth;
      const int32_t groups = (stop - k) / args.group;
      const int64_t at = int64_t{first} * args.depth + k;
      for (int32_t i = 0; i < kPass * kGroupStride; i += kLanes) {
        const int32_t g = i % kGroupStride;
        const int64_t from = (at + i / kGroupStride * int64_t{args.depth}) / args.group + g;
        if (g < groups) {
          const T* scales_from = static_cast<const T*>(args.scales) + from;
          const T* offsets_from = static_cast<const T*>(args.offsets) + from;
          store(scales + i, load_first(scales_from, groups - g));
          store(offsets + i, load_first(offsets_from, groups - g));
          __builtin_prefetch(scales_from + args.depth / args.group * kPass);
          __builtin_prefetch(offsets_from + args.depth / args.group * kPass);
        }
      }
      const auto* w = static_cast<const uint8_t*>(args.weight) + at / 2;
      for_row_blocks(rows, [&]<int kRows>(int32_t r) {
        constexpr int kColumns = kAccumulators / kRows;
        for (int32_t c = 0; c < kPass; c += kColumns) {
          fixed_point_block<kRows, kColumns>(args, x + r * packed_stride(args.depth),
                                             w + int64_t{c} * args.depth / 2,
                                             scales + c * kGroupStride, offsets + c * kGroupStride,
                                             k, stop, ahead, sums + r * kPass + c);
        }
      });
    }
  };
  for_passes<T>(args, rows, begin, end, out, kChunk, add);
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

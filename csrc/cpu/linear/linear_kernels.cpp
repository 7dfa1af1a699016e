#include "csrc/cpu/linear/linear_kernels.h"

#include <type_traits>

#include "csrc/cpu/linear/products.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

// The part of the depth whose weights, as float32, stay in the first-level cache.
constexpr int32_t kDepthOfPanel = 512;

// Rows of a panel lie apart so that they do not share the few places of a cache.
constexpr int64_t kPanelStride = kDepthOfPanel + 16;

static_assert(kDepthStep % (2 * kLanes) == 0 && kDepthOfPanel % kDepthStep == 0);

inline Floats multiply_add(Floats sum, Floats w, Floats x) { return sum + w * x; }
template <typename T>
Floats load_for(const float*, const T* from) {
  return load(from);
}

#if defined(__AVX512BF16__)
// Two bfloat16 in a lane. Their products are exact; denormal numbers count as 0.
using Paired = BFloat16;
inline Floats multiply_add(Floats sum, __m512bh w, __m512bh x) {
  return _mm512_dpbf16_ps(sum, w, x);
}
inline __m512bh load_for(const BFloat16*, const BFloat16* from) {
  return __builtin_bit_cast(__m512bh, _mm512_loadu_si512(from));
}
#else
using Paired = void;
#endif

// What x is packed as for plain weights.
template <typename T>
using Packed = std::conditional_t<std::is_same_v<T, Paired>, T, float>;

// sums[r][c] += x[r] . w[c]. w is a panel, or the weights themselves; then the next kColumns
// columns are prefetched from where these are read.
template <int kRows, int kColumns, bool kInPlace, typename X, typename W>
[[gnu::noinline]] void dot_block(const X* x, int64_t x_stride, const W* w, int64_t w_stride,
                                 int32_t depth, Ahead& ahead, float* sums) {
  w_stride = kInPlace ? w_stride : kPanelStride;
  Ahead next = ahead;
  Floats sum[kRows * kColumns] = {};
  for (int32_t k = 0; k < depth; k += kLanes * sizeof(float) / sizeof(X)) {
    decltype(load_for(x, x)) x_k[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      x_k[r] = load_for(x, x + r * x_stride + k);
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const W* from = w + c * w_stride + k;
      const auto w_k = load_for(x, from);
      if (kInPlace) {
        __builtin_prefetch(from + kColumns * w_stride, 0, 3);
      } else if (c % 4 == 0) {
        next.ask(4);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r * kColumns + c] = multiply_add(sum[r * kColumns + c], w_k, x_k[r]);
      }
    }
  }
  ahead = next;
  add_totals<kRows, kColumns>(sum, sums);
}

// Elements of a row, with zeros from `count` on up to a multiple of kDepthStep.
template <typename T>
void unpack(const T* from, int32_t count, float* to) {
  int32_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    store(to + k, load(from + k));
  }
  for (; k < padded_depth(count); k += kLanes) {
    store(to + k, k < count ? load_partial(from + k, count - k) : Floats{});
  }
}
[[maybe_unused]] void unpack(const BFloat16* from, int32_t count, BFloat16* to) {
  __builtin_memset(to, 0, padded_depth(count) * sizeof *to);
  __builtin_memcpy(to, from, count * sizeof *to);
}

// 2^(e - 127) of a byte e, as MLX reads it: 0 is a denormal number, and 255 is infinity.
inline float power_of_two(uint8_t e) {
  return __builtin_bit_cast(float, e == 0 ? 0x00400000u : uint32_t{e} << 23);
}

// The float32 numbers that the integers of a group stand for.
class GroupValues {
 public:
  template <typename T>
  GroupValues(const LinearArgs& args, int64_t group, const T* /* the scales' type */)
      : is_float4_(args.offsets == nullptr) {
    if (is_float4_) {
      scale_ = broadcast(power_of_two(static_cast<const uint8_t*>(args.scales)[group]));
      offset_ = Floats{};
    } else {
      scale_ = broadcast(load_one(static_cast<const T*>(args.scales) + group));
      offset_ = broadcast(load_one(static_cast<const T*>(args.offsets) + group));
    }
#if defined(__AVX512F__)
    const Floats integers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    four_bits_ = (is_float4_ ? load(kFloat4) : integers) * scale_ + offset_;
#endif
  }

  Floats of_8_bits(Ints q) const { return __builtin_convertvector(q, Floats) * scale_ + offset_; }

  // Uses the low 4 bits of each lane.
  Floats of_4_bits(Ints q) const {
#if defined(__AVX512F__)
    return _mm512_maskz_permutexvar_ps(0xffff, __builtin_bit_cast(__m512i, q), four_bits_);
#else
    const Ints low = q & 15;
    if (!is_float4_) {
      return of_8_bits(low);
    }
    Floats found;
    for (int i = 0; i < kLanes; ++i) {
      found[i] = kFloat4[low[i]];
    }
    return found * scale_;
#endif
  }

 private:
  bool is_float4_;
  Floats scale_;
  Floats offset_;
#if defined(__AVX512F__)
  Floats four_bits_;
#endif
};

// The same for integers: of 4 bits the even ones of 2 * kLanes, then the odd ones.
template <typename T>
void unpack_integers(const LinearArgs& args, int64_t first, int32_t count, Ahead& ahead,
                     float* to) {
  const auto* from = static_cast<const uint8_t*>(args.weight) + first * args.bits / 8;
  for (int32_t k = 0; k < count; k += args.group) {
    const GroupValues values(args, (first + k) / args.group, static_cast<const T*>(nullptr));
    ahead.ask(args.group / kLanes);
    if (args.bits == 8) {
      for (int32_t i = k; i < k + args.group; i += kLanes) {
        store(to + i, values.of_8_bits(load_bytes(from + i)));
      }
      continue;
    }
    for (int32_t i = k; i < k + args.group; i += 2 * kLanes) {
      const Ints pairs = load_bytes(from + i / 2);
      store(to + i, values.of_4_bits(pairs));
      store(to + i + kLanes, values.of_4_bits(pairs >> 4));
    }
  }
}

// Whether x of integer weights is in fixed point. Two digits are too few for float32.
template <typename T>
[[maybe_unused]] bool is_fixed_point(const LinearArgs& args) {
  return args.bits == 4 && args.offsets && sizeof(T) == 2 && args.width >= kPass;
}

// X: what the packed x is.
template <typename X, typename T>
void multiply(const LinearArgs& args, const float* packed, int32_t rows, int32_t begin, int32_t end,
              void* out) {
  alignas(64) X panel[kPass * kPanelStride];
  constexpr int32_t kStep = kLanes * sizeof(float) / sizeof(X);
  const X* x = reinterpret_cast<const X*>(packed);
  const int32_t columns = args.width < kPass ? args.width : kPass;
  __builtin_memset(panel, 0, columns < kPass ? sizeof panel : 0);
  // Few rows read the weights where they are. For more, a copy in the cache is faster.
  const bool in_place =
      args.bits == 0 && args.depth % kStep == 0 && rows <= 2 * kRowBlock && columns == kPass;
  const int64_t x_stride = packed_stride(args.depth) * sizeof(float) / sizeof(X);
  constexpr int kFew = kAccumulators / kRowBlock;  // columns that all rows meet at once, in place
  const auto add_panel = [&](int32_t column, int32_t k, float* sums, Ahead& ahead) {
    const int32_t depth = args.depth - k < kDepthOfPanel ? args.depth - k : kDepthOfPanel;
    const int64_t at = int64_t{column} * args.depth + k;
    const T* w = static_cast<const T*>(args.weight) + at;
    for (int32_t c = 0; c < columns && !in_place; ++c) {
      X* to = panel + c * kPanelStride;
      if (args.bits == 0) {
        unpack(w + int64_t{c} * args.depth, depth, to);
      } else if constexpr (std::is_same_v<X, float>) {
        unpack_integers<T>(args, at + int64_t{c} * args.depth, depth, ahead, to);
      }
    }
    for_row_blocks(rows, [&]<int kRows>(int32_t r) {
      constexpr int kColumns = kAccumulators / kRows;
      const X* x_r = x + r * x_stride + k;
      float* to = sums + r * kPass;
      if (in_place) {
        return dot_block<kRows, kFew, true>(x_r, x_stride, w, args.depth, depth, ahead, to);
      }
      for (int32_t c = 0; c < kPass; c += kColumns) {
        const X* from = panel + c * kPanelStride;
        dot_block<kRows, kColumns, false>(x_r, x_stride, from, kPanelStride, depth, ahead, to + c);
      }
    });
  };
  const auto add = [&](int32_t first, float* sums, Ahead ahead) {
    for (int32_t c = 0; c < kPass; c += in_place ? kFew : kPass) {
      for (int32_t k = 0; k < args.depth; k += kDepthOfPanel) {
        add_panel(first + c, k, sums + c, ahead);
      }
    }
  };
  for_passes<T>(args, rows, begin, end, out, kStep, args.bits != 0, add);
}

// Adds x . w to kRows rows of y. w is `count` columns of a weight whose rows lie `width` apart.
template <int kRows, int kColumns, typename T>
[[gnu::noinline]] void add_block(const float* x, int32_t depth, const T* w, int32_t width,
                                 int32_t count, T* const* y, int32_t column) {
  Floats sum[kRows * kColumns] = {};
  for (int32_t k = 0; k < depth; ++k) {
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const T* from = w + int64_t{k} * width + c * kLanes;
      const Floats w_k = kColumns > 1 ? load(from) : load_up_to(from, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r * kColumns + c] += w_k * broadcast(x[r * depth + k]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kColumns; ++i) {
    const int32_t at = i % kColumns * kLanes, left = kColumns > 1 ? kLanes : count;
    T* to = y[i / kColumns] + column + at;
    store_up_to(to, load_up_to(to, left) + sum[i], left);
  }
}

// Calls body with a value of the arrays' type.
template <typename Body>
void for_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(0.0f);
  }
}

void pack_any(const LinearArgs& args, const void* x, float* to) {
  for_type(args.dtype, [&]<typename T>(T) {
    const T* from = static_cast<const T*>(x);
    if (args.bits == 0) {
      return unpack(from, args.depth, reinterpret_cast<Packed<T>*>(to));
    }
    unpack(from, args.depth, to);
#if defined(__AVX512VNNI__)
    if (is_fixed_point<T>(args) && to_fixed_point(args, to)) {
      return;
    }
#endif
    for (int32_t k = 0; args.bits == 4 && k < args.depth; k += 2 * kLanes) {
      float pairs[2 * kLanes];
      __builtin_memcpy(pairs, to + k, sizeof pairs);
      for (int i = 0; i < kLanes; ++i) {
        to[k + i] = pairs[2 * i];
        to[k + kLanes + i] = pairs[2 * i + 1];
      }
    }
  });
}

void multiply_any(const LinearArgs& args, const float* x, int32_t rows, int32_t begin, int32_t end,
                  void* out) {
  for_type(args.dtype, [&]<typename T>(T) {
    const auto in_floats = args.bits ? multiply<float, T> : multiply<Packed<T>, T>;
#if defined(__AVX512VNNI__)
    if constexpr (sizeof(T) == 2) {
      if (is_fixed_point<T>(args)) {
        multiply_fixed_point<T>(args, x, rows, begin, end, out);
        for (int32_t r = 0; r < rows; ++r) {
          const float* row = x + r * packed_stride(args.depth);
          if (scales_of(row, args.depth)[0] == 0) {
            in_floats(args, row, 1, begin, end, static_cast<T*>(out) + int64_t{r} * args.width);
          }
        }
        return;
      }
    }
#endif
    in_floats(args, x, rows, begin, end, out);
  });
}

void add_products_any(DType dtype, const void* x, const void* weight, int32_t rows, int32_t depth,
                      int32_t width, void* const* y) {
  for_type(dtype, [&]<typename T>(T) {
    const auto* w = static_cast<const T*>(weight);
    for_row_blocks(rows, [&]<int kRows>(int32_t r) {
      constexpr int kColumns = kAccumulators / kRows;
      float x_r[kRows * kMostTerms];
      for (int32_t i = 0; i < kRows * depth; ++i) {
        x_r[i] = load_one(static_cast<const T*>(x) + int64_t{r} * depth + i);
      }
      auto* to = reinterpret_cast<T* const*>(y + r);
      int32_t c = 0;
      for (; c + kColumns * kLanes <= width; c += kColumns * kLanes) {
        add_block<kRows, kColumns>(x_r, depth, w + c, width, kLanes, to, c);
      }
      for (; c < width; c += kLanes) {
        add_block<kRows, 1>(x_r, depth, w + c, width, width - c, to, c);
      }
    });
  });
}

}  // namespace

const LinearKernels kLinearKernels = {pack_any, multiply_any, add_products_any};

}  // namespace mlx_paged::cpu::KERNEL_ISA

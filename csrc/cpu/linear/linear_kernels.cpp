#include "csrc/cpu/linear/linear_kernels.h"

#include "csrc/cpu/simd.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

constexpr int32_t kPass = kColumnsOfPass;

// The part of the depth whose weights, as float32, stay in the first-level cache.
constexpr int32_t kDepthOfPanel = 512;

// Rows of a panel lie apart so that they do not share the few places of a cache.
constexpr int64_t kPanelStride = kDepthOfPanel + 16;

static_assert(kDepthStep % (2 * kLanes) == 0 && kDepthOfPanel % kDepthStep == 0);

constexpr int32_t padded_depth(int32_t depth) {
  return (depth + kDepthStep - 1) / kDepthStep * kDepthStep;
}

// sums[r][c] += x[r] . w[c] for kRows rows and as many columns as the accumulators allow. If kAsk,
// prefetches what is `ahead` bytes behind each element of w; otherwise w is a panel.
template <int kRows, int kColumns, bool kAsk, typename W>
[[gnu::noinline]] void dot_block(const float* x, int64_t x_stride, const W* w, int64_t w_stride,
                                 int32_t depth, int64_t ahead, float* sums) {
  constexpr int kCount = kRows * kColumns;
  constexpr int kFolded = kCount < kLanes ? kCount : kLanes;
  w_stride = kAsk ? w_stride : kPanelStride;
  Floats sum[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    sum[i] = Floats{};
  }
  for (int32_t k = 0; k < depth; k += kLanes) {
    Floats x_k[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      x_k[r] = load(x + r * x_stride + k);
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const W* from = w + c * w_stride + k;
      const Floats w_k = load(from);
      if (kAsk) {
        __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead, 0, 2);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r * kColumns + c] += w_k * x_k[r];
      }
    }
  }
  float totals[kCount < kLanes ? kLanes : kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; i += kFolded) {
    store(totals + i, sum_each<kFolded>(sum + i));
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sums[r * kPass + c] += totals[r * kColumns + c];
    }
  }
}

// kLanes bytes, zero-extended.
inline Words load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return __builtin_bit_cast(Words, _mm512_maskz_cvtepu8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return __builtin_bit_cast(Words, _mm256_cvtepu8_epi32(bytes));
#else
  uint8_t bytes __attribute__((vector_size(kLanes)));
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Words);
#endif
}

inline Floats to_floats(Words x) {
  return __builtin_convertvector(__builtin_bit_cast(Ints, x), Floats);
}

// One element. A partial load would wait for its own stores.
inline float load_one(const float* from) { return *from; }
inline float load_one(const BFloat16* from) {
  return __builtin_bit_cast(float, uint32_t{from->bits} << 16);
}
inline float load_one(const Float16* from) {
#if defined(__AVX2__)
  return _cvtsh_ss(from->bits);
#else
  return load_partial(from, 1)[0];
#endif
}

// Prefetches what is `ahead` bytes behind an address.
inline void ask(const void* from, int64_t ahead) {
  __builtin_prefetch(static_cast<const char*>(from) + ahead, 0, 2);
}

// Elements of a row of weights as float32, with zeros from `count` on up to a multiple of
// kDepthStep.
template <typename T>
void unpack(const T* from, int32_t count, int64_t ahead, float* to) {
  constexpr int32_t kStep = 64 / sizeof(T) > kLanes ? 64 / sizeof(T) : kLanes;
  int32_t k = 0;
  for (; k + kStep <= count; k += kStep) {
    ask(from + k, ahead);
    for (int32_t i = 0; i < kStep; i += kLanes) {
      store(to + k + i, load(from + k + i));
    }
  }
  for (; k < padded_depth(count); k += kLanes) {
    const int32_t left = count - k;
    store(to + k, left > 0 ? load_up_to(from + k, left) : Floats{});
  }
}

// The same for integers: of 4 bits the even ones of 2 * kLanes, then the odd ones.
template <int kBits, typename T>
void unpack_integers(const uint8_t* from, const T* scales, const T* offsets, int32_t count,
                     int32_t group, int64_t ahead, float* to) {
  constexpr int32_t kLine = 64 * 8 / kBits;
  for (int32_t k = 0; k < count; k += group) {
    const Floats scale = broadcast(load_one(scales + k / group));
    const Floats offset = broadcast(load_one(offsets + k / group));
    if (k % kLine == 0) {
      ask(from + k * kBits / 8, ahead);
    }
    if constexpr (kBits == 8) {
      for (int32_t i = k; i < k + group; i += kLanes) {
        store(to + i, to_floats(load_bytes(from + i)) * scale + offset);
      }
      continue;
    }
#if defined(__AVX512F__)
    const Floats numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats values = numbers * scale + offset;
    // The lookup uses the low 4 bits of each lane.
    const auto value = [&](Words q) {
      return _mm512_maskz_permutexvar_ps(0xffff, __builtin_bit_cast(__m512i, q), values);
    };
#else
    const auto value = [&](Words q) { return to_floats(q & 15) * scale + offset; };
#endif
    for (int32_t i = k; i < k + group; i += 2 * kLanes) {
      const Words pairs = load_bytes(from + i / 2);
      store(to + i, value(pairs));
      store(to + i + kLanes, value(pairs >> 4));
    }
  }
}

// Bytes of this many weights.
template <typename T>
int64_t weight_bytes(const LinearArgs& args, int64_t count) {
  return count * (args.bits ? args.bits : 8 * sizeof(T)) / 8;
}

// Elements [k, k + count) of row `column` of the weights as float32.
template <typename T>
void unpack_row(const LinearArgs& args, int64_t column, int32_t k, int32_t count, int64_t ahead,
                float* to) {
  const int64_t first = column * args.depth + k;
  const auto* from = static_cast<const uint8_t*>(args.weight) + weight_bytes<T>(args, first);
  if (args.bits == 0) {
    unpack(reinterpret_cast<const T*>(from), count, ahead, to);
    return;
  }
  (args.bits == 4 ? unpack_integers<4, T>
                  : unpack_integers<8, T>)(from,
                                           static_cast<const T*>(args.scales) + first / args.group,
                                           static_cast<const T*>(args.offsets) + first / args.group,
                                           count, args.group, ahead, to);
}

// A part of a pass: products of elements [k, k + depth) with some columns.
template <typename W>
struct Panel {
  const float* x;
  int64_t x_stride;
  int32_t rows;
  const W* w;
  int64_t w_stride;
  int32_t depth;
  int64_t ahead;
  const char* soon;  // if products take longer than reading weights: what the next pass reads here
  int64_t soon_bytes;  // of each block of products
};

template <bool kAsk, typename W>
void add_products(const Panel<W>& p, float* sums) {
  int64_t soon = 0;
  for_row_blocks(p.rows, [&]<int kRows>(int32_t r) {
    constexpr int kColumns = kAccumulators / kRows;
    for (int32_t c = 0; c < kPass; c += kColumns) {
      for (const int64_t end = soon + p.soon_bytes; soon < end; soon += 64) {
        ask(p.soon, soon);
      }
      dot_block<kRows, kColumns, kAsk>(p.x + r * p.x_stride, p.x_stride, p.w + c * p.w_stride,
                                       p.w_stride, p.depth, p.ahead, sums + r * kPass + c);
    }
  });
}

template <typename T>
void multiply(const LinearArgs& args, const float* x, int32_t rows, int32_t begin, int32_t end,
              void* out) {
  alignas(64) float panel[kPass * kPanelStride] = {};
  alignas(64) float sums[kRowsOfPass * kPass];
  const int32_t x_stride = padded_depth(args.depth);
  // Few rows read the weights where they are. For more, a copy in the cache is faster.
  const bool in_place = args.bits == 0 && args.depth % kLanes == 0 && rows <= 2 * kRowBlock;
  const bool spreads = rows > kRowBlock;  // prefetches, among the products
  const int64_t pass_bytes = weight_bytes<T>(args, int64_t{kPass} * args.depth);
  for (int32_t first = begin; first < end; first += kPass) {
    const int32_t columns = end - first < kPass ? end - first : kPass;
    __builtin_memset(sums, 0, sizeof(float) * kPass * rows);
    for (int32_t k = 0; k < args.depth; k += kDepthOfPanel) {
      const int32_t depth = args.depth - k < kDepthOfPanel ? args.depth - k : kDepthOfPanel;
      if (in_place && columns == kPass) {
        const T* w = static_cast<const T*>(args.weight) + int64_t{first} * args.depth + k;
        add_products<true, T>({x + k, x_stride, rows, w, args.depth, depth, pass_bytes, {}, 0},
                              sums);
        continue;
      }
      for (int32_t c = 0; c < columns; ++c) {
        unpack_row<T>(args, first + c, k, depth, spreads ? 0 : pass_bytes,
                      panel + c * kPanelStride);
      }
      const char* soon = static_cast<const char*>(args.weight) + (first / kPass + 1) * pass_bytes;
      const int64_t share = weight_bytes<T>(args, depth) * kAccumulators / rows;
      add_products<false, float>(
          {x + k, x_stride, rows, panel, kPanelStride, padded_depth(depth), 0,
           soon + weight_bytes<T>(args, int64_t{kPass} * k), spreads ? share : 0},
          sums);
    }
    for (int32_t i = 0; i < columns; i += kLanes) {
      const T* bias = static_cast<const T*>(args.bias);
      const Floats added = bias ? load_up_to(bias + first + i, columns - i) : Floats{};
      for (int32_t r = 0; r < rows; ++r) {
        T* to = static_cast<T*>(out) + int64_t{r} * args.width + first + i;
        store_up_to(to, load(sums + r * kPass + i) + added, columns - i);
      }
    }
  }
}

template <typename T>
void pack(const LinearArgs& args, const void* x, float* to) {
  unpack(static_cast<const T*>(x), args.depth, 0, to);
  for (int32_t k = 0; args.bits == 4 && k < args.depth; k += 2 * kLanes) {
    float pairs[2 * kLanes];
    __builtin_memcpy(pairs, to + k, sizeof pairs);
    for (int i = 0; i < kLanes; ++i) {
      to[k + i] = pairs[2 * i];
      to[k + kLanes + i] = pairs[2 * i + 1];
    }
  }
}

void pack_any(const LinearArgs& args, const void* x, float* to) {
  switch (args.dtype) {
    case DType::kFloat16:
      return pack<Float16>(args, x, to);
    case DType::kBFloat16:
      return pack<BFloat16>(args, x, to);
    default:
      return pack<float>(args, x, to);
  }
}

void multiply_any(const LinearArgs& args, const float* x, int32_t rows, int32_t begin, int32_t end,
                  void* out) {
  switch (args.dtype) {
    case DType::kFloat16:
      return multiply<Float16>(args, x, rows, begin, end, out);
    case DType::kBFloat16:
      return multiply<BFloat16>(args, x, rows, begin, end, out);
    default:
      return multiply<float>(args, x, rows, begin, end, out);
  }
}

}  // namespace

const LinearKernels kLinearKernels = {pack_any, multiply_any};

}  // namespace mlx_paged::cpu::KERNEL_ISA

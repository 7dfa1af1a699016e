// One register of float32 lanes, its loads from each cache dtype, its reductions, and how many
// registers a product uses.
//
// Only translation units that are compiled once for each instruction set include this file. The
// namespace KERNEL_ISA keeps their functions apart: an inline function that was built with AVX-512
// must not be linked into code for a machine without it. For the same reason nothing here calls the
// standard library.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mlx_paged::cpu::KERNEL_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// Cache elements: the bits of IEEE binary16 and of bfloat16.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The types of a quantized cache: one element of 8 bits, a word of a row of 6-bit elements, and two
// elements of 4 bits, the first in the low half.
struct Int8 {
  int8_t bits;
};
struct [[gnu::packed]] Int6 {
  uint16_t bits;
};
struct Int4Pair {
  uint8_t bits;
};

template <typename T>
inline constexpr bool kIsPair = false;
template <>
inline constexpr bool kIsPair<Int4Pair> = true;

template <typename T>
inline constexpr int kBits = kIsPair<T> ? 4 : 8 * static_cast<int>(sizeof(T));  // of an element
template <>
inline constexpr int kBits<Int6> = 6;

// The bytes of `count` elements, and where an element is; one of fewer than 8 bits is found by the
// first element of its pair or its four.
template <typename T>
constexpr int32_t bytes_of(int32_t count) {
  return (count * kBits<T> + 7) / 8;
}
template <typename T>
const T* element(const T* row, int32_t index) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(row) + index * kBits<T> / 8);
}

// Compilers know that x - 0 is x for every x. They would keep the addition in 0 + x.
inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }

template <int kCount>
inline void store_first(float* to, Floats x) {
  __builtin_memcpy(to, &x, kCount * sizeof(float));
}

// kLanes 16-bit elements, zero-extended. gcc 12 splits the portable form into half registers.
inline Words load_words(const void* from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(from));
  return __builtin_bit_cast(Words, _mm512_maskz_cvtepu16_epi32(0xffff, bits));
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return __builtin_bit_cast(Words, _mm256_cvtepu16_epi32(bits));
#else
  Halves bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
#endif
}

// kLanes bytes, zero-extended.
inline Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return __builtin_bit_cast(Ints, _mm512_maskz_cvtepu8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return __builtin_bit_cast(Ints, _mm256_cvtepu8_epi32(bytes));
#else
  uint8_t bytes __attribute__((vector_size(kLanes)));
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

inline Floats load(const BFloat16* from) {
  return __builtin_bit_cast(Floats, load_words(from) << 16);
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
  // The masked form: gcc 12 warns of an uninitialised variable in the header of the plain form.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_maskz_cvtph_ps(0xffff, bits);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  const Words half = load_words(from);
  const Words magnitude = half & 0x7fff;
  const Words exponent = magnitude & 0x7c00;
  // Rebias the exponent by 127 - 15, infinities and NaNs once more to 255.
  const Words rebased = (magnitude << 13) + (112u << 23);
  const Words special = rebased + (112u << 23);
  const Words subnormal = __builtin_bit_cast(
      Words, __builtin_convertvector(__builtin_bit_cast(Ints, magnitude), Floats) * 0x1p-24f);
  const Words finite = exponent == 0 ? subnormal : rebased;
  const Words absolute = exponent == 0x7c00 ? special : finite;
  return __builtin_bit_cast(Floats, absolute | ((half & 0x8000) << 16));
#endif
}

inline Floats load(const Int8* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512i words = _mm512_maskz_cvtepi8_epi32(0xffff, bytes);
  return _mm512_maskz_cvtepi32_ps(0xffff, words);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
  int8_t bytes __attribute__((vector_size(kLanes)));
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

#if defined(__AVX512F__)
// 16 elements of kWidth bits each, from -kMiddle on in two's complement, or from 0 on.
// Each lane takes the word in which its element begins and the next one. As the mantissa of
// 2^(23 - place), where place is the element's lowest bit, element + middle adds just that.
template <int kWidth, int kMiddle>
[[gnu::always_inline]] inline Floats unpack(__m128i packed) {
  const auto bits = [](auto x) { return __builtin_bit_cast(__m512i, x); };
  const Ints bit = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * kWidth;
  const Ints place = bit & 15, both = (bit >> 4) * 0x10001 + 0x10000;
  const Ints one = (127 + 23 - place) << 23, flipped = one ^ (kMiddle << place);
  const __m512i words = _mm512_castsi128_si512(packed);
  const __m512i lanes = _mm512_maskz_permutexvar_epi16(~0u, bits(both), words);
  const __m512i mask = bits(((1 << kWidth) - 1) << place);
  const __m512i sum = _mm512_ternarylogic_epi32(lanes, mask, bits(flipped), 0x6a);
  return __builtin_bit_cast(Floats, sum) - (__builtin_bit_cast(Floats, one) + float{kMiddle});
}
#endif

inline Floats load(const Int4Pair* from) {
#if defined(__AVX512F__)
  return unpack<4, 0>(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i q = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
  return _mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes / 2)));
  typedef uint16_t Pairs __attribute__((vector_size(kLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  const Pairs pairs = __builtin_convertvector(bytes, Pairs);
  const Pairs split = (pairs | (pairs << 4)) & 0x0f0f;
  return load(reinterpret_cast<const Int8*>(&split));
#endif
}

inline Floats load(const Int6* from) {
#if defined(__AVX512F__)
  return unpack<6, 32>(_mm_maskz_loadu_epi32(7, from));
#else
  const auto* bytes = reinterpret_cast<const char*>(from);
#if defined(__AVX2__)
  int32_t pieces[2];
  __builtin_memcpy(&pieces[0], bytes, 4);
  __builtin_memcpy(&pieces[1], bytes + 2, 4);
  const __m256i both =
      _mm256_blend_epi32(_mm256_set1_epi32(pieces[0]), _mm256_set1_epi32(pieces[1]), 0xf0);
  const Ints shifts = {26, 20, 14, 8, 18, 12, 6, 0};
  const Ints all = __builtin_bit_cast(Ints, both);
#else
  int32_t word = 0;
  __builtin_memcpy(&word, bytes, 3);
  const Ints shifts = {26, 20, 14, 8};
  const Ints all = word - Ints{};
#endif
  // Each element is moved to the top of its lane, and down again with its sign.
  return __builtin_convertvector((all << shifts) >> 26, Floats);
#endif
}

// The first `count` < kLanes elements, then zeros. Reads only these elements.
template <typename T>
Floats load_partial(const T* from, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (kBits<T> <= 16) {
    const __m256i bits = _mm256_maskz_loadu_epi8((1u << bytes_of<T>(count)) - 1, from);
    return load(reinterpret_cast<const T*>(&bits));
  } else {
    return _mm512_maskz_loadu_ps((1u << count) - 1, from);
  }
#else
  T elements[kLanes] = {};
  __builtin_memcpy(elements, from, bytes_of<T>(count));
  return load(elements);
#endif
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

// The first kLanes of `count` elements; zeros after the last.
template <typename T>
Floats load_up_to(const T* from, int count) {
  return count < kLanes ? load_partial(from, count) : load(from);
}

// The bits of x as bfloat16, to nearest, ties to even.
inline Words bfloat16_bits(Floats x) {
  const Words bits = __builtin_bit_cast(Words, x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = (bits >> 16) | 0x40;
  return x == x ? rounded : quiet;
}

inline void store(BFloat16* to, Floats x) {
  const Halves halves = __builtin_convertvector(bfloat16_bits(x), Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}

inline void store(Float16* to, Floats x) {
#if defined(__AVX512F__)
  const __m256i bits = _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  const Words bits = __builtin_bit_cast(Words, x);
  const Words magnitude = bits & 0x7fffffff;
  // Rounded to nearest, ties to even, with the exponent rebased from 127 to 15.
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 1/2 leaves a multiple of 2^-24, binary16's smallest number, in the low bits.
  const Floats shifted = __builtin_bit_cast(Floats, magnitude) + 0.5f;
  const Words subnormal = __builtin_bit_cast(Words, shifted) - (126u << 23);
  const Words finite = magnitude < (113u << 23) ? subnormal : normal;
  const Words infinite = magnitude > (255u << 23) ? (Words{} + 0x7e00) : (Words{} + 0x7c00);
  const Words half = magnitude >= 0x477ff000 ? infinite : finite;  // from 65520 on
  const Halves halves = __builtin_convertvector(half | ((bits >> 16) & 0x8000), Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
#endif
}

// The first kLanes of `count` elements, of which there may be fewer.
template <typename T>
void store_up_to(T* to, Floats x, int count) {
  if (count >= kLanes) {
    store(to, x);
    return;
  }
  T elements[kLanes];
  store(elements, x);
  __builtin_memcpy(to, elements, count * sizeof(T));
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Combines the halves of each pair of blocks of kHalf lanes: the halves of a in the first block,
// the halves of b in the second.
template <int kHalf, typename Combine, size_t... kLane>
[[gnu::always_inline]] inline Floats fold(Floats a, Floats b, Combine combine,
                                          std::index_sequence<kLane...>) {
  const Floats kept = __builtin_shufflevector(a, b, (kLane & kHalf ? kLanes + kLane : kLane)...);
  const Floats moved =
      __builtin_shufflevector(a, b, (kLane & kHalf ? kLanes + kLane - kHalf : kLane + kHalf)...);
  return combine(kept, moved);
}

// Lane i < kCount of the result combines the lanes of x[i], for kCount registers, a power of two
// up to kLanes, which it overwrites. The order does not depend on kCount.
template <int kCount, int kHalf = kLanes / 2, typename Combine>
[[gnu::always_inline]] inline Floats fold_each(Floats* x, Combine combine) {
  constexpr int kLeft = kCount < kHalf ? kCount : kHalf;
#pragma GCC unroll 16
  for (int i = 0; i < kLeft; ++i) {
    x[i] = fold<kHalf>(x[i], x[kCount > kHalf ? i + kHalf : i], combine,
                       std::make_index_sequence<kLanes>());
  }
  if constexpr (kHalf > 1) {
    return fold_each<kLeft, kHalf / 2>(x, combine);
  } else {
    return x[0];
  }
}

template <int kCount>
[[gnu::always_inline]] inline Floats sum_each(Floats* x) {
  return fold_each<kCount>(x, [](Floats a, Floats b) { return a + b; });
}

template <int kCount>
[[gnu::always_inline]] inline Floats max_each(Floats* x) {
  return fold_each<kCount>(x, [](Floats a, Floats b) { return maximum(a, b); });
}

// Exchanges the off-diagonal blocks of kHalf lanes: low takes the first half of each pair of blocks
// of both registers, high the second.
template <int kHalf, size_t... kLane>
[[gnu::always_inline]] inline void exchange(Floats& low, Floats& high,
                                            std::index_sequence<kLane...>) {
  const Floats a = low;
  const Floats b = high;
  low = __builtin_shufflevector(a, b, (kLane & kHalf ? kLanes + kLane - kHalf : kLane)...);
  high = __builtin_shufflevector(a, b, (kLane & kHalf ? kLanes + kLane : kLane + kHalf)...);
}

// Transposes kLanes registers as a square matrix.
template <int kHalf = kLanes / 2>
[[gnu::always_inline]] inline void transpose(Floats* x) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kHalf) == 0) {
      exchange<kHalf>(x[i], x[i + kHalf], std::make_index_sequence<kLanes>());
    }
  }
  if constexpr (kHalf > 1) {
    transpose<kHalf / 2>(x);
  }
}

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

#include "csrc/cpu/layers/layer_kernels.h"

#include <type_traits>
#include <utility>

#include "csrc/cpu/simd_math.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

// Calls body(i, number of elements from i on) for each register of a row, but not for those of a
// word that forbids all of its 32 elements; words may be null.
template <typename Body>
[[gnu::always_inline]] inline void for_registers(int64_t count, const uint32_t* words, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    if (!words || words[i / 32] != 0) {
      body(i, kLanes);
    }
  }
  if (i < count && (!words || words[i / 32] != 0)) {
    body(i, static_cast<int>(count - i));
  }
}

template <typename T>
Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __builtin_bit_cast(Floats, bfloat16_bits(x) << 16);
  } else {
    T elements[kLanes];
    store(elements, x);
    return load(elements);
  }
}

Ints lanes() {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  return lane;
}

// The first `count` lanes of x, then the other lanes of y.
Floats lanes_or(Floats x, int count, Floats y) { return lanes() < count ? x : y; }

// Elements of a row from i on, and -inf where the row's `words`, if there are any, forbid one.
template <typename T>
Floats load_allowed(const T* x, const uint32_t* words, int64_t i, int count) {
  const Floats value = load_up_to(x + i, count);
  if (!words || words[i / 32] == ~uint32_t{0}) {
    return value;
  }
  const Ints word = Ints{} + static_cast<int32_t>(words[i / 32] >> (i % 32));
  return ((word >> lanes()) & 1) != 0 ? value : broadcast(-__builtin_inff());
}

float sum(Floats x) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += x[lane];
  }
  return total;
}

template <typename T>
void rms_norm(const void* row, const void* weights, float eps, int32_t width, void* to) {
  const T* x = static_cast<const T*>(row);
  const T* weight = static_cast<const T*>(weights);
  T* out = static_cast<T*>(to);
  Floats squares[4] = {};
  int64_t part = 0;
  for_registers(width, nullptr, [&](int64_t i, int count) {
    const Floats value = load_up_to(x + i, count);
    squares[part++ % 4] += value * value;
  });
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / width;
  const Floats factor = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for_registers(width, nullptr, [&](int64_t i, int count) {
    const Floats normal = rounded<T>(load_up_to(x + i, count) * factor);
    store_up_to(out + i, weight ? normal * load_up_to(weight + i, count) : normal, count);
  });
}

// x / (1 + e^-u)
Floats times_sigmoid(Floats x, Floats u) {
  const Floats e = exp(u < 0 ? u : -u);
  return x * (u < 0 ? e : broadcast(1.0f)) / (e + 1.0f);
}

template <typename T>
Floats silu(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return times_sigmoid(x, x);
  } else {
    const Floats e = rounded<T>(exp_of_positive(x < 0 ? -x : x));
    const Floats y = 1.0f / (e + 1.0f);
    return rounded<T>(x * rounded<T>(x < 0 ? y : 1.0f - y));
  }
}

template <typename T>
Floats gelu_approx(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    // 1/2 x (1 + tanh(y)) is x times the sigmoid of 2 y.
    return times_sigmoid(x, (x + x * x * x * 0.044715f) * 1.5957691216057308f);
  } else {
    const Floats cube = rounded<T>(x * x * x) * rounded<T>(broadcast(0.044715f));
    const Floats sum = rounded<T>(x + rounded<T>(cube));
    const Floats argument = rounded<T>(sum * rounded<T>(broadcast(0.7978845608028654f)));
    return rounded<T>(rounded<T>(x * 0.5f) * rounded<T>(rounded<T>(tanh(argument)) + 1.0f));
  }
}

template <Activation kActivation, typename T>
void activate_all(const T* x, const T* factor, int64_t size, T* out) {
  for_registers(size, nullptr, [&](int64_t i, int count) {
    const Floats value = load_up_to(x + i, count);
    const Floats active = kActivation == Activation::kSilu ? silu<T>(value) : gelu_approx<T>(value);
    store_up_to(out + i, factor ? active * load_up_to(factor + i, count) : active, count);
  });
}

template <typename T>
void activate(Activation activation, const void* x, const void* factor, int64_t count, void* out) {
  const auto all = activation == Activation::kSilu ? activate_all<Activation::kSilu, T>
                                                   : activate_all<Activation::kGeluApprox, T>;
  all(static_cast<const T*>(x), static_cast<const T*>(factor), count, static_cast<T*>(out));
}

template <typename T>
void angles(float position, const float* frequencies, int32_t pairs, float* sines, float* cosines) {
  for_registers(pairs, nullptr, [&](int64_t i, int count) {
    const auto [sine, cosine] = sine_cosine(load_up_to(frequencies + i, count) * position);
    store_up_to(sines + i, rounded<T>(sine), count);
    store_up_to(cosines + i, rounded<T>(cosine), count);
  });
}

template <typename T>
void rotate_halves(const T* x, const float* sines, const float* cosines, int32_t pairs, T* out) {
  for_registers(pairs, nullptr, [&](int64_t i, int count) {
    const Floats a = load_up_to(x + i, count);
    const Floats b = load_up_to(x + i + pairs, count);
    const Floats sine = load_up_to(sines + i, count);
    const Floats cosine = load_up_to(cosines + i, count);
    store_up_to(out + i, rounded<T>(a * cosine) - rounded<T>(b * sine), count);
    store_up_to(out + i + pairs, rounded<T>(a * sine) + rounded<T>(b * cosine), count);
  });
}

template <typename T>
void rotate_neighbours(const T* x, const float* sines, const float* cosines, int32_t pairs,
                       T* out) {
  const auto put = [](T* to, float value) { store_up_to(to, broadcast(value), 1); };
  const auto product = [](float a, float b) { return rounded<T>(broadcast(a * b))[0]; };
  for (int32_t i = 0; i < pairs; ++i) {
    const float a = load_one(x + 2 * i);
    const float b = load_one(x + 2 * i + 1);
    put(out + 2 * i, product(a, cosines[i]) - product(b, sines[i]));
    put(out + 2 * i + 1, product(a, sines[i]) + product(b, cosines[i]));
  }
}

template <typename T>
void rotate(const void* x, const float* sines, const float* cosines, int32_t pairs, int32_t width,
            bool traditional, void* out) {
  const T* from = static_cast<const T*>(x);
  T* to = static_cast<T*>(out);
  (traditional ? rotate_neighbours<T> : rotate_halves<T>)(from, sines, cosines, pairs, to);
  const int32_t rotated = 2 * pairs;
  __builtin_memcpy(to + rotated, from + rotated, sizeof(T) * (width - rotated));
}

// The largest allowed element of a row; NaN if any of them is NaN.
template <typename T>
float largest(const T* x, const uint32_t* words, int32_t width) {
  Floats best = broadcast(-__builtin_inff());
  Ints is_nan = {};
  for_registers(width, words, [&](int64_t i, int count) {
    const Floats value = load_allowed(x, words, i, count);
    best = maximum(lanes_or(value, count, best), best);
    is_nan |= value != value;
  });
  float result = best[0];
  for (int lane = 0; lane < kLanes; ++lane) {
    result = best[lane] > result ? best[lane] : result;
    result = is_nan[lane] ? __builtin_nanf("") : result;
  }
  return result;
}

// A float32 sum over more elements loses its last bits.
constexpr int32_t kSummed = 4096;

template <typename T>
float sum_of_powers(const T* x, const uint32_t* words, int32_t width, float top) {
  Floats sums[4] = {};
  for_registers(width, words, [&](int64_t i, int count) {
    const Floats power = exp(load_allowed(x, words, i, count) - top);
    sums[i / kLanes % 4] += lanes_or(power, count, Floats{});
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
int32_t first_of_largest(const T* x, const uint32_t* words, int32_t width, float subtrahend) {
  Floats best = broadcast(-__builtin_inff());
  Ints places = {};
  for_registers(width, words, [&](int64_t i, int count) {
    Floats value = rounded<T>(load_allowed(x, words, i, count) - subtrahend);
    value = lanes_or(value == value ? value : broadcast(__builtin_inff()), count, best);
    places = value > best ? lanes() + static_cast<int32_t>(i) : places;
    best = value > best ? value : best;
  });
  int found = 0;
  for (int lane = 1; lane < kLanes; ++lane) {
    const bool is_first = best[lane] == best[found] && places[lane] < places[found];
    found = best[lane] > best[found] || is_first ? lane : found;
  }
  return places[found];
}

template <typename T>
void likeliest(const void* row, const void* allowed, int32_t width, float out[2]) {
  const T* x = static_cast<const T*>(row);
  const auto* words = static_cast<const uint32_t*>(allowed);
  const float top = largest(x, words, width);
  double total = 0;
  for (int32_t i = 0; i < width; i += kSummed) {
    const int32_t count = width - i < kSummed ? width - i : kSummed;
    total += sum_of_powers(x + i, words ? words + i / 32 : words, count, top);
  }
  // If the largest element is infinite, the differences are NaN.
  const bool finite = top - top == 0;
  const float value = finite ? top + static_cast<float>(__builtin_log(total)) : top;
  const float subtrahend = rounded<T>(broadcast(value))[0];
  out[0] = value;
  out[1] = static_cast<float>(first_of_largest(x, words, width, subtrahend));
}

template <typename T>
void mask(const void* row, const void* allowed, int32_t width, void* to) {
  const T* x = static_cast<const T*>(row);
  const auto* words = static_cast<const uint32_t*>(allowed);
  for_registers(width, nullptr, [&](int64_t i, int count) {
    store_up_to(static_cast<T*>(to) + i, load_allowed(x, words, i, count), count);
  });
}

// The Hadamard transform of each block of 2 * kHalf lanes, without its scale.
template <int kHalf, size_t... kLane>
Floats transformed(Floats x, std::index_sequence<kLane...> sequence) {
  if constexpr (kHalf > 1) {
    x = transformed<kHalf / 2>(x, sequence);
  }
  const Floats other = __builtin_shufflevector(x, x, (kLane ^ kHalf)...);
  return (lanes() & kHalf) != 0 ? other - x : other + x;
}

// As `transformed`, of `count` elements, a power of two.
void transform(float* x, int32_t count) {
  int32_t half = 1;
  for (int32_t i = 0; i + kLanes <= count; i += kLanes) {
    store(x + i, transformed<kLanes / 2>(load(x + i), std::make_index_sequence<kLanes>()));
    half = kLanes;
  }
  for (; half < count; half *= 2) {
    for (int32_t first = 0; first < count; first += 2 * half) {
      for (int32_t i = first; i < first + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

template <typename T>
void hadamard(const void* row, int32_t width, void* to) {
  const T* x = static_cast<const T*>(row);
  T* out = static_cast<T*>(to);
  float part[kMostTransformed];
  while (width > 0) {
    const int32_t count = int32_t{1} << (31 - __builtin_clz(width));
    for_registers(count, nullptr, [&](int64_t i, int some) {
      store_up_to(part + i, load_up_to(x + i, some), some);
    });
    transform(part, count);
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(count));
    for_registers(count, nullptr, [&](int64_t i, int some) {
      store_up_to(out + i, load_up_to(part + i, some) * scale, some);
    });
    x += count;
    out += count;
    width -= count;
  }
}

template <typename T>
constexpr LayerKernels kKernelsOf = {rms_norm<T>,  activate<T>, angles<T>,  rotate<T>,
                                     likeliest<T>, mask<T>,     hadamard<T>};

}  // namespace

const LayerKernelTable kLayerKernels = {kKernelsOf<float>, kKernelsOf<Float16>,
                                        kKernelsOf<BFloat16>};

}  // namespace mlx_paged::cpu::KERNEL_ISA

#include "csrc/cpu/recurrent/recurrent_kernels.h"

#include <type_traits>

#include "csrc/cpu/simd_math.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

template <typename T>
Floats rounded_to(Floats x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    T elements[kLanes];
    store(elements, x);
    return load(elements);
  }
}

// to[i] = from[i] for `count` elements, then zeros up to `width`, a multiple of kLanes.
template <typename T>
void widen(const T* from, int32_t count, int32_t width, float* to) {
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(to + i, load(from + i));
  }
  if (i < count) {
    store(to + i, load_partial(from + i, count - i));
    i += kLanes;
  }
  for (; i < width; i += kLanes) {
    store(to + i, Floats{});
  }
}

template <typename T>
void narrow(const float* from, int32_t count, T* to) {
  for (int32_t i = 0; i < count; i += kLanes) {
    store_up_to(to + i, load(from + i), count - i);
  }
}

// A state in scratch memory, its rows padded to `width`.
template <typename T>
void load_state(const RecurrentTile& tile, int32_t width, float* to) {
  const T* from = static_cast<const T*>(tile.state);
  for (int32_t r = 0; r < tile.rows; ++r) {
    widen(from ? from + int64_t{r} * tile.columns : from, from ? tile.columns : 0, width,
          to + int64_t{r} * width);
  }
}

template <typename T>
void store_state(const RecurrentTile& tile, int32_t width, const float* from) {
  T* to = static_cast<T*>(tile.new_state);
  for (int32_t r = 0; r < tile.rows; ++r) {
    narrow(from + int64_t{r} * width, tile.columns, to + int64_t{r} * tile.columns);
  }
}

// Calls body<rows>(first) for the rows of a tile: kRowsAtOnce, then one by one.
template <typename Body>
[[gnu::always_inline]] inline void for_rows_of(int32_t rows, Body body) {
  int32_t r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) {
    body.template operator()<kRowsAtOnce>(r);
  }
  for (; r < rows; ++r) {
    body.template operator()<1>(r);
  }
}

// Calls body(t, out) for each token; `out` has room for a row of float32 elements, which are
// rounded to T and stored. A masked token's are zeros.
template <typename T, typename Body>
[[gnu::always_inline]] inline void for_tokens(const RecurrentTile& tile, float* row, Body body) {
  for (int64_t t = 0; t < tile.tokens; ++t) {
    if (tile.mask && !tile.mask[t * tile.mask_step]) {
      widen(static_cast<const float*>(nullptr), 0, padded_columns(tile.rows), row);
    } else {
      body(t, row);
    }
    narrow(row, tile.rows, static_cast<T*>(tile.out) + t * tile.out_step);
  }
}

// s[r] . k for kRows rows.
template <int kRows>
[[gnu::noinline]] void dots(const float* s, int32_t width, const float* k, float* to) {
  Floats sums[2 * kRows] = {};
  for (int32_t i = 0; i < width; i += 2 * kLanes) {
    const Floats first = load(k + i), second = load(k + i + kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r] += load(s + r * width + i) * first;
      sums[kRows + r] += load(s + r * width + i + kLanes) * second;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    sums[r] += sums[kRows + r];
  }
  store_first<kRows>(to, sum_each<kRows>(sums));
}

// s[r] = s[r] * g + k * factor[r], then s[r] . q, for kRows rows. A gate is g[0] or one for each
// column.
template <int kRows, bool kVectors>
[[gnu::noinline]] void update(float* s, int32_t width, const float* g, const float* k,
                              const float* factor, const float* q, float* to) {
  Floats factors[kRows], sums[kRows] = {};
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    factors[r] = broadcast(factor[r]);
  }
  const Floats gate = broadcast(g[0]);
  for (int32_t i = 0; i < width; i += kLanes) {
    const Floats key = load(k + i), query = load(q + i), own = kVectors ? load(g + i) : gate;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats row = load(s + r * width + i) * own + key * factors[r];
      store(s + r * width + i, row);
      sums[r] += row * query;
    }
  }
  store_first<kRows>(to, sum_each<kRows>(sums));
}

template <typename T, bool kVectors>
void delta_tokens(const DeltaTile& tile) {
  const int32_t width = padded_columns(tile.columns), height = padded_columns(tile.rows);
  float *k = tile.scratch, *q = k + width, *gated = q + width, *gates = gated + width;
  float *s = gates + 2 * width, *factors = s + int64_t{tile.rows} * width, *y = factors + height;
  load_state<float>(tile, width, s);
  for_tokens<T>(tile, y, [&](int64_t t, float* out) {
    widen(static_cast<const T*>(tile.k) + t * tile.k_step, tile.columns, width, k);
    widen(static_cast<const T*>(tile.q) + t * tile.q_step, tile.columns, width, q);
    const float* gate = tile.gates + t * tile.gate_step;
    if constexpr (kVectors) {
      widen(gate, tile.columns, width, gates);
      for (int32_t i = 0; i < width; i += kLanes) {
        store(gated + i, load(gates + i) * load(k + i));
      }
      gate = gates;
    }
    for_rows_of(tile.rows, [&]<int kRows>(int32_t r) {
      dots<kRows>(s + int64_t{r} * width, width, kVectors ? gated : k, factors + r);
    });
    const T* v = static_cast<const T*>(tile.v) + t * tile.v_step;
    const float beta = tile.betas[t * tile.beta_step];
    for (int32_t i = 0; i < tile.rows; i += kLanes) {
      const Floats known = kVectors ? load(factors + i) : load(factors + i) * gate[0];
      store(factors + i, (load_up_to(v + i, tile.rows - i) - known) * beta);
    }
    for_rows_of(tile.rows, [&]<int kRows>(int32_t r) {
      update<kRows, kVectors>(s + int64_t{r} * width, width, gate, k, factors + r, q, out + r);
    });
  });
  store_state<float>(tile, width, s);
}

template <typename T>
void delta(const DeltaTile& tile) {
  (tile.has_vectors ? delta_tokens<T, true> : delta_tokens<T, false>)(tile);
}

template <typename T, typename Out>
void scan_tokens(const ScanTile& tile) {
  const int32_t width = padded_columns(tile.columns), height = padded_columns(tile.rows);
  float *b = tile.scratch, *c = b + width, *s = c + 4 * width;
  float *factors = s + int64_t{tile.rows} * width, *y = factors + height;
  load_state<float>(tile, width, s);
  for_tokens<Out>(tile, y, [&](int64_t t, float* out) {
    widen(static_cast<const T*>(tile.b) + t * tile.b_step, tile.columns, width, b);
    widen(static_cast<const T*>(tile.c) + t * tile.c_step, tile.columns, width, c);
    const T* x = static_cast<const T*>(tile.x) + t * tile.x_step;
    const float dt = tile.dt[t * tile.dt_step];
    for (int32_t i = 0; i < tile.rows; i += kLanes) {
      store(factors + i, load_up_to(x + i, tile.rows - i) * dt);
    }
    for_rows_of(tile.rows, [&]<int kRows>(int32_t r) {
      update<kRows, false>(s + int64_t{r} * width, width, tile.decays + t * tile.dt_step, b,
                           factors + r, c, out + r);
    });
    for (int32_t i = 0; i < tile.rows; i += kLanes) {
      store(out + i, load(out + i) + load_up_to(x + i, tile.rows - i) * tile.skip);
    }
  });
  store_state<float>(tile, width, s);
}

template <typename T>
void scan(const ScanTile& tile) {
  (tile.is_wide ? scan_tokens<T, float> : scan_tokens<T, T>)(tile);
}

// log(1 + e^x) = max(x, 0) + 2 artanh(e / (2 + e)) with e = e^-|x|. The argument of artanh is at
// most 1/3: nine terms of its series have a relative error of 1e-9. In double precision, because
// the rates of decay multiply an error.
Floats softplus(Floats x) {
  const Doubles e = __builtin_convertvector(exp(x < 0 ? x : -x), Doubles);
  const Doubles z = e / (e + 2.0), square = z * z;
  Doubles p = square * (1.0 / 17) + 1.0 / 15;
  p = p * square + 1.0 / 13;
  p = p * square + 1.0 / 11;
  p = p * square + 1.0 / 9;
  p = p * square + 1.0 / 7;
  p = p * square + 1.0 / 5;
  p = p * square + 1.0 / 3;
  p = p * square + 1.0;
  const Doubles positive = __builtin_convertvector(x > 0 ? x : Floats{}, Doubles);
  return __builtin_convertvector(positive + (z + z) * p, Floats);
}

// s[r] = s[r] * e^(t[r] * a[r]) + b * factor[r], then s[r] . c. The decay is added as a difference:
// most decays are so near to 1 that their own rounding would be the largest error of a long state.
template <int kRows, typename T>
[[gnu::noinline]] void select(float* s, int32_t width, const float* a, const float* t,
                              const float* factor, const float* b, const float* c, float* to) {
  Floats sums[kRows] = {};
  for (int32_t i = 0; i < width; i += kLanes) {
    const Floats own = load(b + i), other = load(c + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats lost = exp_minus_one(load(a + r * width + i) * t[r]);
      const Floats before = load(s + r * width + i);
      const Floats row = rounded_to<T>(before + (before * lost + own * broadcast(factor[r])));
      store(s + r * width + i, row);
      sums[r] += row * other;
    }
  }
  store_first<kRows>(to, sum_each<kRows>(sums));
}

template <typename T>
void selective(const SelectiveTile& tile) {
  // A state has few columns here: rows are padded to one register.
  const int32_t width = (tile.columns + kLanes - 1) / kLanes * kLanes;
  const int32_t height = padded_columns(tile.rows);
  float *b = tile.scratch, *c = b + width, *t_row = c + width, *factors = t_row + height;
  float *y = factors + height, *s = y + height, *a = s + int64_t{tile.rows} * width;
  load_state<T>(tile, width, s);
  for (int32_t r = 0; r < tile.rows; ++r) {
    widen(tile.a + int64_t{r} * tile.columns, tile.columns, width, a + int64_t{r} * width);
    for (int32_t i = 0; i < width; i += kLanes) {
      const Floats logarithm = load(a + int64_t{r} * width + i);
      const Floats small = exp(logarithm < 0 ? logarithm : Floats{});
      const Floats large = exp_of_positive(logarithm < 0 ? Floats{} : logarithm);
      store(a + int64_t{r} * width + i, -(logarithm < 0 ? small : large));
    }
  }
  for_tokens<T>(tile, y, [&](int64_t t, float* out) {
    widen(static_cast<const T*>(tile.b) + t * tile.b_step, tile.columns, width, b);
    widen(static_cast<const T*>(tile.c) + t * tile.c_step, tile.columns, width, c);
    const T* x = static_cast<const T*>(tile.x) + t * tile.x_step;
    const T* d = static_cast<const T*>(tile.d) + t * tile.d_step;
    for (int32_t i = 0; i < tile.rows; i += kLanes) {
      const Floats step = softplus(load_up_to(d + i, tile.rows - i));
      store(t_row + i, step);
      store(factors + i, step * load_up_to(x + i, tile.rows - i));
    }
    for_rows_of(tile.rows, [&]<int kRows>(int32_t r) {
      select<kRows, T>(s + int64_t{r} * width, width, a + int64_t{r} * width, t_row + r,
                       factors + r, b, c, out + r);
    });
    for (int32_t i = 0; i < tile.rows; i += kLanes) {
      const int32_t left = tile.rows - i;
      store(out + i, load(out + i) + load_up_to(x + i, left) * load_up_to(tile.skip + i, left));
    }
  });
  store_state<T>(tile, width, s);
}

template <typename T>
void convolution(const ConvolutionTile& tile) {
  for (int64_t t = 0; t < tile.tokens; ++t) {
    const T* x = static_cast<const T*>(tile.x) + t * tile.x_step;
    T* out = static_cast<T*>(tile.out) + t * tile.channels;
    for (int32_t c = 0; c < tile.channels; c += kLanes) {
      const int32_t left = tile.channels - c;
      Floats sum = {};
      for (int32_t k = 0; k < tile.taps; ++k) {
        sum += load_up_to(tile.weight + int64_t{k} * tile.channels + c, left) *
               load_up_to(x + k * tile.x_step + c, left);
      }
      store_up_to(out + c, tile.bias ? sum + load_up_to(tile.bias + c, left) : sum, left);
    }
  }
}

template <typename T>
constexpr RecurrentKernels kRecurrentKernelsOf = {delta<T>, scan<T>, selective<T>, convolution<T>};

}  // namespace

const RecurrentKernelTable kRecurrentKernels = {
    kRecurrentKernelsOf<float>, kRecurrentKernelsOf<Float16>, kRecurrentKernelsOf<BFloat16>};

}  // namespace mlx_paged::cpu::KERNEL_ISA

#include "csrc/cpu/attention_kernel.h"

#include "csrc/cpu/attention_scores.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

// Register blocking. This many query rows share a load of keys or values; this many registers of
// value columns share a load of weights; this many registers hold dot products in the making. The
// functions that hold them are unrolled, but not inlined into anything larger: either way a
// compiler would keep them in memory.
constexpr int kRowBlock = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumnBlock = 4;
constexpr int kAccumulators = 16;
#else
constexpr int kColumnBlock = 2;
constexpr int kAccumulators = 8;
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

// scores[r][key] = q[r] . k[key] for kRows rows and as many keys as the accumulators allow. Lanes
// run over dimensions, so that keys are read in the order in which they lie in memory.
template <int kRows, typename T>
[[gnu::always_inline]] inline void score_block(const float* q, int32_t q_stride, int32_t head_dim,
                                               const T* const* k, const T* const* next_k,
                                               float* scores) {
  constexpr int kKeys = kAccumulators / kRows;
  static_assert(kKeyGroup % kKeys == 0);
  Floats sum[kAccumulators];
#pragma GCC unroll 16
  for (int i = 0; i < kAccumulators; ++i) {
    sum[i] = Floats{};
  }
  const auto add = [&](int32_t d, auto load_key) __attribute__((always_inline)) {
    Floats q_d[kRows];
    for (int r = 0; r < kRows; ++r) {
      q_d[r] = load(q + r * q_stride + d);
    }
#pragma GCC unroll 16
    for (int key = 0; key < kKeys; ++key) {
      const Floats k_d = load_key(k[key] + d);
      if (d * sizeof(T) % kCacheLine == 0) {
        prefetch(next_k[key] + d);
      }
      for (int r = 0; r < kRows; ++r) {
        sum[r * kKeys + key] += k_d * q_d[r];
      }
    }
  };
  int32_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    add(d, [](const T* from) { return load(from); });
  }
  if (d < head_dim) {
    add(d, [=](const T* from) { return load_partial(from, head_dim - d); });
  }
  float totals[kAccumulators];
  for (int i = 0; i < kAccumulators; i += kLanes) {
    store(totals + i, sum_each(sum + i));
  }
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(scores + r * kKeyTile, totals + r * kKeys, sizeof(float) * kKeys);
  }
}

template <int kRows, typename T>
[[gnu::noinline]] void score_rows(const KeyTile<T>& tile, const KeyTile<T>& next, const float* q,
                                  int32_t q_stride, int32_t head_dim, float* scores) {
  for (int32_t key = 0; key < tile.num_keys; key += kAccumulators / kRows) {
    score_block<kRows>(q, q_stride, head_dim, tile.k + key, next.k + key, scores + key);
  }
}

// kRows rows of o = o * rescale + weights . v over the tile's keys, for kColumns registers of
// columns. If kPartial, only the first `width` columns exist.
template <int kRows, int kColumns, bool kPartial, typename T>
[[gnu::noinline]] void accumulate_block(const KeyTile<T>& tile, const KeyTile<T>& next,
                                        int32_t column, int32_t width, const float* weights,
                                        const float* rescale, float* o, int32_t o_stride) {
  Floats sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = load(o + r * o_stride + c * kLanes) * rescale[r];
    }
  }
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    const T* row = tile.v[key] + column;
    Floats v[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      v[c] = kPartial ? load_partial(row, width) : load(row + c * kLanes);
    }
    for (int c = 0; c < kColumns * kLanes; c += kCacheLine / sizeof(T)) {
      prefetch(next.v[key] + column + c);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats weight = broadcast(weights[r * kKeyTile + key]);
      for (int c = 0; c < kColumns; ++c) {
        sum[r][c] += weight * v[c];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      store(o + r * o_stride + c * kLanes, sum[r][c]);
    }
  }
}

template <int kRows, typename T>
void accumulate_rows(const KeyTile<T>& tile, const KeyTile<T>& next, int32_t value_dim,
                     const float* weights, const float* rescale, float* o, int32_t o_stride) {
  int32_t column = 0;
  for (; column + kColumnBlock * kLanes <= value_dim; column += kColumnBlock * kLanes) {
    accumulate_block<kRows, kColumnBlock, false>(tile, next, column, 0, weights, rescale,
                                                 o + column, o_stride);
  }
  for (; column + kLanes <= value_dim; column += kLanes) {
    accumulate_block<kRows, 1, false>(tile, next, column, 0, weights, rescale, o + column,
                                      o_stride);
  }
  if (column < value_dim) {
    accumulate_block<kRows, 1, true>(tile, next, column, value_dim - column, weights, rescale,
                                     o + column, o_stride);
  }
}

void initialise(const SoftmaxState& state, int32_t num_rows) {
  for (int32_t r = 0; r < num_rows; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
  __builtin_memset(state.o, 0, sizeof(float) * num_rows * state.o_stride);
}

// One key tile. While its keys and values are used, those of `next` are brought nearer, line for
// line, by the first block of rows.
template <typename T>
void attend_tile(const AttentionArgs& args, const RowTile& rows, const KernelScratch& scratch,
                 const SoftmaxState& state, KeyTile<T>& tile, const KeyTile<T>& next,
                 const KeyTile<T>& nowhere) {
  float* scores = scratch.scores;
  for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
    score_rows<kRows>(tile, r == 0 ? next : nowhere, rows.q + r * rows.q_stride, rows.q_stride,
                      args.head_dim, scores + r * kKeyTile);
  });
  float rescale[kMaxRows];
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    float* row_scores = scores + r * kKeyTile;
    adjust_scores(args, rows.rows[r], tile, row_scores);
    if (rows.rows[r].attn) {
      __builtin_memcpy(rows.rows[r].attn + tile.begin, row_scores, sizeof(float) * tile.num_keys);
    }
    rescale[r] = update_softmax(row_scores, tile.num_keys, state.m[r], state.l[r]);
  }
  if (args.mask) {
    drop_unattended(scores, rows.num_rows, static_cast<const T*>(scratch.zeros), tile);
  }
  for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
    accumulate_rows<kRows>(tile, r == 0 ? next : nowhere, args.value_dim, scores + r * kKeyTile,
                           rescale + r, state.o + r * state.o_stride, state.o_stride);
  });
}

template <typename T>
void stream_keys(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
                 const KernelScratch& scratch, const SoftmaxState& state) {
  initialise(state, rows.num_rows);
  if (key_begin >= key_end) {
    return;
  }
  const T* zeros = static_cast<const T*>(scratch.zeros);
  KeyTile<T> tiles[2];
  KeyTile<T> nowhere;
  fill(nowhere, 0, kKeyTile, zeros);
  int32_t begin = key_begin / kKeyTile * kKeyTile;
  locate(args, rows, begin, key_begin, key_end, zeros, tiles[0]);
  prefetch_rows(tiles[0].k, tiles[0].num_keys, args.head_dim);
  prefetch_rows(tiles[0].v, tiles[0].num_keys, args.value_dim);
  for (int current = 0; begin < key_end; begin += kKeyTile, current ^= 1) {
    KeyTile<T>* next = &nowhere;
    if (begin + kKeyTile < key_end) {
      next = &tiles[current ^ 1];
      locate(args, rows, begin + kKeyTile, key_begin, key_end, zeros, *next);
    }
    attend_tile(args, rows, scratch, state, tiles[current], *next, nowhere);
  }
}

}  // namespace

void attend(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
            const KernelScratch& scratch, const SoftmaxState& state) {
  switch (args.cache_dtype) {
    case DType::kFloat32:
      return stream_keys<float>(args, rows, key_begin, key_end, scratch, state);
    case DType::kFloat16:
      return stream_keys<Float16>(args, rows, key_begin, key_end, scratch, state);
    default:
      return stream_keys<BFloat16>(args, rows, key_begin, key_end, scratch, state);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

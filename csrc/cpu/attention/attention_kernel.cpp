#include "csrc/cpu/attention/attention_kernel.h"

#include <type_traits>

#include "csrc/cpu/attention/attention_scores.h"
#include "csrc/cpu/attention/bfloat16_rows.h"
#include "csrc/cpu/attention/interleaved_rows.h"
#include "csrc/cpu/attention/packed_products.h"
#include "csrc/cpu/attention/row_products.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

void initialise(const SoftmaxState& state, int32_t num_rows) {
  for (int32_t r = 0; r < num_rows; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
  __builtin_memset(state.o, 0, sizeof(float) * num_rows * state.o_stride);
}

// One key tile for the rows of one row tile. The next key tile is prefetched meanwhile.
template <typename T>
struct TilePass {
  const AttentionArgs& args;
  const RowTile& rows;
  const KernelScratch& scratch;
  const float* queries;  // written by `prepare`
  KeyTile<T>& tile;
  const KeyTile<T>& next;
};

// Fewer than kPackedRows rows: keys and values are read from the pool without packing. The first
// block of rows prefetches the next tile.
template <typename T>
struct FewRows {
  static void prepare(const AttentionArgs&, const RowTile&, const KernelScratch&, float*) {}

  explicit FewRows(const TilePass<T>& pass)
      : cursor(PrefetchCursor<T>(pass.next, pass.args.head_dim, pass.args.value_dim)) {}

  void score(const TilePass<T>& pass) {
    const auto& [args, rows, scratch, queries, tile, next] = pass;
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      const auto block = [&]<bool kAsk>() {
        score_rows<kRows, kAsk>(tile, cursor, rows.q + r * rows.q_stride, rows.q_stride,
                                args.head_dim, scratch.scores + r * kKeyTile);
      };
      r == 0 ? block.template operator()<true>() : block.template operator()<false>();
    });
  }

  void accumulate(const TilePass<T>& pass, const float* rescale, const SoftmaxState& state) {
    for_row_blocks(pass.rows.num_rows, [&]<int kRows>(int32_t r) {
      const auto block = [&]<bool kAsk>() {
        accumulate_rows<kRows, kAsk>(pass.tile, cursor, pass.args.value_dim,
                                     pass.scratch.scores + r * kKeyTile, rescale + r,
                                     state.o + r * state.o_stride, state.o_stride);
      };
      r == 0 ? block.template operator()<true>() : block.template operator()<false>();
    });
  }

  PrefetchCursor<T> cursor;
};

#if defined(__AVX512F__)
// The same with the queries of several rows in one register.
struct InterleavedRows : FewRows<float> {
  using FewRows<float>::FewRows;

  static bool fits(const AttentionArgs& args) { return args.head_dim % Float32Dims::kDims == 0; }

  static void prepare(const AttentionArgs& args, const RowTile& rows, const KernelScratch&,
                      float* queries) {
    interleave_rows<Float32Dims::kDims>(rows.q, rows.q_stride, rows.num_rows, args.head_dim,
                                        queries);
  }

  void score(const TilePass<float>& pass) {
    score_interleaved_rows<Float32Dims>(pass.queries, pass.rows.num_rows, pass.tile,
                                        pass.args.head_dim, 1, cursor, pass.scratch.scores);
  }
};
#endif

#if defined(__AVX512BF16__)
// Keys, values and the caller's queries as pairs of bfloat16. Weights are rounded to bfloat16: from
// kMinColumns columns on, the resulting error is on average below the rounding of the output.
struct BFloat16Rows : FewRows<BFloat16> {
  using FewRows<BFloat16>::FewRows;

  static constexpr int32_t kMinColumns = 64;

  static bool fits(const AttentionArgs& args) {
    return args.q_dtype == DType::kBFloat16 && !args.rope_freqs &&
           args.head_dim % BFloat16Dims::kDims == 0 && args.value_dim >= kMinColumns &&
           args.value_dim % (2 * kLanes) == 0;
  }

  static void prepare(const AttentionArgs& args, const RowTile& rows, const KernelScratch& scratch,
                      float* queries) {
    auto* given = reinterpret_cast<BFloat16*>(scratch.packed);
    given_queries(args, rows, given);
    interleave_rows<BFloat16Dims::kDims>(given, args.head_dim, rows.num_rows, args.head_dim,
                                         reinterpret_cast<BFloat16*>(queries));
  }

  void score(const TilePass<BFloat16>& pass) {
    const auto& [args, rows, scratch, queries, tile, next] = pass;
    score_interleaved_rows<BFloat16Dims>(reinterpret_cast<const BFloat16*>(queries), rows.num_rows,
                                         tile, args.head_dim, args.scale, cursor, scratch.scores);
  }

  void accumulate(const TilePass<BFloat16>& pass, const float* rescale, const SoftmaxState& state) {
    auto* weights = reinterpret_cast<BFloat16*>(pass.scratch.packed);
    round_weights(pass.scratch.scores, pass.rows.num_rows, weights);
    for_row_blocks(pass.rows.num_rows, [&]<int kRows>(int32_t r) {
      const auto block = [&]<bool kAsk>() {
        accumulate_pair_rows<kRows, kAsk>(pass.tile, cursor, pass.args.value_dim,
                                          weights + r * kKeyTile, rescale + r,
                                          state.o + r * state.o_stride, state.o_stride);
      };
      r == 0 ? block.template operator()<true>() : block.template operator()<false>();
    });
  }
};
#endif

// Rows from kPackedRows on. Each block of rows prefetches its share of `next`.
template <typename T>
struct ManyRows {
  static int32_t keys_of_block(const RowTile& rows) {
    const int32_t num_blocks = rows.num_rows / kRowBlock;
    return (kKeyTile + num_blocks - 1) / num_blocks;
  }

  static void prefetch_share(const RowTile& rows, const T* const* next, int32_t num_keys,
                             int32_t row, int32_t width) {
    const int32_t share = keys_of_block(rows);
    const int32_t first = row / kRowBlock * share;
    const int32_t left = num_keys - first;
    prefetch_rows(next + first, left < share ? left : share, width);
  }

  static void prepare(const AttentionArgs&, const RowTile&, const KernelScratch&, float*) {}

  explicit ManyRows(const TilePass<T>&) {}

  void score(const TilePass<T>& pass) {
    const auto& [args, rows, scratch, queries, tile, next] = pass;
    pack_keys(tile, args.head_dim, scratch.packed);
    multiply_packed(rows.q, rows.q_stride, rows.num_rows,
                    {scratch.packed, padded(args.head_dim), args.head_dim, kKeyTile}, nullptr,
                    scratch.scores, kKeyTile, [&](int32_t r) {
                      prefetch_share(rows, next.k, next.num_keys, r, args.head_dim);
                    });
  }

  void accumulate(const TilePass<T>& pass, const float* rescale, const SoftmaxState& state) {
    const auto& [args, rows, scratch, queries, tile, next] = pass;
    pack_values(tile, args.value_dim, scratch.packed);
    multiply_packed(scratch.scores, kKeyTile, rows.num_rows,
                    {scratch.packed, kKeyTile, tile.num_keys, padded(args.value_dim)}, rescale,
                    state.o, state.o_stride, [&](int32_t r) {
                      prefetch_share(rows, next.v, next.num_keys, r, args.value_dim);
                    });
  }

  NoPrefetch cursor;
};

template <typename Products, typename T>
void attend_tile(const TilePass<T>& pass, const SoftmaxState& state) {
  const auto& [args, rows, scratch, queries, tile, next] = pass;
  float* scores = scratch.scores;
  Products products(pass);
  products.score(pass);
  float rescale[kMaxRows];
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    float* row_scores = scores + r * kKeyTile;
    adjust_scores(args, rows.rows[r], tile, row_scores);
    if (rows.rows[r].attn) {
      __builtin_memcpy(rows.rows[r].attn + tile.begin, row_scores, sizeof(float) * tile.num_keys);
    }
  }
  update_softmax(scores, rows.num_rows, tile.num_keys, state, rescale, products.cursor);
  if (args.mask) {
    drop_unattended(scores, rows.num_rows, static_cast<const T*>(scratch.zeros), tile);
  }
  products.accumulate(pass, rescale, state);
}

// The order of key tiles: position by position; at each position one for every row tile.
struct Step {
  int32_t begin;
  int32_t tile;

  Step next(int32_t num_tiles) const {
    return tile + 1 < num_tiles ? Step{begin, tile + 1} : Step{begin + kKeyTile, 0};
  }
};

inline int32_t queries_size(const AttentionArgs& args, const RowTile& rows) {
  return (rows.num_rows + kPackedRows - 1) / kPackedRows * kPackedRows * padded(args.head_dim);
}

template <typename Products, typename T>
void stream_keys(const AttentionArgs& args, const RowTile* tiles, int32_t num_tiles,
                 int32_t key_begin, int32_t key_end, const KernelScratch& scratch,
                 const SoftmaxState* states) {
  float* queries = scratch.queries;
  for (int32_t t = 0; t < num_tiles; ++t) {
    initialise(states[t], tiles[t].num_rows);
    Products::prepare(args, tiles[t], scratch, queries);
    queries += queries_size(args, tiles[t]);
  }
  if (key_begin >= key_end) {
    return;
  }
  const T* zeros = static_cast<const T*>(scratch.zeros);
  KeyTile<T> located[2];
  KeyTile<T> empty_tile;
  empty_tile.num_keys = 0;
  fill(empty_tile, 0, kKeyTile, zeros);
  Step step = {key_begin / kKeyTile * kKeyTile, 0};
  Step next = step.next(num_tiles);
  locate(args, tiles[0], step.begin, key_begin, key_end, zeros, located[0]);
  prefetch_pages<T>(args, tiles[next.tile], next.begin, key_end);
  prefetch_rows(located[0].k, located[0].num_keys, args.head_dim);
  prefetch_rows(located[0].v, located[0].num_keys, args.value_dim);
  queries = scratch.queries;
  for (int current = 0; step.begin < key_end; current ^= 1) {
    KeyTile<T>* next_tile = &empty_tile;
    if (next.begin < key_end) {
      next_tile = &located[current ^ 1];
      const int32_t num_heads = tiles[next.tile].kv_head - tiles[step.tile].kv_head;
      if (next.begin != step.begin || !move_head(args, num_heads, located[current], *next_tile)) {
        locate(args, tiles[next.tile], next.begin, key_begin, key_end, zeros, *next_tile);
      }
    }
    const Step after = next.next(num_tiles);
    prefetch_pages<T>(args, tiles[after.tile], after.begin, key_end);
    const RowTile& rows = tiles[step.tile];
    attend_tile<Products, T>({args, rows, scratch, queries, located[current], *next_tile},
                             states[step.tile]);
    queries = next.tile == 0 ? scratch.queries : queries + queries_size(args, rows);
    step = next;
    next = after;
  }
}

template <typename T>
void attend(const AttentionArgs& args, const RowTile* tiles, int32_t num_tiles, int32_t key_begin,
            int32_t key_end, const KernelScratch& scratch, const SoftmaxState* states) {
  const auto stream = [&]<typename Products>() {
    stream_keys<Products, T>(args, tiles, num_tiles, key_begin, key_end, scratch, states);
  };
  if (tiles[0].num_rows >= kPackedRows) {
    return stream.template operator()<ManyRows<T>>();
  }
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    if (InterleavedRows::fits(args)) {
      return stream.template operator()<InterleavedRows>();
    }
  }
#endif
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (BFloat16Rows::fits(args)) {
      return stream.template operator()<BFloat16Rows>();
    }
  }
#endif
  stream.template operator()<FewRows<T>>();
}

}  // namespace

void attend(const AttentionArgs& args, const RowTile* tiles, int32_t num_tiles, int32_t key_begin,
            int32_t key_end, const KernelScratch& scratch, const SoftmaxState* states) {
  const auto run = [&](auto attend_dtype) {
    attend_dtype(args, tiles, num_tiles, key_begin, key_end, scratch, states);
  };
  switch (args.cache_dtype) {
    case DType::kFloat32:
      return run(attend<float>);
    case DType::kFloat16:
      return run(attend<Float16>);
    default:
      return run(attend<BFloat16>);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

#include "csrc/cpu/attention/attention_kernel.h"

#include "csrc/cpu/attention/attention_scores.h"
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
  KeyTile<T>& tile;
  const KeyTile<T>& next;
};

// Fewer than kPackedRows rows: keys and values are read from the pool without packing. The first
// block of rows prefetches the next tile.
template <typename T>
struct FewRows {
  explicit FewRows(const TilePass<T>& pass)
      : cursor(PrefetchCursor<T>(pass.next, pass.args.head_dim, pass.args.value_dim)) {}

  void score(const TilePass<T>& pass) {
    const auto& [args, rows, scratch, tile, next] = pass;
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      const auto block = [&]<bool kAsk>() {
        score_rows<kRows, kAsk>(tile, cursor, rows.q + r * rows.q_stride, rows.q_stride,
                                args.head_dim, scratch.scores + r * kKeyTile);
      };
      r == 0 ? block.template operator()<true>() : block.template operator()<false>();
    });
  }

  void accumulate(const TilePass<T>& pass, const float* rescale, const SoftmaxState& state) {
    const auto columns = [&](int32_t first, int32_t end, const float* weights, const float* sums) {
      for_row_blocks(pass.rows.num_rows, [&]<int kRows>(int32_t r) {
        const auto block = [&]<bool kAsk>() {
          accumulate_rows<kRows, kAsk>(pass.tile, cursor, first, end, weights + r * kKeyTile,
                                       sums + r, rescale + r, state.o + r * state.o_stride,
                                       state.o_stride);
        };
        r == 0 ? block.template operator()<true>() : block.template operator()<false>();
      });
    };
    if constexpr (kScaled<T>) {
      for_groups<T>(pass.args.value_dim, [&](int32_t group, int32_t first, int32_t end) {
        ValueScales scales;
        float weights[kPackedRows * kKeyTile], sums[kPackedRows];
        scales.load_group(pass.tile, group);
        scales.apply<T>(pass.scratch.scores, pass.rows.num_rows, pass.tile.num_keys, weights, sums);
        columns(first, end, weights, sums);
      });
    } else {
      columns(0, pass.args.value_dim, pass.scratch.scores, pass.scratch.scores);
    }
  }

  PrefetchCursor<T> cursor;
};

// Rows from kPackedRows on. Each block of rows prefetches its share of `next`.
template <typename T>
struct ManyRows {
  static int32_t keys_of_block(const RowTile& rows) {
    const int32_t num_blocks = rows.num_rows / kRowBlock;
    return (kKeyTile + num_blocks - 1) / num_blocks;
  }

  template <typename E>
  static void prefetch_share(const RowTile& rows, const E* const* next, int32_t num_keys,
                             int32_t row, int32_t width) {
    const int32_t share = keys_of_block(rows);
    const int32_t first = row / kRowBlock * share;
    const int32_t left = num_keys - first;
    prefetch_rows(next + first, left < share ? left : share, width);
  }

  explicit ManyRows(const TilePass<T>&) {}

  void score(const TilePass<T>& pass) {
    const auto& [args, rows, scratch, tile, next] = pass;
    pack_keys(tile, args.head_dim, scratch.packed);
    score_packed(rows.q, rows.q_stride, rows.num_rows, scratch.packed, args.head_dim,
                 scratch.scores,
                 [&](int32_t r) { prefetch_share(rows, next.k, next.num_keys, r, args.head_dim); });
  }

  void accumulate(const TilePass<T>& pass, const float* rescale, const SoftmaxState& state) {
    const auto& [args, rows, scratch, tile, next] = pass;
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
  const auto& [args, rows, scratch, tile, next] = pass;
  float* scores = scratch.scores;
  Products products(pass);
  products.score(pass);
  if constexpr (kScaled<T>) {
    scale_scores(tile, rows.num_rows, scores);
  }
  float rescale[kMaxRows];
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    float* row_scores = scores + r * kKeyTile;
    adjust_scores(args, rows.rows[r], tile, row_scores);
    if (rows.rows[r].attn) {
      __builtin_memcpy(rows.rows[r].attn + tile.begin, row_scores, sizeof(float) * tile.num_keys);
    }
  }
  update_softmax(scores, rows.num_rows, tile.num_keys, state, rescale, products.cursor);
  if (args.mask.data) {
    drop_unattended(scores, rows.num_rows, scratch.zeros, tile);
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

template <typename Products, typename T>
void stream_keys(const AttendCall& call) {
  const auto& [args, tiles, num_tiles, key_begin, key_end, scratch, states, resumes] = call;
  for (int32_t t = 0; t < num_tiles && !resumes; ++t) {
    initialise(states[t], tiles[t].num_rows);
  }
  if (key_begin >= key_end) {
    return;
  }
  const void* zeros = scratch.zeros;
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
    attend_tile<Products, T>({args, tiles[step.tile], scratch, located[current], *next_tile},
                             states[step.tile]);
    step = next;
    next = after;
  }
}

template <typename T>
void attend(const AttendCall& call) {
  const bool few = call.tiles[0].num_rows < kPackedRows;
  (few ? stream_keys<FewRows<T>, T> : stream_keys<ManyRows<T>, T>)(call);
}

}  // namespace

void attend(const AttendCall& call) {
  const DType keys = call.args.k_dtype;
  const auto attend_format = keys == DType::kFloat32                 ? attend<float>
                             : keys == DType::kFloat16               ? attend<Float16>
                             : keys == DType::kBFloat16              ? attend<BFloat16>
                             : keys == DType::kInt8                  ? attend<Int8>
                             : call.args.v_dtype == DType::kInt4Pair ? attend<K6V4>
                                                                     : attend<Int6>;
  attend_format(call);
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

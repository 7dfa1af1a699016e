#include "csrc/cpu/attention_kernel.h"

#include "csrc/cpu/attention_scores.h"
#include "csrc/cpu/packed_products.h"
#include "csrc/cpu/row_products.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

void initialise(const SoftmaxState& state, int32_t num_rows) {
  for (int32_t r = 0; r < num_rows; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
  __builtin_memset(state.o, 0, sizeof(float) * num_rows * state.o_stride);
}

// From this many rows on, packing a key tile costs less than it saves. Such tiles add up a dot
// product in another order than those with fewer rows.
constexpr int32_t kPackedRows = 16;

// While the keys and values of a tile are used, the first block of rows asks for those of `next`.
template <typename T>
struct FewRows {
  static void score(const AttentionArgs& args, const RowTile& rows, const KernelScratch& scratch,
                    const KeyTile<T>& tile, const KeyTile<T>& next, const KeyTile<T>& nowhere) {
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      score_rows<kRows>(tile, r == 0 ? next : nowhere, rows.q + r * rows.q_stride, rows.q_stride,
                        args.head_dim, scratch.scores + r * kKeyTile);
    });
  }

  static void accumulate(const AttentionArgs& args, const RowTile& rows,
                         const KernelScratch& scratch, const KeyTile<T>& tile,
                         const KeyTile<T>& next, const KeyTile<T>& nowhere, const float* rescale,
                         const SoftmaxState& state) {
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      accumulate_rows<kRows>(tile, r == 0 ? next : nowhere, args.value_dim,
                             scratch.scores + r * kKeyTile, rescale + r,
                             state.o + r * state.o_stride, state.o_stride);
    });
  }
};

// Each block of rows asks for its share of `next`.
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

  static void score(const AttentionArgs& args, const RowTile& rows, const KernelScratch& scratch,
                    const KeyTile<T>& tile, const KeyTile<T>& next, const KeyTile<T>&) {
    pack_keys(tile, args.head_dim, scratch.packed);
    multiply_packed(rows.q, rows.q_stride, rows.num_rows,
                    {scratch.packed, padded(args.head_dim), args.head_dim, kKeyTile}, nullptr,
                    scratch.scores, kKeyTile, [&](int32_t r) {
                      prefetch_share(rows, next.k, next.num_keys, r, args.head_dim);
                    });
  }

  static void accumulate(const AttentionArgs& args, const RowTile& rows,
                         const KernelScratch& scratch, const KeyTile<T>& tile,
                         const KeyTile<T>& next, const KeyTile<T>&, const float* rescale,
                         const SoftmaxState& state) {
    pack_values(tile, args.value_dim, scratch.packed);
    multiply_packed(scratch.scores, kKeyTile, rows.num_rows,
                    {scratch.packed, kKeyTile, tile.num_keys, padded(args.value_dim)}, rescale,
                    state.o, state.o_stride, [&](int32_t r) {
                      prefetch_share(rows, next.v, next.num_keys, r, args.value_dim);
                    });
  }
};

// One key tile.
template <typename Products, typename T>
void attend_tile(const AttentionArgs& args, const RowTile& rows, const KernelScratch& scratch,
                 const SoftmaxState& state, KeyTile<T>& tile, const KeyTile<T>& next,
                 const KeyTile<T>& nowhere) {
  float* scores = scratch.scores;
  Products::score(args, rows, scratch, tile, next, nowhere);
  float rescale[kMaxRows];
  for (int32_t r = 0; r < rows.num_rows; ++r) {
    float* row_scores = scores + r * kKeyTile;
    adjust_scores(args, rows.rows[r], tile, row_scores);
    if (rows.rows[r].attn) {
      __builtin_memcpy(rows.rows[r].attn + tile.begin, row_scores, sizeof(float) * tile.num_keys);
    }
  }
  update_softmax(scores, rows.num_rows, tile.num_keys, state, rescale);
  if (args.mask) {
    drop_unattended(scores, rows.num_rows, static_cast<const T*>(scratch.zeros), tile);
  }
  Products::accumulate(args, rows, scratch, tile, next, nowhere, rescale, state);
}

template <typename Products, typename T>
void stream_keys(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
                 const KernelScratch& scratch, const SoftmaxState& state) {
  initialise(state, rows.num_rows);
  if (key_begin >= key_end) {
    return;
  }
  const T* zeros = static_cast<const T*>(scratch.zeros);
  KeyTile<T> tiles[2];
  KeyTile<T> nowhere;
  nowhere.num_keys = 0;
  fill(nowhere, 0, kKeyTile, zeros);
  int32_t begin = key_begin / kKeyTile * kKeyTile;
  locate(args, rows, begin, key_begin, key_end, zeros, tiles[0]);
  prefetch_pages<T>(args, rows, begin + kKeyTile, key_end);
  prefetch_rows(tiles[0].k, tiles[0].num_keys, args.head_dim);
  prefetch_rows(tiles[0].v, tiles[0].num_keys, args.value_dim);
  for (int current = 0; begin < key_end; begin += kKeyTile, current ^= 1) {
    KeyTile<T>* next = &nowhere;
    if (begin + kKeyTile < key_end) {
      next = &tiles[current ^ 1];
      locate(args, rows, begin + kKeyTile, key_begin, key_end, zeros, *next);
    }
    prefetch_pages<T>(args, rows, begin + 2 * kKeyTile, key_end);
    attend_tile<Products>(args, rows, scratch, state, tiles[current], *next, nowhere);
  }
}

template <typename T>
void attend(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
            const KernelScratch& scratch, const SoftmaxState& state) {
  if (rows.num_rows < kPackedRows) {
    return stream_keys<FewRows<T>, T>(args, rows, key_begin, key_end, scratch, state);
  }
  stream_keys<ManyRows<T>, T>(args, rows, key_begin, key_end, scratch, state);
}

}  // namespace

void attend(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
            const KernelScratch& scratch, const SoftmaxState& state) {
  switch (args.cache_dtype) {
    case DType::kFloat32:
      return attend<float>(args, rows, key_begin, key_end, scratch, state);
    case DType::kFloat16:
      return attend<Float16>(args, rows, key_begin, key_end, scratch, state);
    default:
      return attend<BFloat16>(args, rows, key_begin, key_end, scratch, state);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

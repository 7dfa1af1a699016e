#define PFL 2
#include "csrc/cpu/attention_kernel.h"

#include "csrc/cpu/simd_math.h"

namespace mlx_paged::cpu::KERNEL_ISA {

namespace {

constexpr float kInfinity = __builtin_inff();

// Register blocking: this many query rows share a load of keys or values, and this many registers
// of keys or value columns share a load of q or of a weight.
constexpr int kRowBlock = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumnBlock = 4;
#else
constexpr int kColumnBlock = 2;
#endif

constexpr int kCacheLine = 64;

// The keys [begin, begin + kKeyTile) of one sequence and KV head.
template <typename T>
struct KeyTile {
  int32_t begin;
  int32_t num_keys;  // from `begin` on; those before the requested range are not read
  bool has_holes;    // some block id is outside the pool
  const T* k[kKeyTile];
  const T* v[kKeyTile];
  float hole_bias[kKeyTile];  // -inf at keys of such blocks, else 0; set if has_holes
};

// Resolves logical positions to rows of the pool. Keys outside [key_begin, key_end) and in holes
// point to zeros.
template <typename T>
void locate(const AttentionArgs& args, const RowTile& rows, int32_t begin, int32_t key_begin,
            int32_t key_end, const T* zeros, KeyTile<T>& tile) {
  tile.begin = begin;
  tile.num_keys = key_end - begin < kKeyTile ? key_end - begin : kKeyTile;
  tile.has_holes = false;
  const T* k_head = static_cast<const T*>(args.k) + rows.kv_head * args.k_strides[0];
  const T* v_head = static_cast<const T*>(args.v) + rows.kv_head * args.v_strides[0];
  const int32_t* table = args.block_tables + rows.batch * args.block_tables_strides[0];

  int32_t i = 0;
  for (; i < key_begin - begin; ++i) {
    tile.k[i] = tile.v[i] = zeros;
    tile.hole_bias[i] = 0;
  }
  while (i < tile.num_keys) {
    const int32_t block = (begin + i) / args.block_size;
    int32_t offset = (begin + i) % args.block_size;
    const int32_t id = table[block * args.block_tables_strides[1]];
    const bool hole = id < 0 || id >= args.num_blocks;
    tile.has_holes |= hole;
    for (; offset < args.block_size && i < tile.num_keys; ++offset, ++i) {
      tile.k[i] = hole ? zeros : k_head + id * args.k_strides[1] + offset * args.k_strides[2];
      tile.v[i] = hole ? zeros : v_head + id * args.v_strides[1] + offset * args.v_strides[2];
      tile.hole_bias[i] = hole ? -kInfinity : 0;
    }
  }
  for (; i % kLanes != 0; ++i) {
    tile.k[i] = tile.v[i] = zeros;
    tile.hole_bias[i] = 0;
  }
}

// k_tile[d][i] = key i's dimension d, so that a register holds one dimension of kLanes keys.
template <typename T>
void transpose_keys(const KeyTile<T>& tile, const KeyTile<T>& next, int32_t head_dim, float* k_tile) {
  const int32_t whole = head_dim / kLanes * kLanes;
  for (int32_t key = 0; key < tile.num_keys; key += kLanes) {
    Floats block[kLanes];
    for (int32_t d = 0; d < whole; d += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        block[i] = load(tile.k[key + i] + d);
        if (d * sizeof(T) % kCacheLine == 0) {
          __builtin_prefetch(next.k[key + i] + d, 0, PFL);
        }
      }
      transpose(block);
      for (int i = 0; i < kLanes; ++i) {
        store(k_tile + (d + i) * kKeyTile + key, block[i]);
      }
    }
    if (whole < head_dim) {
      for (int i = 0; i < kLanes; ++i) {
        block[i] = load_partial(tile.k[key + i] + whole, head_dim - whole);
      }
      transpose(block);
      for (int i = 0; i < head_dim - whole; ++i) {
        store(k_tile + (whole + i) * kKeyTile + key, block[i]);
      }
    }
  }
}

// scores[r][key] = q[r] . k[key] for kRows rows and kColumns registers of keys.
template <int kRows, int kColumns>
void score_block(const float* q, int32_t head_dim, const float* k_tile, float* scores) {
  Floats sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = Floats{};
    }
  }
  for (int32_t d = 0; d < head_dim; ++d) {
    Floats k[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      k[c] = load(k_tile + d * kKeyTile + c * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats q_rd = broadcast(q[r * head_dim + d]);
      for (int c = 0; c < kColumns; ++c) {
        sum[r][c] += q_rd * k[c];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      store(scores + r * kKeyTile + c * kLanes, sum[r][c]);
    }
  }
}

template <int kRows>
void score_rows(const float* q, int32_t head_dim, const float* k_tile, int32_t num_keys,
                float* scores) {
  int32_t key = 0;
  for (; key + (kColumnBlock - 1) * kLanes < num_keys; key += kColumnBlock * kLanes) {
    score_block<kRows, kColumnBlock>(q, head_dim, k_tile + key, scores + key);
  }
  for (; key < num_keys; key += kLanes) {
    score_block<kRows, 1>(q, head_dim, k_tile + key, scores + key);
  }
}

// kRows rows of o = o * rescale + weights . v over the tile's keys, for kColumns registers of
// columns, the last of which may be `width` < kLanes wide.
template <int kRows, int kColumns, bool kPrefetch, bool kPartial, typename T>
void accumulate_block(const KeyTile<T>& tile, const KeyTile<T>& next, int32_t column, int32_t width, const float* weights,
                      const float* rescale, float* o, int32_t o_stride) {
  Floats sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = load(o + r * o_stride + c * kLanes) * rescale[r];
    }
  }
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    const T* row = tile.v[key] + column;
    if constexpr (kPrefetch) { for (int x = 0; x < kColumns * kLanes * (int)sizeof(T); x += kCacheLine) __builtin_prefetch((const char*)(next.v[key] + column) + x, 0, PFL); }
    Floats v[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      v[c] = kPartial ? load_partial(row, width) : load(row + c * kLanes);
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
void accumulate_rows(const KeyTile<T>& tile, const KeyTile<T>& next, bool first, int32_t value_dim, const float* weights,
                     const float* rescale, float* o, int32_t o_stride) {
  int32_t column = 0;
  for (; column + kColumnBlock * kLanes <= value_dim; column += kColumnBlock * kLanes) {
    if (first) accumulate_block<kRows, kColumnBlock, true, false>(tile, next, column, kLanes, weights, rescale, o + column, o_stride);
    else accumulate_block<kRows, kColumnBlock, false, false>(tile, next, column, kLanes, weights, rescale, o + column, o_stride);
  }
  for (; column < value_dim; column += kLanes) {
    const int32_t width = value_dim - column < kLanes ? value_dim - column : kLanes;
    if (width == kLanes) accumulate_block<kRows, 1, true, false>(tile, next, column, width, weights, rescale, o + column, o_stride);
    else accumulate_block<kRows, 1, true, true>(tile, next, column, width, weights, rescale, o + column, o_stride);
  }
}

// Calls body<rows>(first) for consecutive blocks of kRowBlock rows and one of the rest.
template <typename Body>
void for_row_blocks(int32_t num_rows, Body body) {
  int32_t row = 0;
  for (; row + kRowBlock <= num_rows; row += kRowBlock) {
    body.template operator()<kRowBlock>(row);
  }
  switch (num_rows - row) {
    case 3:
      return body.template operator()<3>(row);
    case 2:
      return body.template operator()<2>(row);
    case 1:
      return body.template operator()<1>(row);
  }
}

Floats lane_indices() {
  Floats lanes;
  for (int i = 0; i < kLanes; ++i) {
    lanes[i] = i;
  }
  return lanes;
}

// Hides keys outside [first, end), which includes the lanes behind the last key.
void hide_outside(int32_t first, int32_t end, int32_t num_keys, float* scores) {
  if (first <= 0 && end >= (num_keys + kLanes - 1) / kLanes * kLanes) {
    return;
  }
  for (int32_t i = 0; i < num_keys; i += kLanes) {
    const Floats key = lane_indices() + static_cast<float>(i);
    Floats s = load(scores + i);
    s = key < static_cast<float>(first) ? broadcast(-kInfinity) : s;
    s = key < static_cast<float>(end) ? s : broadcast(-kInfinity);
    store(scores + i, s);
  }
}

// Element `at` of a mask: what it adds to the score, -inf for False.
float mask_bias(const void* mask, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBool:
      return static_cast<const bool*>(mask)[at] ? 0 : -kInfinity;
    case DType::kFloat16:
      return load_partial(static_cast<const Float16*>(mask) + at, 1)[0];
    case DType::kBFloat16:
      return load_partial(static_cast<const BFloat16*>(mask) + at, 1)[0];
    default:
      return static_cast<const float*>(mask)[at];
  }
}

void add_mask(const AttentionArgs& args, const void* mask, int32_t begin, int32_t num_keys,
              float* scores) {
  for (int32_t i = 0; i < num_keys; ++i) {
    const float bias = mask_bias(mask, args.mask_dtype, (begin + i) * args.mask_strides[3]);
    scores[i] = bias == -kInfinity ? bias : scores[i] + bias;  // whatever an unset key holds
  }
}

// Points the values of keys that no row attends to zeros: a weight of 0 does not hide a NaN.
template <typename T>
void drop_unattended(const float* weights, int32_t num_rows, const T* zeros, KeyTile<T>& tile) {
  for (int32_t key = 0; key < tile.num_keys; ++key) {
    bool attended = false;
    for (int32_t r = 0; r < num_rows; ++r) {
      attended |= weights[r * kKeyTile + key] != 0;
    }
    if (!attended) {
      tile.v[key] = zeros;
    }
  }
}

// Everything that stands between q.k and the softmax.
template <typename T>
void adjust_scores(const AttentionArgs& args, const QueryRow& row, const KeyTile<T>& tile,
                   float* scores) {
  const bool biased = args.softcap > 0 || row.alibi_slope != 0 || tile.has_holes;
  for (int32_t i = 0; biased && i < tile.num_keys; i += kLanes) {
    Floats s = load(scores + i);
    if (args.softcap > 0) {
      s = tanh(s / args.softcap) * args.softcap;
    }
    if (row.alibi_slope != 0) {
      s += (lane_indices() + static_cast<float>(tile.begin + i - row.position)) * row.alibi_slope;
    }
    if (tile.has_holes) {
      s += load(tile.hole_bias + i);
    }
    store(scores + i, s);
  }
  if (row.mask) {
    add_mask(args, row.mask, tile.begin, tile.num_keys, scores);
  }
  hide_outside(row.key_begin - tile.begin, row.key_end - tile.begin, tile.num_keys, scores);
}

// Turns one row's scores into weights relative to the new running maximum, updates m and l, and
// returns the factor that brings o to that maximum.
float update_softmax(float* scores, int32_t num_keys, float& m, float& l) {
  Floats highest = broadcast(m);
  for (int32_t i = 0; i < num_keys; i += kLanes) {
    highest = maximum(highest, load(scores + i));
  }
  const float new_m = reduce_max(highest);
  if (new_m == -kInfinity) {
    for (int32_t i = 0; i < num_keys; i += kLanes) {
      store(scores + i, Floats{});
    }
    return 1;
  }
  Floats sum = {};
  for (int32_t i = 0; i < num_keys; i += kLanes) {
    const Floats weight = exp(load(scores + i) - new_m);
    store(scores + i, weight);
    sum += weight;
  }
  const float rescale = exp(broadcast(m - new_m))[0];
  l = l * rescale + reduce_sum(sum);
  m = new_m;
  return rescale;
}

void initialise(const SoftmaxState& state, int32_t num_rows) {
  for (int32_t r = 0; r < num_rows; ++r) {
    state.m[r] = -kInfinity;
    state.l[r] = 0;
  }
  __builtin_memset(state.o, 0, sizeof(float) * num_rows * state.o_stride);
}

template <typename T>
void stream_keys(const AttentionArgs& args, const RowTile& rows, int32_t key_begin,
                 int32_t key_end, const KernelScratch& scratch, const SoftmaxState& state) {
  const T* zeros = static_cast<const T*>(scratch.zeros);
  float* scores = scratch.scores;
  float rescale[kMaxRows];
  KeyTile<T> tiles[2];
  int n = 0;
  int32_t begin = key_begin / kKeyTile * kKeyTile;
  if (begin < key_end) locate(args, rows, begin, key_begin, key_end, zeros, tiles[0]);
  for (; begin < key_end; begin += kKeyTile) {
    KeyTile<T>& tile = tiles[n];
    n ^= 1;
    KeyTile<T>& next = tiles[n];
    bool more = begin + kKeyTile < key_end;
    if (more) locate(args, rows, begin + kKeyTile, key_begin, key_end, zeros, next); else next.num_keys = 0;
    for (int i = next.num_keys; i < kKeyTile; ++i) next.k[i] = next.v[i] = zeros;
    transpose_keys(tile, next, args.head_dim, scratch.k_tile);
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      score_rows<kRows>(rows.q + r * args.head_dim, args.head_dim, scratch.k_tile, tile.num_keys,
                        scores + r * kKeyTile);
    });
    for (int32_t r = 0; r < rows.num_rows; ++r) {
      float* row_scores = scores + r * kKeyTile;
      adjust_scores(args, rows.rows[r], tile, row_scores);
      if (rows.rows[r].attn) {
        __builtin_memcpy(rows.rows[r].attn + begin, row_scores, sizeof(float) * tile.num_keys);
      }
      rescale[r] = update_softmax(row_scores, tile.num_keys, state.m[r], state.l[r]);
    }
    if (args.mask) {
      drop_unattended(scores, rows.num_rows, zeros, tile);
    }
    for_row_blocks(rows.num_rows, [&]<int kRows>(int32_t r) {
      accumulate_rows<kRows>(tile, next, r == 0, args.value_dim, scores + r * kKeyTile, rescale + r,
                             state.o + r * state.o_stride, state.o_stride);
    });
  }
}

}  // namespace

void attend(const AttentionArgs& args, const RowTile& rows, int32_t key_begin, int32_t key_end,
            const KernelScratch& scratch, const SoftmaxState& state) {
  initialise(state, rows.num_rows);
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

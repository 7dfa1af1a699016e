// The inner part of CPU attention: one row tile against one range of keys. It is compiled once per
// instruction set (attention_kernel.cpp) and chosen at run time (cpu_features.h).
#pragma once

#include <cstdint>

#include "csrc/cpu/attention/attention_args.h"

namespace mlx_paged::cpu {

// Keys are taken in tiles that start at multiples of this position, whatever the batch, so that a
// row's result does not depend on its neighbours.
inline constexpr int kKeyTile = 64;
// Query rows, pairs of (token, head), that share one pass over the keys of their KV head.
inline constexpr int kMaxRows = 64;
// From this many rows on, packing a key tile costs less than it saves. Such tiles add up a dot
// product in another order than those with fewer rows.
inline constexpr int kPackedRows = 16;

// One query of one head.
struct QueryRow {
  int32_t token;
  int32_t head;
  int32_t position;   // of the query in its sequence
  int32_t key_begin;  // sees keys [key_begin, key_end), less those a mask or a bad block id hides
  int32_t key_end;
  float alibi_slope;
  const void* mask;  // of key 0, or null
  float* attn;       // of key 0, or null
};

// Rows of one sequence whose heads share a KV head.
struct RowTile {
  int32_t batch;
  int32_t kv_head;
  int32_t num_rows;
  QueryRow rows[kMaxRows];
  const float* q;  // [num_rows, D], rotated and scaled, in rows of q_stride, zeros behind D
  int32_t q_stride;
};

// Softmax over the keys seen so far: for each row the running maximum m, the denominator l and
// the accumulator o, which l divides at the end.
struct SoftmaxState {
  float* m;  // [num_rows]
  float* l;  // [num_rows]
  float* o;  // [num_rows, o_stride]
  int32_t o_stride;
};

// Rounds up so that every register width divides the result. Static: see simd.h.
static inline int32_t padded(int32_t width) { return (width + 15) / 16 * 16; }

// Buffers of attend, one set per thread.
struct KernelScratch {
  const void* zeros;  // max(D, D_v) zero elements of any dtype: the row of a key not to be read
  float* scores;      // [kMaxRows, kKeyTile]
  float* packed;      // [max(D, D_v) padded, kKeyTile]
  float* queries;     // those of all tiles of a call, each tile's rows rounded up to 16, D padded
};

// Streams keys [key_begin, key_end) of one sequence through the states of tiles of rows, each of
// another KV head, which it initialises. Several tiles have fewer than kPackedRows rows each; they
// take turns at every key tile, since their keys are neighbours in memory. Writes scores to the
// rows' attn if they have one.
using AttendFunction = void (*)(const AttentionArgs& args, const RowTile* tiles, int32_t num_tiles,
                                int32_t key_begin, int32_t key_end, const KernelScratch& scratch,
                                const SoftmaxState* states);

namespace baseline {
void attend(const AttentionArgs&, const RowTile*, int32_t, int32_t, int32_t, const KernelScratch&,
            const SoftmaxState*);
}
namespace avx2 {
void attend(const AttentionArgs&, const RowTile*, int32_t, int32_t, int32_t, const KernelScratch&,
            const SoftmaxState*);
}
namespace avx512 {
void attend(const AttentionArgs&, const RowTile*, int32_t, int32_t, int32_t, const KernelScratch&,
            const SoftmaxState*);
}
namespace avx512_bf16 {
void attend(const AttentionArgs&, const RowTile*, int32_t, int32_t, int32_t, const KernelScratch&,
            const SoftmaxState*);
}

}  // namespace mlx_paged::cpu

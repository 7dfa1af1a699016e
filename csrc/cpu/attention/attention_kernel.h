// The inner part of CPU attention: one row tile against one range of keys. It is compiled once per
// instruction set (attention_kernel.cpp) and chosen at run time (cpu_features.h).
#pragma once

#include <cstdint>

#include "csrc/cpu/attention/attention_args.h"

namespace mlx_paged::cpu {

// Key tiles start at multiples of this position in every batch. So a row's result does not depend
// on the other rows.
inline constexpr int kKeyTile = 64;
// The most query rows, pairs of (token, head), that share one pass over the keys of their KV head.
inline constexpr int kMaxRows = 128;
// From this many rows on, packing a key tile costs less than it saves.
inline constexpr int kPackedRows = 16;

// One query of one head.
struct QueryRow {
  int32_t batch;  // its sequence
  int32_t token;  // its place on axis L
  int32_t head;
  int32_t position;   // of the query in its sequence
  int32_t key_begin;  // it sees keys [key_begin, key_end), except masked keys and bad blocks
  int32_t key_end;
  float alibi_slope;
  const void* mask;  // of key 0, or null
  float* attn;       // of key 0, or null
};

// Rows whose heads share a KV head, of one sequence or of several that share blocks.
struct RowTile {
  int32_t batch;  // whose block table tells where their keys are
  int32_t kv_head;
  int32_t num_rows;
  QueryRow rows[kMaxRows];
  float* q;  // [num_rows, D], rotated and scaled; row stride q_stride; zeros after D
  int32_t q_stride;
};

// Softmax over the keys seen so far: for each row the running maximum m, the denominator l and
// the accumulator o. The output is o / l.
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
  const void* zeros;  // max(D, D_v) zeros of any dtype: stands in for a key that is not read
  float* scores;      // [kMaxRows, kKeyTile]
  float* packed;      // [max(D, D_v) padded, kKeyTile]
};

// A call of attend: row tiles of one sequence, each of another KV head, and keys [key_begin,
// key_end). If there are several tiles, each has fewer than kPackedRows rows; the loop over row
// tiles is inside the loop over key tiles, because the keys of all heads at one position are
// neighbours in memory.
struct AttendCall {
  const AttentionArgs& args;
  const RowTile* tiles;
  int32_t num_tiles;
  int32_t key_begin;
  int32_t key_end;
  const KernelScratch& scratch;
  const SoftmaxState* states;  // of each row tile
  bool resumes;                // the states are those of the keys before key_begin
};

// Initialises the states, unless it resumes, and updates them with the keys. Writes scores to the
// rows' attn if it is not null.
using Attend = void(const AttendCall& call);

namespace baseline {
Attend attend;
}
namespace avx2 {
Attend attend;
}
namespace avx512 {
Attend attend;
}

}  // namespace mlx_paged::cpu

// Kernels for tiles of recurrent layers: some rows of the state of one head, over all tokens of one
// sequence. They are compiled once per instruction set (recurrent_kernels.cpp) and chosen at run
// time (cpu_features.h).
//
// Elements are float32, float16 or bfloat16; sums are float32. A tile computes its tokens one after
// the other, with the same instructions for each, so that its bits depend neither on the chunks in
// which tokens come nor on what else is computed.
#pragma once

#include <cstdint>

namespace mlx_paged::cpu {

// Rows of a tile are computed by fours. Tiles begin at multiples of it.
constexpr int32_t kRowsAtOnce = 4;

// The columns of a state in scratch memory: a multiple of two registers of every build.
constexpr int32_t padded_columns(int32_t columns) { return (columns + 31) / 32 * 32; }

// Float32 elements of scratch memory of one tile.
constexpr int64_t scratch_of(int32_t rows, int32_t columns) {
  return int64_t{2 * rows + 5} * padded_columns(columns) + int64_t{4} * padded_columns(rows);
}

// What all tiles have. A step is the elements from one token to the next.
struct RecurrentTile {
  int64_t tokens;
  int32_t rows;
  int32_t columns;
  const uint8_t* mask;  // a token whose byte is 0 leaves the state as it is; may be null
  int64_t mask_step;
  const void* state;  // [rows, columns]; null: zeros
  void* new_state;
  void* out;  // `rows` elements a token; 0 for a token that is masked
  int64_t out_step;
  float* scratch;  // scratch_of(rows, columns), 64-byte aligned
};

// Of a token with query q, key k, value v, gate g and beta b, where S is the state:
// S = S diag(g); S = S + b (v - S k) k^T; out = S q. The state is float32.
struct DeltaTile : RecurrentTile {
  const void* q;
  const void* k;
  const void* v;
  int64_t q_step;
  int64_t k_step;
  int64_t v_step;
  const float* gates;  // one number, or one for each column
  int64_t gate_step;
  bool has_vectors;  // of gates
  const float* betas;
  int64_t beta_step;
};

// Of a token with x, B, C, where S is the state: S = decay S + dt x B^T; out = S C + skip x. The
// state is float32.
struct ScanTile : RecurrentTile {
  const void* x;
  const void* b;
  const void* c;
  int64_t x_step;
  int64_t b_step;
  int64_t c_step;
  const float* dt;
  const float* decays;
  int64_t dt_step;  // of both
  float skip;
  bool is_wide;  // out is float32
};

// Of a token with x, d, B, C, where S is the state and t = softplus(d), by rows:
// S = exp(-t exp(a)) S + t x B^T; out = S C + skip x. The state has x's dtype and is rounded to it
// after each token.
struct SelectiveTile : RecurrentTile {
  const void* x;
  const void* d;
  const void* b;
  const void* c;
  int64_t x_step;
  int64_t d_step;
  int64_t b_step;
  int64_t c_step;
  const float* a;     // [rows, columns]
  const float* skip;  // [rows]
};

// out[t, c] = bias[c] + sum over k of weight[k, c] * x[t + k, c]
struct ConvolutionTile {
  int64_t tokens;
  int32_t taps;
  int32_t channels;
  const void* x;
  int64_t x_step;
  const float* weight;  // [taps, channels]
  const float* bias;    // may be null
  void* out;            // [tokens, channels]
};

// The kernels of one dtype.
struct RecurrentKernels {
  void (*delta)(const DeltaTile& tile);
  void (*scan)(const ScanTile& tile);
  void (*selective)(const SelectiveTile& tile);
  void (*convolution)(const ConvolutionTile& tile);
};

// The kernels of float32, float16 and bfloat16, in the order of DType.
using RecurrentKernelTable = RecurrentKernels[3];

namespace baseline {
extern const RecurrentKernelTable kRecurrentKernels;
}
namespace avx2 {
extern const RecurrentKernelTable kRecurrentKernels;
}
namespace avx512 {
extern const RecurrentKernelTable kRecurrentKernels;
}

}  // namespace mlx_paged::cpu

// The arguments of paged_attention on the CPU, as plain pointers and numbers. The kernel is
// compiled for several instruction sets, so it may include no header that emits shared inline code.
#pragma once

#include <cstdint>

#include "csrc/kv_formats.h"

namespace mlx_paged::cpu {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kBool, kInt8, kInt6, kInt4Pair };

// An array without its last axes: data, null if the array is absent, and strides in elements.
template <typename T, int kAxes>
struct View {
  const T* data;
  int64_t strides[kAxes];
};

// Dimension letters: csrc/ops.h. With cu_seqlens, L counts the tokens of all sequences, and a
// sequence has a part of that axis: the strides of the batch are 0.
struct AttentionArgs {
  View<void, 4> q;  // [B, H, L, D]
  View<void, 3> k;  // [H_kv, N, S, D], last stride 1; quantized ones: csrc/kv_formats.h
  View<void, 3> v;  // [H_kv, N, S, D_v] likewise
  DType q_dtype;    // also the dtype of `out`
  DType k_dtype;
  DType v_dtype;
  View<void, 3> k_scales;  // float16 [H_kv, N, S, 1], last stride 1; absent unless k is quantized
  View<void, 3> v_scales;  // the same; pairs: [H_kv, N, S, 2 * groups], scale and minimum of each

  View<int32_t, 2> block_tables;     // [B, M]
  View<int32_t, 1> context_lens;     // [B]
  View<int32_t, 1> cu_seqlens;       // [B + 1]: sequence s has tokens from entry s to entry s + 1
  View<int32_t, 2> shared_prefixes;  // [2, B]: an order of the sequences, and how many keys each
                                     // has in the same blocks as the one before it

  View<int32_t, 1> kv_head_mapping;  // [H]
  View<float, 3> rope_freqs;         // [B, L, R / 2]
  int32_t rope_pairs;                // R / 2
  View<void, 4> mask;                // [B, H, L, M * S], bool or float
  DType mask_dtype;
  View<float, 1> sinks;         // [H]
  View<float, 1> alibi_slopes;  // [H]

  void* out;  // [B, H, L, D_v], last stride 1
  int64_t out_strides[3];
  float* attn;  // [B, H, L, M * S], row-contiguous; null with cu_seqlens

  int32_t batch;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t num_tokens;  // L
  int32_t head_dim;
  int32_t value_dim;
  int32_t num_blocks;
  int32_t block_size;
  int32_t max_blocks;

  float scale;
  float softcap;   // 0: none
  int32_t window;  // 0: none
  bool causal;
};

void paged_attention(const AttentionArgs& args);

}  // namespace mlx_paged::cpu

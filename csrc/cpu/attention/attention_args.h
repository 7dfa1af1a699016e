// The arguments of paged_attention on the CPU, as plain pointers and numbers. The kernel is
// compiled for several instruction sets, so it may include no header that emits shared inline code.
#pragma once

#include <cstdint>

#include "csrc/kv_formats.h"

namespace mlx_paged::cpu {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kBool, kInt8, kInt4Pair };

// Dimension letters: csrc/ops.h. Strides are in elements. An absent optional array is null. With
// cu_seqlens, L counts the tokens of all sequences, and a sequence has a part of that axis: the
// strides of the batch are 0.
struct AttentionArgs {
  const void* q;  // [B, H, L, D]
  int64_t q_strides[4];
  DType q_dtype;  // also the dtype of `out`

  const void* k;  // [H_kv, N, S, D], last stride 1
  const void* v;  // [H_kv, N, S, D_v], last stride 1; pairs: [H_kv, N, S, D_v / 2]
  int64_t k_strides[3];
  int64_t v_strides[3];
  DType k_dtype;
  DType v_dtype;
  const void* k_scales;  // float16 [H_kv, N, S, 1], last stride 1; null unless k_dtype is kInt8
  const void* v_scales;  // the same; pairs: [H_kv, N, S, 2 * groups], scale and minimum of each
  int64_t k_scales_strides[3];
  int64_t v_scales_strides[3];

  const int32_t* block_tables;  // [B, M]
  int64_t block_tables_strides[2];
  const int32_t* context_lens;  // [B]
  int64_t context_lens_stride;
  const int32_t*
      cu_seqlens;  // [B + 1]: sequence s has tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1
  int64_t cu_seqlens_stride;

  const int32_t* kv_head_mapping;  // [H]
  int64_t kv_head_mapping_stride;
  const float* rope_freqs;  // [B, L, R / 2]
  int64_t rope_strides[3];
  int32_t rope_pairs;  // R / 2
  const void* mask;    // [B, H, L, M * S], bool or float
  int64_t mask_strides[4];
  DType mask_dtype;
  const float* sinks;  // [H]
  int64_t sinks_stride;
  const float* alibi_slopes;  // [H]
  int64_t alibi_stride;

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

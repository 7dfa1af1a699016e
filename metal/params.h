// The parameters that the host passes to the kernels: one struct for each kernel. csrc/ and metal/
// include this file.
//
// Dimension letters: csrc/ops.h. Strides count elements. A query row is one head at one token. Rows
// that share a KV head are numbered token-major: row = token * group + head within the group.
#ifndef MLX_PAGED_METAL_PARAMS_H
#define MLX_PAGED_METAL_PARAMS_H

#ifdef __METAL_VERSION__
#define MLX_PAGED_INT64 long
#else
#include <cstdint>
#define MLX_PAGED_INT64 int64_t
#endif

// Splits of the keys that a window leaves begin at a multiple of so many keys.
#define SPLIT_STEP 32

struct AttentionParams {
  MLX_PAGED_INT64 q_strides[3];         // of sequence, head, token
  MLX_PAGED_INT64 out_strides[3];       // of sequence, head, token
  MLX_PAGED_INT64 k_strides[3];         // of KV head, block, slot
  MLX_PAGED_INT64 v_strides[3];         // of KV head, block, slot
  MLX_PAGED_INT64 mask_strides[4];      // of sequence, head, token, key
  MLX_PAGED_INT64 tables_strides[2];    // of sequence, logical block
  MLX_PAGED_INT64 rope_strides[2];      // of sequence, token
  MLX_PAGED_INT64 k_scales_strides[3];  // of KV head, block, slot
  MLX_PAGED_INT64 v_scales_strides[3];
  int context_stride;
  int num_heads;     // H
  int num_kv_heads;  // H_kv
  int num_tokens;    // L; T in a ragged batch
  int num_blocks;    // N
  int max_blocks;    // M
  int group;         // query heads that share a KV head; 1 with a mapping
  int row_tiles;     // threadgroups that share the rows of a KV head
  // A split covers keys [split * keys_per_split, (split + 1) * keys_per_split), counted from
  // first_split_key() of the sequence.
  int keys_per_split;
  int num_splits;
  int window;      // the most keys that a query sees
  int rope_pairs;  // R / 2
  float scale;     // multiplies q.k
  float softcap;
  int num_sequences;          // B
  int first_sequence;         // of a ragged batch, that this launch computes
  int keys_per_shared_split;  // of keys that several sequences share, if any do
};

struct MergeParams {
  MLX_PAGED_INT64 out_strides[3];  // of sequence, head, token
  int context_stride;
  int num_sequences;   // B in a ragged batch; otherwise 0, and cu_seqlens may be anything
  int first_sequence;  // of those in chunks, from which on a split has `keys_per_chunk_split` keys
  int keys_per_chunk_split;
  int num_heads;   // H
  int num_tokens;  // L; 1 in a ragged batch, whose outputs are [T, H, 1, D_v]
  int max_keys;    // of a sequence
  int num_splits;
  int keys_per_split;
  int is_causal;
  int window;                 // the most keys that a query sees; 0 if it sees all
  int num_places;             // B, if sequences share keys
  int keys_per_shared_split;  // as in AttentionParams
};

struct WriteParams {
  MLX_PAGED_INT64 k_strides[3];  // of the rows: token, head, dimension
  MLX_PAGED_INT64 v_strides[3];
  MLX_PAGED_INT64 k_cache_strides[3];  // of KV head, block, slot
  MLX_PAGED_INT64 v_cache_strides[3];
  MLX_PAGED_INT64 k_scales_strides[3];
  MLX_PAGED_INT64 v_scales_strides[3];
  int slots_stride;
  int num_blocks;  // N
  int k_vectors;   // D / 4; of rows that are moved one by one, their elements
  int v_vectors;
  int block_size;  // S
  int k_bits;      // of an element of a quantized pool
  int v_bits;
  int group;  // 4-bit values that share a scale
};

struct CopyParams {
  MLX_PAGED_INT64 k_strides[3];  // of KV head, block, slot
  MLX_PAGED_INT64 v_strides[3];
  MLX_PAGED_INT64 pairs_strides[2];
  int pairs_each;  // that a thread copies: one, or all if their order counts
  int num_blocks;  // N
  int block_size;  // S
  int k_vectors;   // of a row; elements if these are moved one by one
  int v_vectors;
};

#endif  // MLX_PAGED_METAL_PARAMS_H

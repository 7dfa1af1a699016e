// The ops of mlx_paged. Each validates its arguments on the calling thread (std::invalid_argument,
// ValueError in Python) and adds one primitive to MLX's graph. mlx_paged/ops/paged.py documents
// paged_attention, write_kv and copy_blocks, python/bindings.cpp the other ops.
//
// Dimensions: B sequences, L query tokens each, H query heads, H_kv KV heads, D key head dimension,
// D_v value head dimension, N blocks in the pool, S tokens per block, M columns of a block table,
// T rows to write, P block pairs to copy. On a GPU all strides of a pool but the last, which is 1,
// and its offset in its memory must be multiples of 4 elements, unless these have 6 bits. No op
// copies a pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/kv_formats.h"
#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_paged {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;
using OptionalArray = std::optional<mx::array>;
using ArrayPair = std::pair<mx::array, mx::array>;

// Whether elements have 4 bits and lie in pairs, have 6 bits, or have scales at all.
inline bool is_pairs(const mx::array& cache) { return cache.dtype() == mx::uint8; }
inline bool is_sixes(const mx::array& cache) { return cache.dtype() == mx::uint16; }
inline bool is_quantized(const mx::array& cache) {
  return is_pairs(cache) || is_sixes(cache) || cache.dtype() == mx::int8;
}

// D or D_v of a cache.
inline int dim_of(const mx::array& cache) {
  return is_pairs(cache)   ? 2 * cache.shape(3)
         : is_sixes(cache) ? cache.shape(3) / 3 * 8
                           : cache.shape(3);
}

// C, columns of a quantized cache's scales: one scale, or a scale and a minimum for each group.
inline int scale_columns(const mx::array& cache) {
  return is_pairs(cache) ? 2 * ((dim_of(cache) + kValueGroup - 1) / kValueGroup) : 1;
}

// The arrays of paged_attention. With cu_seqlens, sequences have different numbers of tokens: the
// tokens of sequence s are rows cu_seqlens[s] to cu_seqlens[s + 1] - 1 of q [T, H, 1, D].
struct AttentionInputs {
  mx::array q;             // [B, H, L, D]
  mx::array k_cache;       // [H_kv, N, S, D]
  mx::array v_cache;       // [H_kv, N, S, D_v]
  mx::array block_tables;  // [B, M]
  mx::array context_lens;  // [B]
  OptionalArray kv_head_mapping;
  OptionalArray rope_freqs;
  OptionalArray attn_mask;
  OptionalArray sinks;
  OptionalArray alibi_slopes;
  OptionalArray cu_seqlens;       // [B + 1]
  OptionalArray k_scales;         // [H_kv, N, S, 1]
  OptionalArray v_scales;         // [H_kv, N, S, C]
  OptionalArray shared_prefixes;  // [2, B]
};

// The other arguments of paged_attention.
struct AttentionOptions {
  float scale;
  bool causal;
  bool return_attn;
  std::optional<int> window;
  std::optional<float> softcap;
  int num_decodes = 0;  // with cu_seqlens: how many of the first sequences have one token each

  bool operator==(const AttentionOptions&) const = default;
};

// Returns out [B, H, L, D_v]; with return_attn also the softmax weights [B, H, L, M * S]. With
// cu_seqlens q may have three axes, [T, H, D], and so has out then. `check_values` also checks the
// values of block tables, context lengths and cu_seqlens, if they are evaluated.
std::variant<mx::array, ArrayPair> paged_attention(AttentionInputs inputs,
                                                   const AttentionOptions& options,
                                                   bool check_values, mx::StreamOrDevice stream);

// Returns the caches, and then the scales of a quantized pool.
Arrays write_kv(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                const mx::array& v_cache, const mx::array& slot_mapping,
                const OptionalArray& k_scales, const OptionalArray& v_scales,
                mx::StreamOrDevice stream);

ArrayPair copy_blocks(const mx::array& k_cache, const mx::array& v_cache,
                      const mx::array& block_pairs, mx::StreamOrDevice stream);

mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens,
                        const OptionalArray& head_runs, mx::StreamOrDevice stream = {});

// Stored elements [.., columns] and their scales as rows [.., D]: computed in float32, then
// rounded.
mx::array dequantized(const mx::array& cache, const mx::array& scales, mx::Dtype dtype,
                      mx::StreamOrDevice stream);

// The keys or values of a quantized pool as gather_blocks gathers them, dequantized, and
// transformed back if the pool `rotates`. One node of the graph.
mx::array dequantized_blocks(const mx::array& cache, const mx::array& scales,
                             const mx::array& block_tables, int num_tokens,
                             const mx::array& head_runs, mx::Dtype dtype, bool rotates);

mx::array take_from_pool(const mx::array& rows, const mx::array& indices);

mx::array pool_zeros(const std::vector<int>& shape, mx::Dtype dtype, int64_t capacity,
                     mx::StreamOrDevice stream);

OptionalArray grown_in_place(const mx::array& blocks, int num_blocks, mx::StreamOrDevice stream);

size_t reserved_bytes();

// Whether this thread is within one of MLX's function transformations.
bool is_transforming();

}  // namespace mlx_paged

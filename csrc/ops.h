// The ops of mlx_paged. Each validates its arguments on the calling thread (std::invalid_argument,
// ValueError in Python) and adds one primitive to MLX's graph.
//
// Dimensions: B sequences, L query tokens each, H query heads, H_kv KV heads, D key head dimension,
// D_v value head dimension, N blocks in the pool, S tokens per block, M columns of a block table,
// T rows to write, P block pairs to copy.
//
// The pool of one layer is k_cache [H_kv, N, S, D] and v_cache [H_kv, N, S, D_v], both float32,
// float16 or bfloat16. Any strides whose last is 1 are honoured, on the GPU if the others, and
// where the pool begins in its memory, are multiples of 4 elements: a pool is never copied.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlx_paged {

namespace mx = mlx::core;

using OptionalArray = std::optional<mx::array>;
using ArrayPair = std::pair<mx::array, mx::array>;

// Attention of q [B, H, L, D] over the keys and values that block_tables [B, M] and
// context_lens [B] select in the pool. Returns out [B, H, L, D_v] in q's dtype, with return_attn
// also the softmax weights [B, H, L, M * S] in float32.
//
// Softmax is computed block by block with a running maximum, denominator and accumulator in
// float32 (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Kwon et al.,
// "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, 4.3).
std::variant<mx::array, ArrayPair> paged_attention(
    const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
    const mx::array& block_tables, const mx::array& context_lens, float scale, bool causal,
    const OptionalArray& kv_head_mapping, const OptionalArray& rope_freqs,
    const OptionalArray& attn_mask, std::optional<int> window, const OptionalArray& sinks,
    std::optional<float> softcap, const OptionalArray& alibi_slopes, bool return_attn,
    mx::StreamOrDevice stream);

// Writes k [T, H_kv, D] and v [T, H_kv, D_v] to the slots (block * S + offset) of
// slot_mapping [T]; rows whose slot is outside [0, N * S) are skipped. The returned handles share
// the pool's buffers and the write is in place: callers use only them afterwards.
ArrayPair write_kv(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                   const mx::array& v_cache, const mx::array& slot_mapping,
                   mx::StreamOrDevice stream);

// Copies physical blocks (source, destination) of block_pairs [P, 2] within the pool, in order and
// in place; pairs with an id outside [0, N) are skipped. Returned handles as for write_kv.
ArrayPair copy_blocks(const mx::array& k_cache, const mx::array& v_cache,
                      const mx::array& block_pairs, mx::StreamOrDevice stream);

// Keys or values of a batch's sequences in one piece, [B, H_kv, num_tokens, D], out of one layer's
// cache [H_kv, N, S, D] by block_tables [B, M], on the default stream.
mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens);

// Rows of a pool's memory, rows [n, ...] at indices: what mx::take gives along axis 0, on the
// default stream. On a GPU, writes to the pool that are encoded later wait for it; mx::take alone
// may be overtaken by them.
mx::array take_from_pool(const mx::array& rows, const mx::array& indices);

// Zeros for a layer's pool, on a CPU from the start of a page, under Linux on huge pages as far as
// whole ones fit between the array's ends.
mx::array pool_zeros(const std::vector<int>& shape, mx::Dtype dtype, mx::StreamOrDevice stream);

// Throws std::invalid_argument for a context length outside [0, M * S] or for a block id outside
// [0, num_blocks) among the entries that a context reads. Of arrays that are not evaluated yet only
// shapes and dtypes are checked.
void check_tables(const std::string& op, const mx::array& block_tables,
                  const mx::array& context_lens, int num_blocks, int block_size);

}  // namespace mlx_paged

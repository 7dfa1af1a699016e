#include <algorithm>

#include "csrc/metal/attention_launches.h"
#include "csrc/metal/plans.h"

namespace mlx_paged {

namespace {

constexpr int kEdge = 8;  // rows and columns of a matrix

// What the kernel holds of a threadgroup's rows: elements of their queries in threadgroup memory,
// and of their outputs in registers.
constexpr int kMaxQueryElements = 6400;
constexpr int kMaxOutputElements = 4096;
constexpr int kMaxRows = 32;
constexpr int kPadding = 8;  // elements after a row of threadgroup memory

// Chunks of many threadgroups are not split further than to about so many.
constexpr int kMostThreadgroups = 1024;

// Rows of a threadgroup: a power of two. A decode has as few as its rows fill. Calls of several
// tokens have kEdge rows or as many as possible, so that few pipelines have to be compiled. Ragged
// batches have as many as possible, because the host does not know their lengths.
int rows_of_tile(const AttentionInputs& in) {
  const int head_dim = in.q.shape(3), v_dim = value_dim(in.v_cache);
  const int group = in.q.shape(1) / in.k_cache.shape(0);
  const bool is_decode = !in.cu_seqlens && in.q.shape(2) == 1;
  const bool is_short = !in.cu_seqlens && group * in.q.shape(2) <= kEdge;
  const int num_rows = is_decode ? group : is_short ? kEdge : kMaxRows;
  int rows = kEdge;
  while (rows < std::min(num_rows, kMaxRows) && 2 * rows * v_dim <= kMaxOutputElements &&
         2 * rows * (head_dim + kPadding) <= kMaxQueryElements) {
    rows *= 2;
  }
  return rows;
}

// Threadgroups that share the rows of a KV head. Those of a ragged batch depend on the lengths of
// its sequences, which the host does not know: this is the most.
int num_row_tiles(const AttentionInputs& in, const AttentionOptions& options, int group, int rows) {
  if (!in.cu_seqlens) {
    return ceil_div(group * in.q.shape(2), rows);
  }
  const int first = options.num_decodes;
  const int before = first * group / rows + first;
  return in.q.shape(0) * group / rows + in.block_tables.shape(0) - before;
}

}  // namespace

bool has_matrix_kernel(mx::Dtype dtype, int head_dim, int value_dim) {
  return (dtype == mx::float16 || dtype == mx::bfloat16) && head_dim % kEdge == 0 &&
         value_dim % kEdge == 0 && unsupported_on_metal(head_dim, value_dim).empty();
}

bool supports_matrix(const AttentionInputs& in, const AttentionOptions& options) {
  const int v_dim = value_dim(in.v_cache), dim = std::max(in.q.shape(3), v_dim);
  const int few_rows = dim > 256 ? 1 : dim > 128 ? 2 : 4;  // that the other kernel computes at once
  const int group = in.q.shape(1) / in.k_cache.shape(0);
  const bool has_options = in.kv_head_mapping || in.rope_freqs || in.attn_mask || in.alibi_slopes;
  return has_matrix_kernel(in.q.dtype(), in.q.shape(3), v_dim) &&
         (in.k_scales || in.q.dtype() == in.k_cache.dtype()) && !has_options &&
         !options.return_attn && (in.cu_seqlens || group * in.q.shape(2) > few_rows);
}

AttentionGeometry matrix_geometry(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionGeometry g{};
  g.by_matrices = true;
  g.head_slots = in.k_cache.shape(0);
  g.group = in.q.shape(1) / g.head_slots;
  g.rows = rows_of_tile(in);
  g.row_tiles = num_row_tiles(in, options, g.group, g.rows);
  const bool is_decode = !in.cu_seqlens && in.q.shape(2) == 1;
  const int sequences = in.cu_seqlens ? 1 : in.q.shape(0);
  const int threadgroups = g.head_slots * g.row_tiles * sequences;
  const int most = std::max(1, kMostThreadgroups / std::max(1, threadgroups));
  g.splits = split_keys(in, options, threadgroups, is_decode ? kMaxSplits : most);
  return g;
}

}  // namespace mlx_paged

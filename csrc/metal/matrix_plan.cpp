#include "csrc/metal/matrix_plan.h"

#include <algorithm>

#include "csrc/metal/arrays.h"
#include "csrc/metal/plans.h"

namespace mlx_paged {

namespace {

constexpr int kThreads = 128;
constexpr int kEdge = 8;  // rows and columns of a matrix

// What the kernel holds of a threadgroup's rows: elements of their queries in threadgroup memory,
// and of their outputs in registers.
constexpr int kMaxQueryElements = 6400;
constexpr int kMaxOutputElements = 4096;
constexpr int kMaxRows = 32;
constexpr int kPadding = 8;  // elements after a row of threadgroup memory

// A call of many threadgroups is not split further than to about so many.
constexpr int kMostThreadgroups = 1024;

// metal/pool_rows.h.
constexpr int kConstants[] = {0, 1, 2, 3, 7, 10, 12, 13, 18};

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
  AttentionGeometry g;
  g.head_slots = in.k_cache.shape(0);
  g.group = in.q.shape(1) / g.head_slots;
  g.rows = rows_of_tile(in);
  g.row_tiles = num_row_tiles(in, options, g.group, g.rows);
  const int sequences = in.cu_seqlens ? 1 : in.q.shape(0);
  const int threadgroups = g.head_slots * g.row_tiles * sequences;
  g.splits = split_keys(in, options, std::max(1, kMostThreadgroups / std::max(1, threadgroups)));
  return g;
}

LaunchPlan matrix_launch(const AttentionInputs& in, const AttentionOptions& options,
                         const AttentionGeometry& g) {
  const bool split = g.splits.count > 1;
  const std::string sizes[] = {std::to_string(in.q.shape(3)), std::to_string(value_dim(in.v_cache)),
                               std::to_string(g.rows)};
  const std::string type = metal_type(in.q);
  const std::string format = in.k_scales ? pool_format(in) + "_" : "";
  LaunchPlan plan;
  plan.kernel =
      "matrix_attention_" + format + type + "_d" + sizes[0] + "_v" + sizes[1] + "_r" + sizes[2];
  plan.instantiation = "matrix_attention<" + metal_type(in.k_cache) + ", " +
                       metal_type(in.v_cache) + ", " + type + ", " + sizes[0] + ", " + sizes[1] +
                       ", " + sizes[2] + ">";
  for (const FunctionConstant& constant : attention_constants(in, options, split)) {
    if (std::find(std::begin(kConstants), std::end(kConstants), constant.index) !=
        std::end(kConstants)) {
      plan.constants.push_back(constant);
    }
  }
  plan.constants.push_back({17, FunctionConstant::Type::kBool, in.cu_seqlens.has_value()});
  plan.grid = {static_cast<uint32_t>(g.head_slots * g.row_tiles),
               in.cu_seqlens ? 1u : static_cast<uint32_t>(in.q.shape(0)),
               static_cast<uint32_t>(g.splits.count)};
  plan.threadgroup = {kThreads, 1, 1};
  plan.set_params(5, attention_params(in, options, g));
  bind_attention(in, split, plan);
  return plan;
}

}  // namespace mlx_paged

#include <algorithm>

#include "csrc/metal/arrays.h"
#include "csrc/metal/attention_launches.h"
#include "csrc/metal/plans.h"

namespace mlx_paged {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxDim = 576;

// Rows of a threadgroup: all rows, rounded up to a power of two, unless they need too many
// registers.
int rows_per_threadgroup(int num_rows, int head_dim, int value_dim) {
  const int dim = std::max(head_dim, value_dim);
  const int max_rows = dim > 256 ? 1 : dim > 128 ? 2 : kMaxSharedRows;
  return std::min(num_rows > 2 ? kMaxSharedRows : num_rows, max_rows);
}

// The kernels count the vectors between the first slot of a head and any other one in 32 bits.
void check_offsets(const char* argument, const mx::array& pool) {
  int64_t last = 0;
  bool is_ascending = true;
  for (const int axis : {1, 2}) {
    is_ascending &= pool.shape(axis) <= 1 || pool.strides(axis) >= 0;
    last += (pool.shape(axis) - 1) * pool.strides(axis);
  }
  const int64_t most = int64_t{kVector} << 32;
  if (!is_ascending || last + pool.shape(3) >= most) {
    fail<std::runtime_error>("paged_attention", argument, " has strides ", pool.strides(1), " and ",
                             pool.strides(2),
                             " of blocks and slots: expected a head to end less than ", most,
                             " elements behind its first slot");
  }
}

AttentionGeometry geometry(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionGeometry g;
  const int num_heads = in.q.shape(1);
  g.head_slots = in.kv_head_mapping.has_value() ? num_heads : in.k_cache.shape(0);
  g.group = num_heads / g.head_slots;
  const int num_rows = g.group * in.q.shape(2);
  g.rows = rows_per_threadgroup(num_rows, in.q.shape(3), in.v_cache.shape(3));
  g.row_tiles = ceil_div(num_rows, g.rows);
  g.splits = split_keys(in, options);
  return g;
}

}  // namespace

std::string unsupported_on_metal(int head_dim, int value_dim) {
  for (const int dim : {head_dim, value_dim}) {
    if (dim % kVector != 0 || dim < kVector || dim > kMaxDim) {
      return "a head dimension of " + std::to_string(dim) + ": expected a multiple of 4 up to " +
             std::to_string(kMaxDim);
    }
  }
  return "";
}

LaunchPlans plan_attention(const Arrays& inputs, const AttentionConfig& config) {
  using Role = BufferBinding::Role;
  const AttentionInputs in = unflatten_inputs(inputs, config);
  if (in.q.size() == 0 || in.v_cache.shape(3) == 0) {
    return {};
  }
  if (!has_keys(in.k_cache, in.block_tables)) {  // a function compiled for any shape
    fail<std::runtime_error>("paged_attention", "k_cache or block_tables is empty: expected a key");
  }
  check_metal_pool("paged_attention", "k_cache", in.k_cache, false);
  check_metal_pool("paged_attention", "v_cache", in.v_cache, false);
  check_offsets("k_cache", in.k_cache);
  check_offsets("v_cache", in.v_cache);
  const AttentionGeometry g = geometry(in, config);
  const int value_dim = in.v_cache.shape(3);
  const bool split = g.splits.count > 1;
  const std::string sizes[] = {std::to_string(in.q.shape(3)), std::to_string(value_dim),
                               std::to_string(g.rows)};
  LaunchPlan plan;
  plan.kernel = "paged_attention_" + metal_type(in.k_cache) + "_" + metal_type(in.q) + "_d" +
                sizes[0] + "_v" + sizes[1] + "_r" + sizes[2];
  plan.instantiation = "paged_attention<" + metal_type(in.k_cache) + ", " + metal_type(in.q) +
                       ", " + sizes[0] + ", " + sizes[1] + ", " + sizes[2] + ">";
  plan.constants = attention_constants(in, config, split);
  plan.grid = {static_cast<uint32_t>(g.head_slots * g.row_tiles),
               static_cast<uint32_t>(in.q.shape(0)), static_cast<uint32_t>(g.splits.count)};
  plan.threadgroup = {kThreads, 1, 1};
  plan.buffers = {{0, Role::kInput, 0},
                  {1, Role::kPoolRead, 1},
                  {2, Role::kPoolRead, 2},
                  {3, Role::kInput, 3},
                  {4, Role::kInput, 4}};
  plan.set_params(5, attention_params(in, config, g));
  bind_optional(in, plan);
  if (config.return_attn) {
    plan.buffers.push_back({15, Role::kOutput, 1});
  }
  if (!split) {
    plan.buffers.push_back({6, Role::kOutput, 0});
    return {{plan}, {}};
  }
  plan.buffers.push_back({7, Role::kScratch, 0});
  plan.buffers.push_back({8, Role::kScratch, 1});
  return {{plan, merge_plan(in, config, g)}, partial_bytes(in, g.splits.count)};
}

}  // namespace mlx_paged

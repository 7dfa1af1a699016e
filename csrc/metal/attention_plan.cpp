#include <algorithm>

#include "csrc/metal/arrays.h"
#include "csrc/metal/attention_launches.h"
#include "csrc/metal/plans.h"

namespace mlx_paged {

namespace {

constexpr int kMaxDim = 576;

// Rows of a threadgroup: all rows, rounded up to a power of two, unless they need too many
// registers.
int rows_per_threadgroup(int num_rows, int head_dim, int value_dim) {
  const int dim = std::max(head_dim, value_dim);
  const int max_rows = dim > 256 ? 1 : dim > 128 ? 2 : kMaxSharedRows;
  return std::min(num_rows > 2 ? kMaxSharedRows : num_rows, max_rows);
}

// The kernels count `unit` elements between the first slot of a head and any other one in 32 bits.
void check_offsets(const char* argument, const mx::array& pool, int unit) {
  int64_t last = 0;
  bool is_ascending = true;
  for (const int axis : {1, 2}) {
    is_ascending &= pool.shape(axis) <= 1 || pool.strides(axis) >= 0;
    last += (pool.shape(axis) - 1) * pool.strides(axis);
  }
  const int64_t most = int64_t{unit} << 32;
  if (!is_ascending || last + pool.shape(3) >= most) {
    fail<std::runtime_error>("paged_attention", argument, " has strides ", pool.strides(1), " and ",
                             pool.strides(2),
                             " of blocks and slots: expected a head to end less than ", most,
                             " elements behind its first slot");
  }
}

AttentionGeometry tile_geometry(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionGeometry g{};
  const int num_heads = in.q.shape(1);
  g.head_slots = in.kv_head_mapping.has_value() ? num_heads : in.k_cache.shape(0);
  g.group = num_heads / g.head_slots;
  const int num_rows = g.group * in.q.shape(2);
  g.rows = rows_per_threadgroup(num_rows, in.q.shape(3), value_dim(in.v_cache));
  g.row_tiles = ceil_div(num_rows, g.rows);
  g.splits = split_keys(in, options, g.head_slots * g.row_tiles * in.q.shape(0));
  return g;
}

// The geometry that a call of its own has.
AttentionGeometry geometry(const AttentionInputs& in, const AttentionOptions& options) {
  return supports_matrix(in, options) ? matrix_geometry(in, options) : tile_geometry(in, options);
}

LaunchPlans plan_call(const AttentionInputs& in, const AttentionOptions& options) {
  const AttentionGeometry g = geometry(in, options);
  return with_merge({attention_launch(in, options, g)}, in, options, g.splits);
}

// The first sequences of a ragged batch, of one token each, as a call of their own.
AttentionInputs decodes_of(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionInputs decodes = in;
  decodes.cu_seqlens.reset();
  mx::Shape shape = in.q.shape();
  shape[0] = options.num_decodes;
  decodes.q = mx::array(shape, in.q.dtype(), nullptr, Arrays{});
  decodes.q.copy_shared_buffer(in.q, in.q.strides(), in.q.flags(), in.q.data_size());
  return decodes;
}

// A ragged batch. If its chunks alone fill a GPU, only the contexts of the decodes are split.
LaunchPlans plan_varlen(const AttentionInputs& in, const AttentionOptions& options) {
  const AttentionInputs decodes = decodes_of(in, options);
  if (options.num_decodes == in.q.shape(0)) {
    return plan_call(decodes, options);
  }
  if (!supports_matrix(in, options)) {
    fail<std::runtime_error>(
        "paged_attention_varlen", "k_cache has dtype ", in.k_cache.dtype(), " and q ", in.q.dtype(),
        ", with head dimensions ", in.q.shape(3), " and ", value_dim(in.v_cache),
        ": on a GPU expected float16 or bfloat16 for both, and multiples of 8");
  }
  AttentionGeometry chunks = matrix_geometry(in, options);
  if (options.num_decodes == 0) {
    return plan_call(in, options);
  }
  AttentionGeometry rows = geometry(decodes, options);
  if (chunks.splits.count > 1) {
    const int threadgroups = chunks.head_slots * chunks.row_tiles;
    chunks.splits = rows.splits = split_keys(in, options, threadgroups);
    return with_merge(
        {attention_launch(in, options, chunks), attention_launch(decodes, options, rows)}, in,
        options, rows.splits);
  }
  LaunchPlans plans = plan_call(decodes, options);
  plans.launches.insert(plans.launches.begin(), attention_launch(in, options, chunks));
  return plans;
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
  const AttentionInputs in = unflatten_inputs(inputs, config);
  if (in.q.size() == 0 || in.v_cache.shape(3) == 0) {
    return {};
  }
  if (!has_keys(in.k_cache, in.block_tables)) {  // a function compiled for any shape
    fail<std::runtime_error>("paged_attention", "k_cache or block_tables is empty: expected a key");
  }
  check_metal_pool("paged_attention", "k_cache", in.k_cache, false);
  check_metal_pool("paged_attention", "v_cache", in.v_cache, false);
  check_offsets("k_cache", in.k_cache, kVector);
  check_offsets("v_cache", in.v_cache, is_packed(in.v_cache) ? kVector / 2 : kVector);
  if (in.k_scales) {
    for (const auto& [name, scales] :
         {std::pair{"k_scales", *in.k_scales}, {"v_scales", *in.v_scales}}) {
      check_pool_layout("paged_attention", name, scales, false);
      check_offsets(name, scales, 1);
    }
  }
  return in.cu_seqlens ? plan_varlen(in, config) : plan_call(in, config);
}

}  // namespace mlx_paged

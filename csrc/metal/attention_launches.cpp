#include "csrc/metal/attention_launches.h"

#include <algorithm>

#include "csrc/metal/arrays.h"

namespace mlx_paged {

namespace {

constexpr int kSplitKeys = 512;
constexpr int kTile = 32;  // keys that a simdgroup of the kernels takes at once
constexpr int64_t kMaxPartialBytes = 64 << 20;
constexpr int kMergeThreads = 256;

int64_t num_rows(const AttentionInputs& in) {
  return int64_t{1} * in.q.shape(0) * in.q.shape(1) * in.q.shape(2);
}

// Whether V is the first columns of K in memory, so that a loaded key contains its value.
bool values_in_keys(const AttentionInputs& in) {
  const mx::array &k = in.k_cache, &v = in.v_cache;
  if (is_packed(v) || v.shape(3) > k.shape(3) || v.data<char>() != k.data<char>()) {
    return false;
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (k.shape(axis) > 1 && k.strides(axis) != v.strides(axis)) {
      return false;
    }
  }
  return true;
}

// Outputs are dense, [B, H, L, D_v].
void set_out_strides(const AttentionInputs& in, int64_t (&strides)[3]) {
  const int64_t num_heads = in.q.shape(1), num_tokens = in.q.shape(2), dim = value_dim(in.v_cache);
  strides[0] = num_heads * num_tokens * dim;
  strides[1] = num_tokens * dim;
  strides[2] = dim;
}

LaunchPlan merge_plan(const AttentionInputs& in, const AttentionOptions& options,
                      const Splits& splits) {
  using Role = BufferBinding::Role;
  const std::string dim = std::to_string(value_dim(in.v_cache));
  LaunchPlan plan;
  plan.kernel = "merge_splits_" + metal_type(in.q) + "_v" + dim;
  plan.instantiation = "merge_splits<" + metal_type(in.q) + ", " + dim + ">";
  plan.constants = {{14, FunctionConstant::Type::kBool, in.sinks.has_value()}};
  plan.grid = {static_cast<uint32_t>(num_rows(in)), 1, 1};
  plan.threadgroup = {kMergeThreads, 1, 1};
  plan.buffers = {
      {0, Role::kScratch, 0}, {1, Role::kScratch, 1}, {2, Role::kInput, 4}, {4, Role::kOutput, 0}};
  int which =
      5 + in.kv_head_mapping.has_value() + in.rope_freqs.has_value() + in.attn_mask.has_value();
  if (in.sinks.has_value()) {
    plan.buffers.push_back({5, Role::kInput, which++});
  }
  which += in.alibi_slopes.has_value() + (in.k_scales ? 2 : 0);
  plan.buffers.push_back({6, Role::kInput, in.cu_seqlens ? which : 4});
  MergeParams p{};
  set_out_strides(in, p.out_strides);
  p.context_stride = in.context_lens.strides(0);
  p.num_sequences = in.cu_seqlens ? in.block_tables.shape(0) : 0;
  p.num_heads = in.q.shape(1);
  p.num_tokens = in.q.shape(2);
  p.max_keys = in.block_tables.shape(1) * in.k_cache.shape(2);
  p.num_splits = splits.count;
  p.keys_per_split = splits.keys;
  p.is_causal = options.causal;
  p.window = options.window.value_or(0);
  plan.set_params(3, p);
  return plan;
}

}  // namespace

Splits split_keys(const AttentionInputs& in, const AttentionOptions& options, int most_splits) {
  const int max_keys = in.block_tables.shape(1) * in.k_cache.shape(2);
  if (options.return_attn || max_keys <= kSplitKeys) {
    return {1, max_keys};
  }
  const int64_t row_bytes = (int64_t{value_dim(in.v_cache)} + 2) * sizeof(float);
  const int64_t affordable = kMaxPartialBytes / (num_rows(in) * row_bytes);
  const int wanted = std::min(ceil_div(max_keys, kSplitKeys), most_splits);
  const int count = static_cast<int>(std::clamp<int64_t>(affordable, 1, wanted));
  const int keys = std::max(kSplitKeys, ceil_div(ceil_div(max_keys, count), kTile) * kTile);
  return {ceil_div(max_keys, keys), keys};
}

std::vector<FunctionConstant> attention_constants(const AttentionInputs& in,
                                                  const AttentionOptions& options, bool split) {
  using Type = FunctionConstant::Type;
  const bool bool_mask = in.attn_mask && in.attn_mask->dtype() == mx::bool_;
  std::vector<FunctionConstant> all = {{0, Type::kInt, in.k_cache.shape(2)}};
  const bool flags[] = {options.causal,
                        options.window.has_value(),
                        options.softcap.has_value(),
                        in.alibi_slopes.has_value(),
                        bool_mask,
                        in.attn_mask.has_value() && !bool_mask,
                        in.sinks.has_value(),
                        in.rope_freqs.has_value(),
                        in.kv_head_mapping.has_value(),
                        split,
                        options.return_attn,
                        values_in_keys(in),
                        has_whole_vectors(in.q)};
  for (int i = 0; i < static_cast<int>(std::size(flags)); ++i) {
    all.push_back({i + 1, Type::kBool, flags[i]});
  }
  all.push_back({18, Type::kBool, in.k_scales.has_value()});
  return all;
}

void bind_attention(const AttentionInputs& in, bool split, LaunchPlan& plan) {
  using Role = BufferBinding::Role;
  plan.buffers = {{0, Role::kInput, 0},
                  {1, Role::kPoolRead, 1},
                  {2, Role::kPoolRead, 2},
                  {3, Role::kInput, 3},
                  {4, Role::kInput, 4}};
  const bool bool_mask = in.attn_mask && in.attn_mask->dtype() == mx::bool_;
  const std::pair<bool, int> optional[] = {{in.kv_head_mapping.has_value(), 9},
                                           {in.rope_freqs.has_value(), 10},
                                           {in.attn_mask.has_value(), bool_mask ? 11 : 12},
                                           {in.sinks.has_value(), 13},
                                           {in.alibi_slopes.has_value(), 14},
                                           {in.k_scales.has_value(), 17},
                                           {in.v_scales.has_value(), 18},
                                           {in.cu_seqlens.has_value(), 16}};
  int which = 5;
  for (const auto& [present, index] : optional) {
    if (present) {
      plan.buffers.push_back({index, index > 16 ? Role::kPoolRead : Role::kInput, which++});
    }
  }
  if (split) {
    plan.buffers.push_back({7, Role::kScratch, 0});
    plan.buffers.push_back({8, Role::kScratch, 1});
  } else {
    plan.buffers.push_back({6, Role::kOutput, 0});
  }
}

AttentionParams attention_params(const AttentionInputs& in, const AttentionOptions& options,
                                 const AttentionGeometry& g) {
  AttentionParams p{};
  copy_strides(in.q, p.q_strides);
  set_out_strides(in, p.out_strides);
  copy_strides(in.k_cache, p.k_strides);
  copy_strides(in.v_cache, p.v_strides);
  copy_strides(in.block_tables, p.tables_strides);
  if (in.k_scales) {
    copy_strides(*in.k_scales, p.k_scales_strides);
    copy_strides(*in.v_scales, p.v_scales_strides);
  }
  if (in.attn_mask) {
    copy_strides(*in.attn_mask, p.mask_strides);
  }
  if (in.rope_freqs) {
    copy_strides(*in.rope_freqs, p.rope_strides);
    p.rope_pairs = in.rope_freqs->shape(2);
  }
  p.context_stride = in.context_lens.strides(0);
  p.num_heads = in.q.shape(1);
  p.num_kv_heads = in.k_cache.shape(0);
  p.num_tokens = in.q.shape(2);
  p.num_sequences = in.block_tables.shape(0);
  if (in.cu_seqlens) {  // The rows of q are tokens, not sequences.
    for (int64_t* strides : {p.q_strides, p.out_strides}) {
      strides[2] = strides[0];
      strides[0] = 0;
    }
    p.num_tokens = in.q.shape(0);
    p.first_sequence = options.num_decodes;
  }
  p.num_blocks = in.k_cache.shape(1);
  p.max_blocks = in.block_tables.shape(1);
  p.group = g.group;
  p.row_tiles = g.row_tiles;
  p.keys_per_split = g.splits.keys;
  p.num_splits = g.splits.count;
  p.window = options.window.value_or(0);
  p.scale = options.scale;
  p.softcap = options.softcap.value_or(0);
  return p;
}

LaunchPlans with_merge(std::vector<LaunchPlan> launches, const AttentionInputs& in,
                       const AttentionOptions& options, const Splits& splits) {
  if (splits.count == 1) {
    return {std::move(launches), {}};
  }
  launches.push_back(merge_plan(in, options, splits));
  const size_t partials = num_rows(in) * splits.count;
  return {std::move(launches),
          {partials * value_dim(in.v_cache) * sizeof(float), partials * 2 * sizeof(float)}};
}

}  // namespace mlx_paged

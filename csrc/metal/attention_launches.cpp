#include "csrc/metal/attention_launches.h"

#include <algorithm>

#include "csrc/metal/arrays.h"
#include "metal/params.h"

namespace mlx_paged {

namespace {

constexpr int kSplitKeys = 512;
constexpr int kMostSplitKeys = 2048;
constexpr int kManyThreadgroups = 128;
constexpr int kPlentyOfThreadgroups = 1024;
constexpr int kTile = SPLIT_STEP;  // keys that a simdgroup of the kernels takes at once
constexpr int64_t kMaxPartialBytes = 16 << 20;  // 1024 threadgroups with the most outputs

int64_t num_rows(const AttentionInputs& in) {
  return int64_t{1} * in.q.shape(0) * in.q.shape(1) * in.q.shape(2);
}

// Whether V is the first columns of K in memory, so that a loaded key contains its value.
bool values_in_keys(const AttentionInputs& in) {
  const mx::array &k = in.k_cache, &v = in.v_cache;
  if (is_quantized(v) || v.shape(3) > k.shape(3) || v.data<char>() != k.data<char>()) {
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
  const int64_t num_heads = in.q.shape(1), num_tokens = in.q.shape(2), dim = dim_of(in.v_cache);
  strides[0] = num_heads * num_tokens * dim;
  strides[1] = num_tokens * dim;
  strides[2] = dim;
}

// Which input an optional array is, or would be.
int input_of(const AttentionInputs& in, OptionalArray AttentionInputs::* array) {
  int which = 5;
  for (size_t i = 0; kOptionalArrays[i] != array; ++i) {
    which += (in.*kOptionalArrays[i]).has_value();
  }
  return which;
}

LaunchPlan merge_plan(const AttentionInputs& in, const AttentionOptions& options,
                      const Splits& splits, const Splits& chunks) {
  using Role = BufferBinding::Role;
  const std::string dim = std::to_string(dim_of(in.v_cache));
  LaunchPlan plan;
  plan.kernel = "merge_splits_" + metal_type(in.q) + "_v" + dim;
  plan.instantiation = "merge_splits<" + metal_type(in.q) + ", " + dim + ">";
  plan.constants = {{14, FunctionConstant::Type::kBool, in.sinks.has_value()},
                    {22, FunctionConstant::Type::kBool, splits.shared_keys > 0}};
  plan.grid = {static_cast<uint32_t>(num_rows(in)), 1, 1};
  plan.threadgroup = {256, 1, 1};
  plan.buffers = {
      {0, Role::kScratch, 0}, {1, Role::kScratch, 1}, {2, Role::kInput, 4}, {4, Role::kOutput, 0}};
  if (in.sinks.has_value()) {
    plan.buffers.push_back({5, Role::kInput, input_of(in, &AttentionInputs::sinks)});
  }
  const int seqlens = in.cu_seqlens ? input_of(in, &AttentionInputs::cu_seqlens) : 4;
  plan.buffers.push_back({6, Role::kInput, seqlens});
  if (splits.shared_keys > 0) {
    plan.buffers.push_back({7, Role::kInput, input_of(in, &AttentionInputs::shared_prefixes)});
  }
  MergeParams p{};
  set_out_strides(in, p.out_strides);
  p.context_stride = in.context_lens.strides(0);
  p.num_sequences = in.cu_seqlens ? in.block_tables.shape(0) : 0;
  p.num_heads = in.q.shape(1);
  p.num_tokens = in.q.shape(2);
  p.max_keys = in.block_tables.shape(1) * in.k_cache.shape(2);
  p.num_splits = splits.stored;
  p.keys_per_split = splits.keys;
  p.first_sequence = options.num_decodes;
  p.keys_per_chunk_split = chunks.keys;
  p.is_causal = options.causal;
  p.window = options.window.value_or(0);
  p.num_places = in.block_tables.shape(0);
  p.keys_per_shared_split = splits.shared_keys;
  plan.set_params(3, p);
  return plan;
}

// The function constants of metal/pool_rows.h and shared_prefixes.h, and of one kernel:
// metal/attention.h or row_tiles.h.
std::vector<FunctionConstant> attention_constants(const AttentionInputs& in,
                                                  const AttentionOptions& options,
                                                  const AttentionGeometry& g) {
  using Type = FunctionConstant::Type;
  const bool bool_mask = in.attn_mask && in.attn_mask->dtype() == mx::bool_;
  std::vector<std::pair<int, bool>> flags = {{1, options.causal},
                                             {2, options.window.has_value()},
                                             {3, options.softcap.has_value()},
                                             {7, in.sinks.has_value()},
                                             {10, g.splits.stored > 1},
                                             {13, has_whole_vectors(in.q)},
                                             {18, in.k_scales.has_value()},
                                             {22, g.splits.shared_keys > 0}};
  if (g.by_matrices) {
    flags.insert(flags.end(),
                 {{12, values_in_keys(in)}, {17, in.cu_seqlens.has_value()}, {23, g.of_shared}});
  } else {
    flags.insert(flags.end(), {{4, in.alibi_slopes.has_value()},
                               {5, bool_mask},
                               {6, in.attn_mask && !bool_mask},
                               {8, in.rope_freqs.has_value()},
                               {9, in.kv_head_mapping.has_value()},
                               {11, options.return_attn}});
  }
  std::vector<FunctionConstant> all = {{0, Type::kInt, in.k_cache.shape(2)}};
  for (const auto& [index, value] : flags) {
    all.push_back({index, Type::kBool, value});
  }
  return all;
}

// Inputs at indices 0 to 4 and 9 to 19, outputs at 6 and 15 or, if the keys are split, the partial
// results at 7 and 8.
std::vector<BufferBinding> attention_buffers(const AttentionInputs& in,
                                             const AttentionOptions& options,
                                             const Splits& splits) {
  using Role = BufferBinding::Role;
  std::vector<BufferBinding> buffers = {{0, Role::kInput, 0},
                                        {1, Role::kPoolRead, 1},
                                        {2, Role::kPoolRead, 2},
                                        {3, Role::kInput, 3},
                                        {4, Role::kInput, 4}};
  const bool bool_mask = in.attn_mask && in.attn_mask->dtype() == mx::bool_;
  const int indices[] = {9, 10, bool_mask ? 11 : 12, 13, 14, 17, 18, 16, 19};  // of kOptionalArrays
  for (size_t i = 0; i < std::size(indices); ++i) {
    if (in.*kOptionalArrays[i] && (indices[i] != 19 || splits.shared_keys > 0)) {
      const bool is_scale = indices[i] == 17 || indices[i] == 18;
      const Role role = is_scale ? Role::kPoolRead : Role::kInput;
      buffers.push_back({indices[i], role, input_of(in, kOptionalArrays[i])});
    }
  }
  if (splits.stored > 1) {
    buffers.insert(buffers.end(), {{7, Role::kScratch, 0}, {8, Role::kScratch, 1}});
  } else {
    buffers.push_back({6, Role::kOutput, 0});
  }
  if (options.return_attn) {
    buffers.push_back({15, Role::kOutput, 1});
  }
  return buffers;
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
  p.num_splits = g.splits.stored;
  p.keys_per_shared_split = g.splits.shared_keys;
  p.window = options.window.value_or(0);
  p.scale = options.scale;
  p.softcap = options.softcap.value_or(0);
  return p;
}

// The most keys between the first one and the last one that a sequence of `num_tokens` sees.
int most_visible_keys(const AttentionOptions& options, int num_tokens, int stored_keys) {
  if (!options.window) {
    return stored_keys;
  }
  return static_cast<int>(
      std::min<int64_t>(stored_keys, int64_t{*options.window} + num_tokens - 1));
}

}  // namespace

int affordable_splits(const AttentionInputs& in) {
  const int64_t row_bytes = (int64_t{dim_of(in.v_cache)} + 2) * sizeof(float);
  return static_cast<int>(
      std::clamp<int64_t>(kMaxPartialBytes / (num_rows(in) * row_bytes), 1, 2 * kMaxSplits));
}

Splits split_keys(const AttentionInputs& in, const AttentionOptions& options, int num_tokens,
                  int threadgroups, int most_splits, bool has_steps) {
  const int stored_keys = in.block_tables.shape(1) * in.k_cache.shape(2);
  const int visible_keys = most_visible_keys(options, num_tokens, stored_keys);
  if (options.return_attn || visible_keys <= kSplitKeys) {
    return {1, stored_keys};
  }
  // The splits begin up to a tile before the first visible key.
  const int max_keys = std::min(stored_keys, visible_keys + kTile - 1);
  const auto num_threadgroups = [&](int keys) {
    return int64_t{threadgroups} * ceil_div(max_keys, keys);
  };
  // Halves where these would be too few threadgroups for a large GPU. More where they are plenty:
  // each begins with loads that wait for each other, and its results have to be merged.
  int least = num_threadgroups(kSplitKeys) < kManyThreadgroups ? kSplitKeys / 2 : kSplitKeys;
  if (has_steps && num_threadgroups(kSplitKeys / 2) < kManyThreadgroups / 2) {
    least /= 2;
  }
  while (least < kMostSplitKeys && num_threadgroups(least) > kPlentyOfThreadgroups) {
    least *= 2;
  }
  const int wanted = std::min(ceil_div(max_keys, least), most_splits);
  const int count = std::min(affordable_splits(in), wanted);
  const int keys = std::max(least, ceil_div(ceil_div(max_keys, count), kTile) * kTile);
  return {ceil_div(max_keys, keys), keys};
}

LaunchPlan attention_launch(const AttentionInputs& in, const AttentionOptions& options,
                            const AttentionGeometry& g) {
  const std::string type = metal_type(in.q), dim = std::to_string(in.q.shape(3)),
                    v_dim = std::to_string(dim_of(in.v_cache)), rows = std::to_string(g.rows);
  const std::string kernel = g.by_matrices ? "matrix_attention" : "paged_attention";
  const std::string simdgroups = std::to_string(g.simdgroups);
  LaunchPlan plan;
  plan.kernel =
      kernel + "_" + pool_format(in) + "_" + type + "_d" + dim + "_v" + v_dim + "_r" + rows;
  plan.instantiation = kernel + "<" + metal_type(in.k_cache) + ", " + metal_type(in.v_cache) +
                       ", " + type + ", " + dim + ", " + v_dim + ", " + rows;
  if (!g.by_matrices) {
    plan.kernel += "_s" + simdgroups;
    plan.instantiation += ", " + simdgroups;
  }
  plan.instantiation += ">";
  plan.constants = attention_constants(in, options, g);
  plan.grid = {static_cast<uint32_t>(g.head_slots * g.row_tiles),
               in.cu_seqlens ? 1u : static_cast<uint32_t>(in.q.shape(0)),
               static_cast<uint32_t>(g.splits.count)};
  plan.threadgroup = {static_cast<uint32_t>(32 * g.simdgroups), 1, 1};
  plan.set_params(5, attention_params(in, options, g));
  plan.buffers = attention_buffers(in, options, g.splits);
  return plan;
}

LaunchPlans with_merge(std::vector<LaunchPlan> launches, const AttentionInputs& in,
                       const AttentionOptions& options, const Splits& splits,
                       const Splits& chunks) {
  if (splits.stored == 1) {
    return {std::move(launches), {}};
  }
  launches.push_back(merge_plan(in, options, splits, chunks));
  const size_t partials = num_rows(in) * splits.stored;
  return {std::move(launches),
          {partials * dim_of(in.v_cache) * sizeof(float), partials * 2 * sizeof(float)}};
}

}  // namespace mlx_paged

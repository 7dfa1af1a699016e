#include <algorithm>
#include <optional>

#include "csrc/metal/arrays.h"
#include "csrc/metal/attention_launches.h"
#include "csrc/metal/plans.h"
#include "csrc/metal/refused_pipelines.h"

namespace mlx_paged {

namespace {

constexpr int kMaxDim = 576;
constexpr int kEdge = 8;  // edge of a matrix; elements after a row in threadgroup memory

// What the kernel holds of a threadgroup's rows: elements of their queries in threadgroup memory,
// and of their outputs in registers.
constexpr int kMaxQueryElements = 6400;
constexpr int kMaxOutputElements = 4096;
constexpr int kMaxRows = 32;

// Fewer threadgroups than this have twice the simdgroups: a decode waits for memory, not for room.
// 64 of four simdgroups ask for 512 KiB at once, which is more than any chip moves in 0.5 us.
constexpr int kFewThreadgroups = 64;
constexpr int kFewSimdgroups = 4;
constexpr int kManySimdgroups = 8;

// Chunks of many threadgroups are not split further than to about so many.
constexpr int kMostThreadgroups = 1024;

// The most rows that a threadgroup of the tile kernel computes: more would need too many registers.
int most_shared_rows(const AttentionInputs& in) {
  const int dim = std::max(in.q.shape(3), dim_of(in.v_cache));
  return dim > 256 ? 1 : dim > 128 ? 2 : kMaxSharedRows;
}

// The kernels count `unit` elements between the first slot of a head and any other one in 32 bits.
// Nobody knows the layout of an array before it is evaluated.
void check_pool(const char* argument, const mx::array& pool, int unit) {
  (unit > 1 ? check_metal_pool : check_pool_layout)("paged_attention", argument, pool, false);
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

// Rows of a threadgroup, a power of two: as few as `num_rows` fill, or as many as possible.
int most_rows(const AttentionInputs& in, int num_rows) {
  const int head_dim = in.q.shape(3), v_dim = dim_of(in.v_cache);
  int rows = kEdge;
  while (rows < std::min(num_rows, kMaxRows) && 2 * rows * v_dim <= kMaxOutputElements &&
         2 * rows * (head_dim + kEdge) <= kMaxQueryElements) {
    rows *= 2;
  }
  return rows;
}

// Rows of a threadgroup. A decode has as few as its rows fill. Calls of several
// tokens have kEdge rows or as many as possible, so that few pipelines have to be compiled. Ragged
// batches have as many as possible, because the host does not know their lengths.
int rows_of_tile(const AttentionInputs& in) {
  const int group = in.q.shape(1) / in.k_cache.shape(0);
  const bool is_decode = !in.cu_seqlens && in.q.shape(2) == 1;
  const bool is_short = !in.cu_seqlens && group * in.q.shape(2) <= kEdge;
  return most_rows(in, is_decode ? group : is_short ? kEdge : kMaxRows);
}

// Threadgroups that share the rows of a KV head. Those of a ragged batch depend on the lengths of
// its sequences, which the host does not know: this is the most, without that of tokens after the
// last sequence.
int num_row_tiles(const AttentionInputs& in, const AttentionOptions& options, int group, int rows) {
  if (!in.cu_seqlens) {
    return ceil_div(group * in.q.shape(2), rows);
  }
  const int first = options.num_decodes;
  const int before = first * group / rows + first;
  return in.q.shape(0) * group / rows + in.block_tables.shape(0) - before;
}

// Whether there is a kernel by products of matrices for such a call.
bool matrix_takes(const AttentionInputs& in, const AttentionOptions& options) {
  const bool has_options = in.kv_head_mapping || in.rope_freqs || in.attn_mask || in.alibi_slopes;
  return has_matrix_kernel(in.q.dtype(), in.q.shape(3), dim_of(in.v_cache)) &&
         (in.k_scales || in.q.dtype() == in.k_cache.dtype()) && !has_options &&
         !options.return_attn;
}

// Whether the other kernel, whose threadgroups have fewer rows, has more simdgroups for the call
// without a merge, though keys are loaded twice. Only decodes: other calls have few pipelines.
bool has_few_keys(const AttentionInputs& in, const AttentionOptions& options) {
  const int heads = in.k_cache.shape(0), group = in.q.shape(1) / heads;
  const int threadgroups = 2 * heads * in.q.shape(0);
  return in.q.shape(2) == 1 && group <= 2 * most_shared_rows(in) &&
         threadgroups < kFewThreadgroups && split_keys(in, options, 1, threadgroups).count == 1;
}

// Whether it computes the call, and faster than the other one if keys are split.
bool has_many_rows(const AttentionInputs& in, const AttentionOptions& options) {
  const int group = in.q.shape(1) / in.k_cache.shape(0);
  return matrix_takes(in, options) &&
         (in.cu_seqlens || group * in.q.shape(2) > most_shared_rows(in));
}

// Whether it computes the call, and faster than the other one.
bool supports_matrix(const AttentionInputs& in, const AttentionOptions& options) {
  return has_many_rows(in, options) && (in.cu_seqlens || !has_few_keys(in, options));
}

AttentionGeometry matrix_geometry(const AttentionInputs& in, const AttentionOptions& options,
                                  int most_splits) {
  const int heads = in.k_cache.shape(0), group = in.q.shape(1) / heads, rows = rows_of_tile(in);
  const int row_tiles = num_row_tiles(in, options, group, rows);
  const bool is_decode = !in.cu_seqlens && in.q.shape(2) == 1;
  const int threadgroups = heads * row_tiles * (in.cu_seqlens ? 1 : in.q.shape(0));
  const int most = std::max(1, kMostThreadgroups / std::max(1, threadgroups));
  const int num_tokens = in.cu_seqlens ? in.q.shape(0) - options.num_decodes : in.q.shape(2);
  const Splits splits =
      split_keys(in, options, num_tokens, threadgroups, is_decode ? most_splits : most, is_decode);
  const int of_no_sequence = in.cu_seqlens ? 1 : 0;  // for tokens after the last sequence
  return {true, heads, group, rows, row_tiles + of_no_sequence, splits};
}

// Of a launch of the kernel for few rows, when its splits are known.
void set_simdgroups(const AttentionInputs& in, AttentionGeometry& g) {
  const int threadgroups = g.head_slots * g.row_tiles * in.q.shape(0) * g.splits.count;
  if (!g.by_matrices) {
    g.simdgroups = threadgroups < kFewThreadgroups ? kManySimdgroups : kFewSimdgroups;
  }
}

// Rows of a threadgroup: all rows, rounded up to a power of two, or as many as it may have.
AttentionGeometry tile_geometry(const AttentionInputs& in, const AttentionOptions& options,
                                int most_splits) {
  const int heads = in.kv_head_mapping ? in.q.shape(1) : in.k_cache.shape(0);
  const int group = in.q.shape(1) / heads, num_rows = group * in.q.shape(2);
  const int rows = std::min(num_rows > 2 ? kMaxSharedRows : num_rows, most_shared_rows(in));
  const int row_tiles = ceil_div(num_rows, rows);
  const int threadgroups = heads * row_tiles * in.q.shape(0);
  const Splits splits = split_keys(in, options, in.q.shape(2), threadgroups, most_splits);
  AttentionGeometry g{false, heads, group, rows, row_tiles, splits};
  set_simdgroups(in, g);
  return g;
}

// The geometry that a call of its own has.
AttentionGeometry geometry(const AttentionInputs& in, const AttentionOptions& options,
                           int most_splits = kMaxSplits) {
  return (supports_matrix(in, options) ? matrix_geometry : tile_geometry)(in, options, most_splits);
}

// The launch for the keys that sequences of one token share, beside that for their own ones, which
// gets fewer splits if there is no memory for both. None if a threadgroup has too few rows for two
// sequences, or there is no kernel for such a call. What a window has left is in no table.
std::optional<AttentionGeometry> shared_geometry(const AttentionInputs& in,
                                                 const AttentionOptions& options,
                                                 AttentionGeometry& own) {
  const int heads = in.k_cache.shape(0), group = in.q.shape(1) / heads, batch = in.q.shape(0);
  const int rows = most_rows(in, group * batch), together = std::min(rows / group, batch);
  if (!in.shared_prefixes || in.cu_seqlens || in.q.shape(2) > 1 || own.splits.count == 1 ||
      together < 2 || options.window || !matrix_takes(in, options)) {
    return std::nullopt;
  }
  const int affordable = affordable_splits(in), most_own = affordable - ceil_div(affordable, 4);
  if (most_own < 1) {
    return std::nullopt;
  }
  if (own.splits.count > most_own) {
    own = geometry(in, options, most_own);
  }
  const int room = std::min(affordable - own.splits.count, kMaxSplits);
  Splits splits = split_keys(in, options, 1, heads * ceil_div(batch, together), room);
  splits.shared_keys = splits.keys;
  splits.stored += own.splits.count;
  return AttentionGeometry{true, heads, group, rows, 1, splits, true};
}

// The simplest launch of a call: a query row in each threadgroup, and keys that are not split. Of a
// ragged batch the fewest rows that its kernel has.
AttentionGeometry simplest_geometry(const AttentionInputs& in, const AttentionOptions& options) {
  const Splits whole = {1, in.block_tables.shape(1) * in.k_cache.shape(2)};
  const int heads = in.kv_head_mapping ? in.q.shape(1) : in.k_cache.shape(0);
  const int group = in.q.shape(1) / heads;
  if (!in.cu_seqlens) {
    return {false, heads, group, 1, group * in.q.shape(2), whole};
  }
  const int of_no_sequence = 1;  // threadgroups for the tokens after the last sequence
  const int row_tiles = num_row_tiles(in, options, group, kEdge) + of_no_sequence;
  return {true, heads, group, kEdge, row_tiles, whole};
}

LaunchPlans simplest_call(const AttentionInputs& in, const AttentionOptions& options) {
  return {{attention_launch(in, options, simplest_geometry(in, options))}, {}};
}

LaunchPlans wanted_call(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionGeometry g = geometry(in, options);
  std::vector<LaunchPlan> launches;
  if (const auto shared = shared_geometry(in, options, g)) {
    launches.push_back(attention_launch(in, options, *shared));
    g.splits.shared_keys = shared->splits.shared_keys;
    g.splits.stored = shared->splits.stored;
  }
  launches.push_back(attention_launch(in, options, g));
  return with_merge(std::move(launches), in, options, g.splits, g.splits);
}

LaunchPlans plan_call(const AttentionInputs& in, const AttentionOptions& options) {
  LaunchPlans plans = wanted_call(in, options);
  return needs_simplest_form(plans) ? simplest_call(in, options) : plans;
}

// The first sequences of a ragged batch, of one token each, as a call of their own.
AttentionInputs decodes_of(const AttentionInputs& in, const AttentionOptions& options) {
  AttentionInputs decodes = in;
  decodes.cu_seqlens.reset();
  decodes.shared_prefixes.reset();
  mx::Shape shape = in.q.shape();
  shape[0] = options.num_decodes;
  decodes.q = mx::array(shape, in.q.dtype(), nullptr, Arrays{});
  decodes.q.copy_shared_buffer(in.q, in.q.strides(), in.q.flags(), in.q.data_size());
  return decodes;
}

// Decodes and chunks. Many chunks are split less than the decodes beside them, or not at all.
LaunchPlans wanted_varlen(const AttentionInputs& in, const AttentionInputs& decodes,
                          const AttentionOptions& options) {
  AttentionGeometry chunks = matrix_geometry(in, options, kMaxSplits);
  AttentionGeometry rows = geometry(decodes, options);
  if (chunks.splits.count > 1) {
    if (has_many_rows(decodes, options)) {
      rows = matrix_geometry(decodes, options, kMaxSplits);
    }
    const int row_tiles = chunks.row_tiles - 1;  // without that of the tokens after the last one
    rows.splits = split_keys(in, options, 1, chunks.head_slots * row_tiles);
    rows.splits.stored = chunks.splits.stored = std::max(rows.splits.count, chunks.splits.count);
    set_simdgroups(decodes, rows);
    return with_merge(
        {attention_launch(in, options, chunks), attention_launch(decodes, options, rows)}, in,
        options, rows.splits, chunks.splits);
  }
  LaunchPlans plans = plan_call(decodes, options);
  plans.launches.insert(plans.launches.begin(), attention_launch(in, options, chunks));
  return plans;
}

// A ragged batch.
LaunchPlans plan_varlen(const AttentionInputs& in, const AttentionOptions& options) {
  const AttentionInputs decodes = decodes_of(in, options);
  if (options.num_decodes == in.q.shape(0)) {
    return plan_call(decodes, options);
  }
  if (!supports_matrix(in, options)) {
    fail<std::runtime_error>(
        "paged_attention_varlen", "k_cache has dtype ", in.k_cache.dtype(), " and q ", in.q.dtype(),
        ", with head dimensions ", in.q.shape(3), " and ", dim_of(in.v_cache),
        ": on a GPU expected float16 or bfloat16 for both, and multiples of 8");
  }
  if (options.num_decodes == 0) {
    return plan_call(in, options);
  }
  LaunchPlans plans = wanted_varlen(in, decodes, options);
  if (needs_simplest_form(plans)) {
    return {{attention_launch(in, options, simplest_geometry(in, options)),
             attention_launch(decodes, options, simplest_geometry(decodes, options))},
            {}};
  }
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

bool has_matrix_kernel(mx::Dtype dtype, int head_dim, int value_dim) {
  return (dtype == mx::float16 || dtype == mx::bfloat16) && head_dim % kEdge == 0 &&
         value_dim % kEdge == 0 && unsupported_on_metal(head_dim, value_dim).empty();
}

LaunchPlans plan_attention(const Arrays& inputs, const AttentionConfig& config) {
  const AttentionInputs in = unflatten_inputs(inputs, config);
  if (in.q.size() == 0 || in.v_cache.shape(3) == 0) {
    return {};
  }
  if (!has_keys(in.k_cache, in.block_tables)) {  // a function compiled for any shape
    fail<std::runtime_error>("paged_attention", "k_cache or block_tables is empty: expected a key");
  }
  for (const auto& [name, cache] : {std::pair{"k_cache", in.k_cache}, {"v_cache", in.v_cache}}) {
    check_pool(name, cache, is_sixes(cache) ? 1 : is_pairs(cache) ? kVector / 2 : kVector);
  }
  if (in.k_scales) {
    check_pool("k_scales", *in.k_scales, 1);
    check_pool("v_scales", *in.v_scales, 1);
  }
  return in.cu_seqlens ? plan_varlen(in, config) : plan_call(in, config);
}

}  // namespace mlx_paged

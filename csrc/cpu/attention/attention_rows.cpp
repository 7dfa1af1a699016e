#include "csrc/cpu/attention/attention_rows.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "mlx/types/half_types.h"

namespace mlx_paged::cpu {

namespace {

namespace mx = mlx::core;

// Calls body with a null pointer of the dtype's C++ type.
template <typename Body>
void dispatch_float(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(static_cast<mx::float16_t*>(nullptr));
    case DType::kBFloat16:
      return body(static_cast<mx::bfloat16_t*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

int32_t context_length(const AttentionArgs& args, int32_t batch) {
  const int64_t longest = int64_t{args.max_blocks} * args.block_size;
  const int64_t given = args.context_lens.data[batch * args.context_lens.strides[0]];
  return static_cast<int32_t>(std::clamp<int64_t>(given, 0, longest));
}

KeyRange visible_keys(const AttentionArgs& args, int32_t context, int32_t position) {
  if (position < 0) {
    return {0, 0};
  }
  const int32_t begin = args.window > 0 ? std::max(0, position - args.window + 1) : 0;
  return {begin, args.causal || args.window > 0 ? position + 1 : context};
}

// Rotates dims (i, i + R/2) by angle i.
void rotate(const AttentionArgs& args, int32_t batch, int32_t token, float* q) {
  const float* angles = args.rope_freqs.data + batch * args.rope_freqs.strides[0] +
                        token * args.rope_freqs.strides[1];
  for (int32_t i = 0; i < args.rope_pairs; ++i) {
    const float angle = angles[i * args.rope_freqs.strides[2]];
    const float cosine = std::cos(angle);
    const float sine = std::sin(angle);
    const float x = q[i];
    const float y = q[i + args.rope_pairs];
    q[i] = x * cosine - y * sine;
    q[i + args.rope_pairs] = x * sine + y * cosine;
  }
}

void load_query(const AttentionArgs& args, const QueryRow& row, float* q) {
  const int64_t at =
      row.batch * args.q.strides[0] + row.head * args.q.strides[1] + row.token * args.q.strides[2];
  dispatch_float(args.q_dtype, [&]<typename T>(T*) {
    const T* from = static_cast<const T*>(args.q.data) + at;
    const int64_t stride = args.q.strides[3];
    if (stride == 1) {
      std::transform(from, from + args.head_dim, q, [](T x) { return static_cast<float>(x); });
      return;
    }
    for (int32_t d = 0; d < args.head_dim; ++d) {
      q[d] = static_cast<float>(from[d * stride]);
    }
  });
  if (args.rope_freqs.data) {
    rotate(args, row.batch, row.token, q);
  }
  for (int32_t d = 0; d < args.head_dim; ++d) {
    q[d] *= args.scale;
  }
  std::fill(q + args.head_dim, q + padded(args.head_dim), 0.0f);
}

const void* mask_row(const AttentionArgs& args, const QueryRow& row) {
  if (!args.mask.data) {
    return nullptr;
  }
  const int64_t at = row.batch * args.mask.strides[0] + row.head * args.mask.strides[1] +
                     row.token * args.mask.strides[2];
  const int itemsize = args.mask_dtype == DType::kBool      ? 1
                       : args.mask_dtype == DType::kFloat32 ? 4
                                                            : 2;
  return static_cast<const char*>(args.mask.data) + at * itemsize;
}

float* attn_row(const AttentionArgs& args, const QueryRow& row) {
  if (!args.attn) {
    return nullptr;
  }
  const int64_t i = (int64_t{row.batch} * args.num_heads + row.head) * args.num_tokens + row.token;
  return args.attn + i * args.max_blocks * args.block_size;
}

// Turns the scores of `keys` into weights exp(score - m) * factor. Other keys get weight 0; so do
// keys with score -inf, even if `factor` is NaN.
void normalise_weights(const AttentionArgs& args, KeyRange keys, float m, float factor,
                       float* attn) {
  const int64_t longest = int64_t{args.max_blocks} * args.block_size;
  std::fill(attn, attn + keys.begin, 0.0f);
  for (int32_t key = keys.begin; key < keys.end; ++key) {
    const bool has_weight = factor != 0 && attn[key] != -INFINITY;
    attn[key] = has_weight ? std::exp(attn[key] - m) * factor : 0;
  }
  std::fill(attn + keys.end, attn + longest, 0.0f);
}

}  // namespace

TokenRange tokens_of(const AttentionArgs& args, int32_t batch) {
  if (!args.cu_seqlens.data) {
    return {0, args.num_tokens};
  }
  const int32_t* begin = args.cu_seqlens.data + batch * args.cu_seqlens.strides[0];
  const int32_t first = std::clamp(begin[0], 0, args.num_tokens);
  const int32_t stop = std::clamp(begin[args.cu_seqlens.strides[0]], first, args.num_tokens);
  return {first, stop - first};
}

void HeadGroups::assign(const AttentionArgs& args) {
  const int32_t none = args.num_kv_heads;
  const auto kv_head = [&](int32_t head) {
    if (!args.kv_head_mapping.data) {
      return head / (args.num_heads / args.num_kv_heads);
    }
    const int32_t mapped = args.kv_head_mapping.data[head * args.kv_head_mapping.strides[0]];
    return mapped < 0 || mapped > none ? none : mapped;
  };
  heads.resize(args.num_heads);
  std::iota(heads.begin(), heads.end(), 0);
  if (args.kv_head_mapping.data) {
    std::sort(heads.begin(), heads.end(), [&](int32_t a, int32_t b) {
      return std::pair(kv_head(a), a) < std::pair(kv_head(b), b);
    });
  }
  starts.clear();
  auto next = heads.begin();
  for (int32_t g = 0; g <= none; ++g) {
    starts.push_back(static_cast<int32_t>(next - heads.begin()));
    next = std::find_if(next, heads.end(), [&](int32_t head) { return kv_head(head) != g; });
  }
  starts.push_back(args.num_heads);
}

KeyRange visible_keys(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span) {
  KeyRange keys = {0, 0};
  if (span.kv_head == args.num_kv_heads) {
    return keys;
  }
  const int32_t context = context_length(args, span.batch);
  const int32_t before = context - tokens_of(args, span.batch).count;
  const int32_t group = groups.size(span.kv_head);
  const int32_t last = (span.begin + span.count - 1) / group;
  for (int32_t token = span.begin / group; token <= last; ++token) {
    const KeyRange row = visible_keys(args, context, before + token);
    if (row.begin < row.end) {
      keys = {keys.begin < keys.end ? std::min(keys.begin, row.begin) : row.begin,
              std::max(keys.end, row.end)};
    }
  }
  return keys;
}

RowTile empty_tile(const AttentionArgs& args, const RowSpan& span, float* q) {
  RowTile tile;
  tile.batch = span.batch;
  tile.kv_head = span.kv_head;
  tile.num_rows = 0;
  tile.q = q;
  tile.q_stride = padded(args.head_dim);
  return tile;
}

void add_rows(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span,
              RowTile& tile) {
  const int32_t context = context_length(args, span.batch);
  const TokenRange tokens = tokens_of(args, span.batch);
  const int32_t group = groups.size(span.kv_head);
  for (int32_t r = span.begin; r < span.begin + span.count; ++r) {
    QueryRow& row = tile.rows[tile.num_rows];
    const int32_t token = r / group;
    row.batch = span.batch;
    row.token = tokens.first + token;
    row.head = groups.heads[groups.starts[span.kv_head] + r % group];
    row.position = context - tokens.count + token;
    const KeyRange keys = visible_keys(args, context, row.position);
    row.key_begin = keys.begin;
    row.key_end = keys.end;
    row.alibi_slope = args.alibi_slopes.data
                          ? args.alibi_slopes.data[row.head * args.alibi_slopes.strides[0]]
                          : 0;
    row.mask = mask_row(args, row);
    row.attn = attn_row(args, row);
    load_query(args, row, tile.q + tile.num_rows * tile.q_stride);
    ++tile.num_rows;
  }
}

RowTile rows_of(const RowTile& tile, const RowSpan& span, int32_t first) {
  RowTile rows;
  rows.batch = span.batch;
  rows.kv_head = span.kv_head;
  rows.num_rows = span.count;
  std::copy_n(tile.rows + first, span.count, rows.rows);
  rows.q = tile.q + first * tile.q_stride;
  rows.q_stride = tile.q_stride;
  return rows;
}

void copy_rows(const SoftmaxState& to, const SoftmaxState& from, int32_t first, int32_t count) {
  std::copy_n(from.m + first, count, to.m);
  std::copy_n(from.l + first, count, to.l);
  std::copy_n(from.o + first * from.o_stride, count * from.o_stride, to.o);
}

void merge(const SoftmaxState& into, const SoftmaxState& from, int32_t num_rows) {
  for (int32_t r = 0; r < num_rows; ++r) {
    const float m = std::max(into.m[r], from.m[r]);
    if (m == -INFINITY) {
      continue;
    }
    const float keep = std::exp(into.m[r] - m);
    const float add = std::exp(from.m[r] - m);
    into.m[r] = m;
    into.l[r] = into.l[r] * keep + from.l[r] * add;
    float* o = into.o + r * into.o_stride;
    const float* other = from.o + r * from.o_stride;
    for (int32_t d = 0; d < into.o_stride; ++d) {
      o[d] = o[d] * keep + other[d] * add;
    }
  }
}

void store_rows(const AttentionArgs& args, const RowTile& tile, KeyRange keys,
                const SoftmaxState& state) {
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    const QueryRow& row = tile.rows[r];
    float l = state.l[r];
    if (args.sinks.data && l != 0) {
      l += std::exp(args.sinks.data[row.head * args.sinks.strides[0]] - state.m[r]);
    }
    const float factor = l == 0 ? 0 : 1 / l;
    const float* o = state.o + r * state.o_stride;
    const int64_t at = row.batch * args.out_strides[0] + row.head * args.out_strides[1] +
                       row.token * args.out_strides[2];
    dispatch_float(args.q_dtype, [&]<typename T>(T*) {
      T* out = static_cast<T*>(args.out) + at;
      for (int32_t d = 0; d < args.value_dim; ++d) {
        out[d] = static_cast<T>(o[d] * factor);
      }
    });
    if (row.attn) {
      normalise_weights(args, keys, state.m[r], factor, row.attn);
    }
  }
}

}  // namespace mlx_paged::cpu

#include "csrc/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "mlx/ops.h"

namespace mlx_paged {

namespace {

bool is_pool_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

void check_rank(const char* op, const char* name, const mx::array& a, size_t rank,
                const char* expected) {
  require(a.ndim() == rank, op, name, " has shape ", a.shape(), ": expected ", expected);
}

void check_shape(const char* op, const char* name, const mx::array& a, const mx::Shape& expected,
                 const char* meaning) {
  require(a.shape() == expected, op, name, " has shape ", a.shape(), ": expected ", expected, ", ",
          meaning);
}

template <typename... Parts>
void check_dtype(const char* op, const char* name, const mx::array& a, bool fits,
                 const Parts&... expected) {
  require(fits, op, name, " of shape ", a.shape(), " has dtype ", a.dtype(), expected...);
}

void check_int32(const char* op, const char* name, const mx::array& a) {
  check_dtype(op, name, a, a.dtype() == mx::int32, ": expected int32");
}

// Without scales both caches have one floating dtype.
void check_formats(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                   bool is_quantized) {
  if (is_quantized) {
    const bool has_sixes = is_sixes(k_cache);
    check_dtype(op, "k_cache", k_cache, has_sixes || k_cache.dtype() == mx::int8,
                ": with scales expected int8, or uint16 for 6 bits");
    check_dtype(op, "v_cache", v_cache,
                v_cache.dtype() == k_cache.dtype() || (has_sixes && is_pairs(v_cache)),
                " but k_cache has ", k_cache.dtype(),
                ": with scales expected the same, or beside keys of 6 bits uint8 for pairs of 4");
    for (const mx::array* cache : {&k_cache, &v_cache}) {
      require(!is_sixes(*cache) || cache->shape(3) % 3 == 0, op,
              cache == &k_cache ? "k_cache" : "v_cache", " has shape ", cache->shape(),
              ": expected 3 words for each 8 elements of 6 bits");
    }
    return;
  }
  check_dtype(op, "k_cache", k_cache, is_pool_dtype(k_cache.dtype()),
              ": expected float32, float16 or bfloat16, or k_scales and v_scales");
  check_dtype(op, "v_cache", v_cache, v_cache.dtype() == k_cache.dtype(), " but k_cache has ",
              k_cache.dtype(), ": expected the same");
}

void check_pool(const char* op, const mx::array& k_cache, const mx::array& v_cache, bool writable) {
  check_rank(op, "k_cache", k_cache, 4, "(num_kv_heads, num_blocks, block_size, head_dim)");
  check_rank(op, "v_cache", v_cache, 4, "(num_kv_heads, num_blocks, block_size, value_dim)");
  for (int axis = 0; axis < 3; ++axis) {
    require(v_cache.shape(axis) == k_cache.shape(axis), op, "v_cache has shape ", v_cache.shape(),
            " but k_cache has ", k_cache.shape(), ": expected equal heads, blocks and block size");
  }
  for (const mx::array* cache : {&k_cache, &v_cache}) {
    require(cache->shape(0) > 0 && cache->shape(2) > 0 && cache->shape(3) > 0, op,
            cache == &k_cache ? "k_cache" : "v_cache", " has shape ", cache->shape(),
            ": expected at least one head, one token per block and one dimension");
  }
  check_pool_memory(op, k_cache, v_cache, writable);
}

void check_scales(const char* op, const char* name, const mx::array& cache, const mx::array& scales,
                  bool writable) {
  mx::Shape expected = cache.shape();
  expected[3] = scale_columns(cache);
  check_dtype(op, name, scales, scales.dtype() == mx::float16, ": expected float16");
  check_shape(op, name, scales, expected, "one row for each token of its cache");
  check_pool_layout(op, name, scales, writable);
}

// A pool, and its scales if it is quantized.
void check_pool(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                const OptionalArray& k_scales, const OptionalArray& v_scales, bool is_quantized,
                bool writable) {
  require(k_scales.has_value() == v_scales.has_value(), op, k_scales ? "v_scales" : "k_scales",
          " is missing: expected scales for both caches");
  check_pool(op, k_cache, v_cache, writable);
  check_formats(op, k_cache, v_cache, is_quantized);
  if (k_scales) {
    check_scales(op, "k_scales", k_cache, *k_scales, writable);
    check_scales(op, "v_scales", v_cache, *v_scales, writable);
  }
}

// Whether the shape broadcasts to `target` and has its last axis.
bool is_mask_shape(const mx::Shape& shape, const mx::Shape& target) {
  const auto fits = [](int size, int of_target) { return size == 1 || size == of_target; };
  return !shape.empty() && shape.size() <= target.size() && shape.back() == target.back() &&
         std::equal(shape.begin(), shape.end(), target.end() - shape.size(), fits);
}

// Checks the axes of q, and the arrays that say whose tokens are on them.
void check_tokens(const char* op, const AttentionInputs& in, int num_decodes) {
  if (!in.cu_seqlens) {
    check_rank(op, "q", in.q, 4, "(batch, num_heads, num_tokens, head_dim)");
    return;
  }
  require(in.q.ndim() == 4 && in.q.shape(2) == 1, op, "q has shape ", in.q.shape(),
          ": expected (num_tokens, num_heads, head_dim), with or without an axis of 1 before the"
          " last one");
  check_rank(op, "block_tables", in.block_tables, 2, "(batch, max_blocks)");
  const int batch = in.block_tables.shape(0);
  check_int32(op, "cu_seqlens", *in.cu_seqlens);
  require(in.cu_seqlens->shape() == mx::Shape{batch + 1}, op, "cu_seqlens has shape ",
          in.cu_seqlens->shape(), " but block_tables has batch ", batch, ": expected (", batch + 1,
          ",)");
  const int most = std::min(batch, in.q.shape(0));
  require(0 <= num_decodes && num_decodes <= most, op, "num_decodes is ", num_decodes,
          ": expected 0 to ", most, ", the number of sequences or tokens");
}

void check_tables_shape(const char* op, const AttentionInputs& in) {
  const char* first = in.cu_seqlens ? "block_tables" : "q";
  const int batch = in.cu_seqlens ? in.block_tables.shape(0) : in.q.shape(0);
  const mx::array& tables = in.block_tables;
  check_int32(op, "block_tables", tables);
  require(tables.ndim() == 2 && tables.shape(0) == batch, op, "block_tables has shape ",
          tables.shape(), " but ", first, " has batch ", batch, ": expected (", batch,
          ", max_blocks)");
  const int64_t max_keys = int64_t{tables.shape(1)} * in.k_cache.shape(2);
  require(max_keys <= std::numeric_limits<int32_t>::max(), op, "block_tables has shape ",
          tables.shape(), ": with blocks of ", in.k_cache.shape(2), " tokens it addresses ",
          max_keys, " keys, expected below 2**31");
  check_int32(op, "context_lens", in.context_lens);
  require(in.context_lens.shape() == mx::Shape{batch}, op, "context_lens has shape ",
          in.context_lens.shape(), " but ", first, " has batch ", batch, ": expected (", batch,
          ",)");
}

// Does not check a mapping that is not evaluated yet.
void check_mapped_heads(const char* op, const mx::array& mapping, int num_kv_heads) {
  if (!mapping.is_available()) {
    return;
  }
  for (int head = 0; head < mapping.shape(0); ++head) {
    const int32_t kv_head = mapping.data<int32_t>()[head * mapping.strides(0)];
    require(kv_head >= 0 && kv_head < num_kv_heads, op, "kv_head_mapping[", head, "] is ", kv_head,
            ": expected 0 to ", num_kv_heads - 1, ", a KV head of k_cache");
  }
}

void check_heads(const char* op, const AttentionInputs& in) {
  const int heads = in.q.shape(1);
  const int kv_heads = in.k_cache.shape(0);
  if (in.kv_head_mapping) {
    check_int32(op, "kv_head_mapping", *in.kv_head_mapping);
    check_shape(op, "kv_head_mapping", *in.kv_head_mapping, {heads}, "one KV head per query head");
    check_mapped_heads(op, *in.kv_head_mapping, kv_heads);
  } else if (heads % kv_heads != 0) {
    fail(op, "q has shape ", in.q.shape(), " with ", heads, " heads but k_cache has ", kv_heads,
         " KV heads: expected a multiple, or a kv_head_mapping");
  }
  if (in.sinks) {
    check_floating(op, "sinks", *in.sinks);
    check_shape(op, "sinks", *in.sinks, {heads}, "one logit per query head");
  }
  if (in.alibi_slopes) {
    check_floating(op, "alibi_slopes", *in.alibi_slopes);
    check_shape(op, "alibi_slopes", *in.alibi_slopes, {heads}, "one slope per query head");
  }
}

void check_rope(const char* op, const AttentionInputs& in) {
  const mx::array& freqs = *in.rope_freqs;
  check_floating(op, "rope_freqs", freqs);
  const int batch = in.q.shape(0);
  const int tokens = in.q.shape(2);
  const bool per_sequence = freqs.ndim() == 2 && tokens == 1 && freqs.shape(0) == batch;
  const bool per_token = freqs.ndim() == 3 && freqs.shape(0) == batch && freqs.shape(1) == tokens;
  require(per_sequence || per_token, op, "rope_freqs has shape ", freqs.shape(),
          " but q has shape ", in.q.shape(), ": expected (", batch, ", ", tokens,
          ", rotated_dims / 2)", tokens == 1 ? " or the same without the middle axis" : "");
  require(2 * int64_t{freqs.shape(-1)} <= in.q.shape(3), op, "rope_freqs has shape ", freqs.shape(),
          ", ", freqs.shape(-1), " angles, but q has head dimension ", in.q.shape(3),
          ": expected at most ", in.q.shape(3) / 2);
}

void check_mask(const char* op, const AttentionInputs& in) {
  const mx::array& mask = *in.attn_mask;
  check_dtype(op, "attn_mask", mask, mask.dtype() == mx::bool_ || is_pool_dtype(mask.dtype()),
              ": expected bool, float32, float16 or bfloat16");
  const mx::Shape target = {in.q.shape(0), in.q.shape(1), in.q.shape(2),
                            in.block_tables.shape(1) * in.k_cache.shape(2)};
  require(is_mask_shape(mask.shape(), target), op, "attn_mask has shape ", mask.shape(),
          ": expected one that broadcasts to ", target,
          " and has its last axis, max_blocks * block_size");
}

void check_scalars(const char* op, const AttentionOptions& options) {
  require(std::isfinite(options.scale), op, "scale is ", options.scale,
          ": expected a finite number");
  if (options.window && *options.window < 1) {
    fail(op, "window is ", *options.window, ": expected at least 1 key");
  }
  if (options.softcap && !(std::isfinite(*options.softcap) && *options.softcap > 0)) {
    fail(op, "softcap is ", *options.softcap, ": expected a finite number above 0");
  }
}

// The blocks that each context reads.
void check_tables(const char* op, const AttentionInputs& in) {
  const mx::array &tables = in.block_tables, &lens = in.context_lens;
  if (!tables.is_available() || !lens.is_available()) {
    return;
  }
  const int num_blocks = in.k_cache.shape(1), block_size = in.k_cache.shape(2);
  const int64_t most = int64_t{tables.shape(1)} * block_size;
  for (int b = 0; b < tables.shape(0); ++b) {
    const int32_t context = lens.data<int32_t>()[b * lens.strides(0)];
    require(context >= 0 && context <= most, op, "context_lens[", b, "] is ", context,
            ": expected 0 to ", most, ", max_blocks * block_size of block_tables ", tables.shape());
    const int64_t num_read = (int64_t{context} + block_size - 1) / block_size;
    for (int64_t i = 0; i < num_read; ++i) {
      const int32_t block = tables.data<int32_t>()[b * tables.strides(0) + i * tables.strides(1)];
      require(block >= 0 && block < num_blocks, op, "block_tables[", b, ", ", i, "] is ", block,
              " and a context of ", context, " tokens reads it: expected 0 to ", num_blocks - 1);
    }
  }
}

void check_cu_seqlens(const char* op, const mx::array& cu_seqlens, int num_tokens,
                      int num_decodes) {
  if (!cu_seqlens.is_available()) {
    return;
  }
  const int batch = cu_seqlens.shape(0) - 1;
  const auto at = [&](int s) { return cu_seqlens.data<int32_t>()[s * cu_seqlens.strides(0)]; };
  for (int s = 0; s <= num_decodes; ++s) {
    require(at(s) == s, op, "cu_seqlens[", s, "] is ", at(s), ": expected ", s,
            ", with num_decodes ", num_decodes);
  }
  for (int s = num_decodes + 1; s <= batch; ++s) {
    require(at(s - 1) <= at(s) && at(s) <= num_tokens, op, "cu_seqlens[", s, "] is ", at(s),
            ": expected ", at(s - 1), ", the entry before it, to ", num_tokens);
  }
  require(at(batch) == num_tokens, op, "cu_seqlens[", batch, "] is ", at(batch), ": expected ",
          num_tokens, ", the tokens of q");
}

}  // namespace

std::string printable(const mx::Shape& shape) {
  std::ostringstream out;
  out << "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    out << (axis ? ", " : "") << shape[axis];
  }
  out << (shape.size() == 1 ? ",)" : ")");
  return out.str();
}

void check_floating(const char* op, const char* name, const mx::array& a) {
  check_dtype(op, name, a, is_pool_dtype(a.dtype()), ": expected float32, float16 or bfloat16");
}

void check_attention(const AttentionInputs& in, const AttentionOptions& options,
                     bool check_values) {
  const char* op = in.cu_seqlens ? "paged_attention_varlen" : "paged_attention";
  check_tokens(op, in, options.num_decodes);
  check_floating(op, "q", in.q);
  const bool is_quantized = in.k_scales.has_value();
  check_pool(op, in.k_cache, in.v_cache, in.k_scales, in.v_scales, is_quantized, false);
  require(in.q.shape(3) == dim_of(in.k_cache), op, "q has shape ", in.q.shape(),
          " but k_cache has ", in.k_cache.shape(), ": expected equal head dimensions");
  check_tables_shape(op, in);
  check_heads(op, in);
  if (in.rope_freqs) {
    check_rope(op, in);
  }
  if (in.attn_mask) {
    check_mask(op, in);
  }
  if (in.shared_prefixes) {
    const int batch = in.block_tables.shape(0);
    check_int32(op, "shared_prefixes", *in.shared_prefixes);
    check_shape(op, "shared_prefixes", *in.shared_prefixes, {2, batch}, "two numbers a sequence");
  }
  check_scalars(op, options);
  if (check_values) {
    check_tables(op, in);
    if (in.cu_seqlens) {
      check_cu_seqlens(op, *in.cu_seqlens, in.q.shape(0), options.num_decodes);
    }
  }
}

mx::array token_rows(const mx::array& a) {
  if (a.ndim() == 3) {
    return a;
  }
  mx::array rows({a.shape(0) * a.shape(2), a.shape(1), a.shape(3)}, a.dtype(), nullptr, {});
  const auto stride = a.strides(a.shape(2) == 1 ? 0 : 2);
  rows.copy_shared_buffer(a, {stride, a.strides(1), a.strides(3)}, {}, a.data_size());
  return rows;
}

Arrays write_inputs(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                    const mx::array& v_cache, const mx::array& slot_mapping,
                    const OptionalArray& k_scales, const OptionalArray& v_scales,
                    mx::StreamOrDevice stream) {
  const char* op = "write_kv";
  const bool is_stored = !k_scales && is_quantized(k);  // rows as the pool has them
  check_pool(op, k_cache, v_cache, k_scales, v_scales, k_scales || is_stored, true);
  const bool is_of_model = k.ndim() == 4 && (k.shape(0) == 1 || k.shape(2) == 1);
  if (!is_of_model) {
    check_rank(
        op, "k", k, 3,
        "(num_tokens, num_kv_heads, head_dim), or (B, num_kv_heads, N, head_dim) where B or N "
        "is 1");
  }
  const int tokens = is_of_model ? k.shape(0) * k.shape(2) : k.shape(0);
  const auto shape = [&](int width) {
    const int heads = k_cache.shape(0);
    return is_of_model ? mx::Shape{k.shape(0), heads, k.shape(2), width}
                       : mx::Shape{tokens, heads, width};
  };
  check_shape(op, "k", k, shape(is_stored ? k_cache.shape(3) : dim_of(k_cache)),
              "the heads and width of k_cache");
  check_shape(op, "v", v, shape(is_stored ? v_cache.shape(3) : dim_of(v_cache)),
              "the tokens of k, the heads and width of v_cache");
  for (const auto& [name, rows, cache] : {std::tuple{"k", &k, &k_cache}, {"v", &v, &v_cache}}) {
    if (k_scales) {
      check_floating(op, name, *rows);
    }
    const mx::Dtype expected = k_scales ? k.dtype() : cache->dtype();
    check_dtype(op, name, *rows, rows->dtype() == expected,
                k_scales ? ": expected k's " : ": expected the cache's ", expected);
  }
  check_int32(op, "slot_mapping", slot_mapping);
  check_shape(op, "slot_mapping", slot_mapping, {tokens}, "one slot per row of k");
  Arrays inputs = {k, v, k_cache, v_cache, slot_mapping};
  if (is_stored) {
    inputs[0] = mx::contiguous(k, false, stream);
    inputs[1] = mx::contiguous(v, false, stream);
  }
  if (k_scales) {
    inputs.insert(inputs.end(), {*k_scales, *v_scales});
  }
  return inputs;
}

void check_copy(const mx::array& k_cache, const mx::array& v_cache, const mx::array& block_pairs) {
  const char* op = "copy_blocks";
  check_pool(op, k_cache, v_cache, true);
  check_formats(op, k_cache, v_cache, is_quantized(k_cache));
  check_int32(op, "block_pairs", block_pairs);
  require(block_pairs.ndim() == 2 && block_pairs.shape(1) == 2, op, "block_pairs has shape ",
          block_pairs.shape(), ": expected (num_pairs, 2), each (source, destination)");
}

}  // namespace mlx_paged

#include "csrc/attention_call.h"

#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// The array as one without gaps; a node of the graph, unless the array is known to have none.
mx::array dense(const mx::array& a, mx::Stream stream) {
  const bool is_dense = a.is_available() && a.flags().row_contiguous;
  return is_dense ? a : mx::contiguous(a, false, stream);
}

// Converts the arrays to the form that the kernels read: float32 vectors, angles per query token, a
// mask of full rank (broadcasting is a view). The Metal kernels support fewer combinations of
// dtypes, and only dense arrays beside the pool, the tables and the mask. They keep queries in
// their own dtype, which would round rotated ones.
void normalise(AttentionInputs& in, mx::Stream stream, bool for_metal) {
  const auto as_float32 = [&](OptionalArray& a) {
    if (a) {
      a = mx::astype(*a, mx::float32, stream);
    }
  };
  as_float32(in.rope_freqs);
  as_float32(in.sinks);
  as_float32(in.alibi_slopes);
  if (in.rope_freqs && in.rope_freqs->ndim() == 2) {
    in.rope_freqs = mx::expand_dims(*in.rope_freqs, 1, stream);
  }
  if (in.attn_mask) {
    if (in.attn_mask->dtype() != mx::bool_ && for_metal) {
      as_float32(in.attn_mask);
    }
    const mx::Shape shape = {in.q.shape(0), in.q.shape(1), in.q.shape(2), in.attn_mask->shape(-1)};
    in.attn_mask = mx::broadcast_to(*in.attn_mask, shape, stream);
  }
  if (for_metal) {
    const bool keeps_dtype = (in.k_scales || in.q.dtype() == in.k_cache.dtype()) && !in.rope_freqs;
    in.q = mx::astype(in.q, keeps_dtype ? in.q.dtype() : mx::float32, stream);
    in.q = dense(in.q, stream);
    for (const auto optional : {&AttentionInputs::kv_head_mapping, &AttentionInputs::rope_freqs,
                                &AttentionInputs::sinks, &AttentionInputs::alibi_slopes,
                                &AttentionInputs::cu_seqlens, &AttentionInputs::shared_prefixes}) {
      if (OptionalArray& a = in.*optional) {
        a = dense(*a, stream);
      }
    }
  }
}

}  // namespace

std::vector<mx::Shape> attention_shapes(const mx::array& q, const mx::array& v_cache,
                                        const mx::array& block_tables, bool return_attn) {
  std::vector<mx::Shape> shapes = {{q.shape(0), q.shape(1), q.shape(2), dim_of(v_cache)}};
  if (return_attn) {
    shapes.push_back(
        {q.shape(0), q.shape(1), q.shape(2), block_tables.shape(1) * v_cache.shape(2)});
  }
  return shapes;
}

AttentionCall attention_call(AttentionInputs in, const AttentionOptions& options, mx::Stream stream,
                             bool for_metal) {
  if (in.rope_freqs && in.rope_freqs->size() == 0) {  // rotates nothing
    in.rope_freqs.reset();
  }
  normalise(in, stream, for_metal);
  AttentionCall call = {
      .inputs = {in.q, in.k_cache, in.v_cache, in.block_tables, in.context_lens},
      .config = {options, {}},
      .shapes = attention_shapes(in.q, in.v_cache, in.block_tables, options.return_attn),
      .dtypes = {in.q.dtype()}};
  if (options.return_attn) {
    call.dtypes.push_back(mx::float32);
  }
  for (size_t i = 0; i < kOptionalArrays.size(); ++i) {
    if (const OptionalArray& a = in.*kOptionalArrays[i]) {
      call.config.has_optional[i] = true;
      call.inputs.push_back(*a);
    }
  }
  return call;
}

AttentionInputs unflatten_inputs(const Arrays& arrays, const AttentionConfig& config) {
  AttentionInputs in{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], {}, {},
                     {},        {},        {},        {},        {},        {}, {}};
  size_t next = 5;
  for (size_t i = 0; i < kOptionalArrays.size(); ++i) {
    if (config.has_optional[i]) {
      in.*kOptionalArrays[i] = arrays.at(next++);
    }
  }
  return in;
}

}  // namespace mlx_paged

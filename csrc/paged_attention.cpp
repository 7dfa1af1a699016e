#include "csrc/paged_attention.h"

#include <memory>

#include "csrc/cpu/attention/attention.h"
#include "csrc/dtypes.h"
#include "csrc/metal/encode.h"
#include "csrc/metal/plans.h"
#include "csrc/strides.h"
#include "csrc/validate.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// The arrays in the form that the kernels read: float32 vectors, angles per query token, a mask of
// full rank (broadcasting is a view). The Metal kernels know fewer combinations of dtypes and take
// only dense rows of q.
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
    const mx::Dtype cache_dtype = in.k_cache.dtype();
    in.q = mx::astype(in.q, in.q.dtype() == cache_dtype ? cache_dtype : mx::float32, stream);
    in.q = mx::contiguous(in.q, false, stream);
  }
}

// The primitive's inputs: the five arrays that every call has, then the optional ones it has.
std::vector<mx::array> flatten(const AttentionInputs& in) {
  std::vector<mx::array> arrays = {in.q, in.k_cache, in.v_cache, in.block_tables, in.context_lens};
  for (const OptionalArray* a :
       {&in.kv_head_mapping, &in.rope_freqs, &in.attn_mask, &in.sinks, &in.alibi_slopes}) {
    if (*a) {
      arrays.push_back(**a);
    }
  }
  return arrays;
}

std::vector<mx::Shape> shapes_of_outputs(const mx::array& q, const mx::array& v_cache,
                                         const mx::array& block_tables, bool return_attn) {
  std::vector<mx::Shape> shapes = {{q.shape(0), q.shape(1), q.shape(2), v_cache.shape(3)}};
  if (return_attn) {
    shapes.push_back(
        {q.shape(0), q.shape(1), q.shape(2), block_tables.shape(1) * v_cache.shape(2)});
  }
  return shapes;
}

std::vector<mx::array> attended(const AttentionCall& call, mx::Stream stream) {
  return mx::array::make_arrays(call.shapes, call.dtypes,
                                std::make_shared<PagedAttention>(stream, call.config), call.inputs);
}

// What there is without keys; an empty pool has no memory that a GPU could bind.
std::vector<mx::array> zeros(const AttentionCall& call, mx::Stream stream) {
  std::vector<mx::array> arrays;
  for (size_t i = 0; i < call.shapes.size(); ++i) {
    arrays.push_back(mx::zeros(call.shapes[i], call.dtypes[i], stream));
  }
  return arrays;
}

void bind_optional(const AttentionInputs& in, cpu::AttentionArgs& args) {
  if (in.kv_head_mapping) {
    args.kv_head_mapping = in.kv_head_mapping->data<int32_t>();
    args.kv_head_mapping_stride = in.kv_head_mapping->strides(0);
  }
  if (in.rope_freqs) {
    args.rope_freqs = in.rope_freqs->data<float>();
    args.rope_pairs = in.rope_freqs->shape(2);
    copy_strides(*in.rope_freqs, args.rope_strides);
  }
  if (in.attn_mask) {
    args.mask = in.attn_mask->data<void>();
    args.mask_dtype = cpu_dtype(in.attn_mask->dtype());
    copy_strides(*in.attn_mask, args.mask_strides);
  }
  if (in.sinks) {
    args.sinks = in.sinks->data<float>();
    args.sinks_stride = in.sinks->strides(0);
  }
  if (in.alibi_slopes) {
    args.alibi_slopes = in.alibi_slopes->data<float>();
    args.alibi_stride = in.alibi_slopes->strides(0);
  }
}

cpu::AttentionArgs kernel_args(const AttentionInputs& in, const AttentionConfig& config,
                               std::vector<mx::array>& outputs) {
  cpu::AttentionArgs args{};
  args.q = in.q.data<void>();
  args.q_dtype = cpu_dtype(in.q.dtype());
  copy_strides(in.q, args.q_strides);
  args.k = in.k_cache.data<void>();
  args.v = in.v_cache.data<void>();
  args.cache_dtype = cpu_dtype(in.k_cache.dtype());
  copy_strides(in.k_cache, args.k_strides);
  copy_strides(in.v_cache, args.v_strides);
  args.block_tables = in.block_tables.data<int32_t>();
  copy_strides(in.block_tables, args.block_tables_strides);
  args.context_lens = in.context_lens.data<int32_t>();
  args.context_lens_stride = in.context_lens.strides(0);
  bind_optional(in, args);
  args.out = outputs[0].data<void>();
  args.attn = config.return_attn ? outputs[1].data<float>() : nullptr;
  args.batch = in.q.shape(0);
  args.num_heads = in.q.shape(1);
  args.num_tokens = in.q.shape(2);
  args.head_dim = in.q.shape(3);
  args.num_kv_heads = in.k_cache.shape(0);
  args.num_blocks = in.k_cache.shape(1);
  args.block_size = in.k_cache.shape(2);
  args.value_dim = in.v_cache.shape(3);
  args.max_blocks = in.block_tables.shape(1);
  args.scale = config.scale;
  args.softcap = config.softcap.value_or(0);
  args.window = config.window.value_or(0);
  args.causal = config.causal;
  return args;
}

}  // namespace

AttentionInputs unflatten_inputs(const std::vector<mx::array>& arrays,
                                 const AttentionConfig& config) {
  size_t next = 5;
  const auto take = [&](bool present) {
    return present ? OptionalArray(arrays.at(next++)) : OptionalArray();
  };
  AttentionInputs in{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], {}, {}, {}, {}, {}};
  in.kv_head_mapping = take(config.has_kv_head_mapping);
  in.rope_freqs = take(config.has_rope_freqs);
  in.attn_mask = take(config.has_attn_mask);
  in.sinks = take(config.has_sinks);
  in.alibi_slopes = take(config.has_alibi_slopes);
  return in;
}

AttentionCall attention_call(const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
                             const mx::array& block_tables, const mx::array& context_lens,
                             float scale, bool causal, const OptionalArray& kv_head_mapping,
                             const OptionalArray& rope_freqs, const OptionalArray& attn_mask,
                             std::optional<int> window, const OptionalArray& sinks,
                             std::optional<float> softcap, const OptionalArray& alibi_slopes,
                             bool return_attn, mx::Stream stream, bool for_metal) {
  AttentionInputs in{q,          k_cache,   v_cache, block_tables, context_lens, kv_head_mapping,
                     rope_freqs, attn_mask, sinks,   alibi_slopes};
  AttentionConfig config{scale,
                         causal,
                         return_attn,
                         window,
                         softcap,
                         kv_head_mapping.has_value(),
                         rope_freqs.has_value(),
                         attn_mask.has_value(),
                         sinks.has_value(),
                         alibi_slopes.has_value()};
  check_attention(in, config);
  if (in.rope_freqs && in.rope_freqs->size() == 0) {  // rotates nothing
    in.rope_freqs.reset();
    config.has_rope_freqs = false;
  }
  normalise(in, stream, for_metal);
  std::vector<mx::Dtype> dtypes = {in.q.dtype()};
  if (return_attn) {
    dtypes.push_back(mx::float32);
  }
  return {flatten(in), config, shapes_of_outputs(in.q, v_cache, block_tables, return_attn), dtypes};
}

std::variant<mx::array, ArrayPair> paged_attention(
    const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
    const mx::array& block_tables, const mx::array& context_lens, float scale, bool causal,
    const OptionalArray& kv_head_mapping, const OptionalArray& rope_freqs,
    const OptionalArray& attn_mask, std::optional<int> window, const OptionalArray& sinks,
    std::optional<float> softcap, const OptionalArray& alibi_slopes, bool return_attn,
    mx::StreamOrDevice stream) {
  const mx::Stream s = mx::to_stream(stream);
  const bool for_metal = s.device == mx::Device::gpu;
  const AttentionCall call = attention_call(
      q, k_cache, v_cache, block_tables, context_lens, scale, causal, kv_head_mapping, rope_freqs,
      attn_mask, window, sinks, softcap, alibi_slopes, return_attn, s, for_metal);
  const auto outputs = has_keys(k_cache, block_tables) ? attended(call, s) : zeros(call, s);
  mx::array out = mx::astype(outputs[0], q.dtype(), s);
  if (return_attn) {
    return ArrayPair{out, outputs[1]};
  }
  return out;
}

bool PagedAttention::is_equivalent(const mx::Primitive& other) const {
  return config_ == static_cast<const PagedAttention&>(other).config_;
}

std::vector<mx::Shape> PagedAttention::output_shapes(const std::vector<mx::array>& inputs) {
  return shapes_of_outputs(inputs[0], inputs[2], inputs[3], config_.return_attn);
}

void PagedAttention::eval_cpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  check_pool_memory("paged_attention", inputs[1], inputs[2], false);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    encoder.set_output_array(output);
  }
  // MLX holds the inputs' and outputs' buffers until the task has run.
  encoder.dispatch([args = kernel_args(unflatten_inputs(inputs, config_), config_, outputs)] {
    cpu::paged_attention(args);
  });
}

void PagedAttention::eval_gpu(const std::vector<mx::array>& inputs,
                              std::vector<mx::array>& outputs) {
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  encode(plan_attention(inputs, config_), inputs, outputs, stream());
}

}  // namespace mlx_paged

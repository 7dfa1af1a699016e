#include <memory>
#include <utility>

#include "csrc/attention_call.h"
#include "csrc/cpu/task.h"
#include "csrc/metal/plans.h"
#include "csrc/validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

template <typename T, int kAxes>
void bind(const mx::array& a, cpu::View<T, kAxes>& view) {
  view.data = a.data<T>();
  copy_strides(a, view.strides);
}

template <typename T, int kAxes>
void bind(const OptionalArray& a, cpu::View<T, kAxes>& view) {
  if (a) {
    bind(*a, view);
  }
}

// The strides of out, those of q with cu_seqlens, and the numbers of tokens.
void place_tokens(const AttentionInputs& in, cpu::AttentionArgs& args) {
  args.out_strides[2] = args.value_dim;
  args.out_strides[1] = int64_t{args.value_dim} * in.q.shape(2);
  args.out_strides[0] = args.out_strides[1] * in.q.shape(1);
  args.num_tokens = in.q.shape(2);
  if (in.cu_seqlens) {  // the tokens of all sequences are on axis 0
    args.num_tokens = in.q.shape(0);
    args.q.strides[2] = std::exchange(args.q.strides[0], 0);
    args.out_strides[2] = std::exchange(args.out_strides[0], 0);
  }
}

cpu::AttentionArgs kernel_args(const AttentionInputs& in, const AttentionOptions& options,
                               Arrays& outputs) {
  cpu::AttentionArgs args{};
  bind(in.q, args.q);
  bind(in.k_cache, args.k);
  bind(in.v_cache, args.v);
  bind(in.k_scales, args.k_scales);
  bind(in.v_scales, args.v_scales);
  bind(in.block_tables, args.block_tables);
  bind(in.context_lens, args.context_lens);
  bind(in.cu_seqlens, args.cu_seqlens);
  bind(in.shared_prefixes, args.shared_prefixes);
  bind(in.kv_head_mapping, args.kv_head_mapping);
  bind(in.rope_freqs, args.rope_freqs);
  bind(in.attn_mask, args.mask);
  bind(in.sinks, args.sinks);
  bind(in.alibi_slopes, args.alibi_slopes);
  args.q_dtype = cpu::dtype_of(in.q);
  args.k_dtype = cpu::dtype_of(in.k_cache);
  args.v_dtype = cpu::dtype_of(in.v_cache);
  args.mask_dtype = in.attn_mask ? cpu::dtype_of(*in.attn_mask) : cpu::DType::kBool;
  args.rope_pairs = in.rope_freqs ? in.rope_freqs->shape(2) : 0;
  args.out = outputs[0].data<void>();
  args.attn = options.return_attn ? outputs[1].data<float>() : nullptr;
  args.batch = in.block_tables.shape(0);
  args.num_heads = in.q.shape(1);
  args.head_dim = in.q.shape(3);
  args.num_kv_heads = in.k_cache.shape(0);
  args.num_blocks = in.k_cache.shape(1);
  args.block_size = in.k_cache.shape(2);
  args.value_dim = dim_of(in.v_cache);
  args.max_blocks = in.block_tables.shape(1);
  args.scale = options.scale;
  args.softcap = options.softcap.value_or(0);
  args.window = options.window.value_or(0);
  args.causal = options.causal;
  place_tokens(in, args);
  return args;
}

void allocate(Arrays& outputs) {
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

// Inputs: see AttentionCall.
class PagedAttention : public cpu::TaskPrimitive {
 public:
  PagedAttention(mx::Stream stream, const AttentionConfig& config)
      : cpu::TaskPrimitive(stream), config_(config) {}

  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    check_pool_memory("paged_attention", inputs[1], inputs[2], false);
    allocate(outputs);
    return [args = kernel_args(unflatten_inputs(inputs, config_), config_, outputs)] {
      cpu::paged_attention(args);
    };
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    allocate(outputs);
    encode(plan_attention(inputs, config_), inputs, outputs, stream());
  }

  const char* name() const override { return "PagedAttention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return config_ == static_cast<const PagedAttention&>(other).config_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return attention_shapes(inputs[0], inputs[2], inputs[3], config_.return_attn);
  }

 private:
  AttentionConfig config_;
};

// The outputs of a call without keys: a GPU cannot bind the memory of an empty pool.
Arrays zeros(const AttentionCall& call, mx::Stream stream) {
  Arrays arrays;
  for (size_t i = 0; i < call.shapes.size(); ++i) {
    arrays.push_back(mx::zeros(call.shapes[i], call.dtypes[i], stream));
  }
  return arrays;
}

}  // namespace

std::variant<mx::array, ArrayPair> paged_attention(AttentionInputs inputs,
                                                   const AttentionOptions& options,
                                                   bool check_values, mx::StreamOrDevice stream) {
  const mx::Stream s = mx::to_stream(stream);
  const mx::Dtype dtype = inputs.q.dtype();
  const bool has_three_axes = inputs.cu_seqlens && inputs.q.ndim() == 3;
  if (has_three_axes) {
    inputs.q = mx::expand_dims(inputs.q, 2, s);
  }
  check_attention(inputs, options, check_values);
  const AttentionCall call =
      attention_call(std::move(inputs), options, s, s.device == mx::Device::gpu);
  const auto outputs =
      has_keys(call.inputs[1], call.inputs[3])
          ? mx::array::make_arrays(call.shapes, call.dtypes,
                                   std::make_shared<PagedAttention>(s, call.config), call.inputs)
          : zeros(call, s);
  mx::array out = mx::astype(outputs[0], dtype, s);
  if (options.return_attn) {
    return ArrayPair{out, outputs[1]};
  }
  return has_three_axes ? mx::squeeze(out, 2, s) : out;
}

}  // namespace mlx_paged

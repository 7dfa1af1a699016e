// A call of paged_attention between the op, its primitive and the kernels' launch plans.
#pragma once

#include <array>
#include <vector>

#include "csrc/ops.h"

namespace mlx_paged {

// The optional arrays of a call, in the order in which its inputs have them.
inline constexpr std::array kOptionalArrays = {
    &AttentionInputs::kv_head_mapping, &AttentionInputs::rope_freqs,
    &AttentionInputs::attn_mask,       &AttentionInputs::sinks,
    &AttentionInputs::alibi_slopes,    &AttentionInputs::k_scales,
    &AttentionInputs::v_scales,        &AttentionInputs::cu_seqlens,
    &AttentionInputs::shared_prefixes};

// The options of a call, and which optional arrays it has.
struct AttentionConfig : AttentionOptions {
  std::array<bool, kOptionalArrays.size()> has_optional;

  bool operator==(const AttentionConfig&) const = default;
};

// A validated call: the primitive's inputs and config, and the shapes and dtypes of its outputs.
// The inputs are the five arrays that every call has, then the optional ones that this call has.
struct AttentionCall {
  Arrays inputs;
  AttentionConfig config;
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
};

// Converts valid arguments of paged_attention to the form that the kernels read.
AttentionCall attention_call(AttentionInputs in, const AttentionOptions& options, mx::Stream stream,
                             bool for_metal);

// The arrays of a call by name, from the primitive's inputs.
AttentionInputs unflatten_inputs(const Arrays& arrays, const AttentionConfig& config);

std::vector<mx::Shape> attention_shapes(const mx::array& q, const mx::array& v_cache,
                                        const mx::array& block_tables, bool return_attn);

// Whether the pool and the block tables of a call can hold any key of any sequence.
inline bool has_keys(const mx::array& k_cache, const mx::array& block_tables) {
  return k_cache.shape(1) > 0 && block_tables.size() > 0;
}

// Copies the first kCount strides of an array, in elements.
template <size_t kCount>
void copy_strides(const mx::array& a, int64_t (&strides)[kCount]) {
  for (size_t axis = 0; axis < kCount; ++axis) {
    strides[axis] = a.strides(static_cast<int>(axis));
  }
}

}  // namespace mlx_paged

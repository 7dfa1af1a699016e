// The primitive behind paged_attention.
#pragma once

#include <vector>

#include "csrc/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

// The arrays of one call; see ops.h for shapes.
struct AttentionInputs {
  mx::array q;
  mx::array k_cache;
  mx::array v_cache;
  mx::array block_tables;
  mx::array context_lens;
  OptionalArray kv_head_mapping;
  OptionalArray rope_freqs;
  OptionalArray attn_mask;
  OptionalArray sinks;
  OptionalArray alibi_slopes;
};

// The scalars of one call and which optional arrays it has.
struct AttentionConfig {
  float scale;
  bool causal;
  bool return_attn;
  std::optional<int> window;
  std::optional<float> softcap;
  bool has_kv_head_mapping;
  bool has_rope_freqs;
  bool has_attn_mask;
  bool has_sinks;
  bool has_alibi_slopes;

  bool operator==(const AttentionConfig&) const = default;
};

// A validated call: what its primitive takes and gives.
struct AttentionCall {
  std::vector<mx::array> inputs;
  AttentionConfig config;
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
};

// Validates the arguments of paged_attention and brings them into the form that the kernels read.
AttentionCall attention_call(const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
                             const mx::array& block_tables, const mx::array& context_lens,
                             float scale, bool causal, const OptionalArray& kv_head_mapping,
                             const OptionalArray& rope_freqs, const OptionalArray& attn_mask,
                             std::optional<int> window, const OptionalArray& sinks,
                             std::optional<float> softcap, const OptionalArray& alibi_slopes,
                             bool return_attn, mx::Stream stream, bool for_metal);

// Whether a pool and block tables of these shapes hold any key.
inline bool has_keys(const mx::array& k_cache, const mx::array& block_tables) {
  return k_cache.shape(1) > 0 && block_tables.shape(1) > 0;
}

// The arrays of a call by name, from the primitive's inputs: the five that every call has, then the
// optional ones it has, in the order of AttentionInputs.
AttentionInputs unflatten_inputs(const std::vector<mx::array>& arrays,
                                 const AttentionConfig& config);

class PagedAttention : public mx::Primitive {
 public:
  PagedAttention(mx::Stream stream, const AttentionConfig& config)
      : mx::Primitive(stream), config_(config) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "PagedAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  AttentionConfig config_;
};

}  // namespace mlx_paged

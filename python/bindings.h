// The parts of the module _ext.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "csrc/ops.h"

namespace mlx_paged {

namespace nb = nanobind;
using namespace nb::literals;

// The calls of layers, and what is about graphs, in the module itself.
void bind_calls(nb::module_& module);
void bind_graphs(nb::module_& module);

// The submodules `layers`, `recurrent` and `metal`.
void bind_layers(nb::module_& module);
void bind_recurrent(nb::module_& module);
void bind_plans(nb::module_& module);

// Binds a function with the arguments of paged_attention. `Extra` are the types of further
// arguments; `annotations` name and document them.
template <typename... Extra, typename Function, typename... Annotations>
void def_attention(nb::module_& module, const char* name, Function function,
                   const Annotations&... annotations) {
  module.def(
      name,
      [function](const mx::array& q, const mx::array& k_cache, const mx::array& v_cache,
                 const mx::array& block_tables, const mx::array& context_lens, float scale,
                 bool causal, const OptionalArray& kv_head_mapping, const OptionalArray& rope_freqs,
                 const OptionalArray& attn_mask, std::optional<int> window,
                 const OptionalArray& sinks, std::optional<float> softcap,
                 const OptionalArray& alibi_slopes, bool return_attn, const OptionalArray& k_scales,
                 const OptionalArray& v_scales, const OptionalArray& cu_seqlens, int num_decodes,
                 const OptionalArray& shared_prefixes, Extra... extra) {
        AttentionInputs in{
            q,          k_cache,        v_cache, block_tables, context_lens, kv_head_mapping,
            rope_freqs, attn_mask,      sinks,   alibi_slopes, cu_seqlens,   k_scales,
            v_scales,   shared_prefixes};
        return function(std::move(in),
                        AttentionOptions{scale, causal, return_attn, window, softcap, num_decodes},
                        extra...);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "block_tables"_a, "context_lens"_a, nb::kw_only(), "scale"_a,
      "causal"_a = true, "kv_head_mapping"_a = nb::none(), "rope_freqs"_a = nb::none(),
      "attn_mask"_a = nb::none(), "window"_a = nb::none(), "sinks"_a = nb::none(),
      "softcap"_a = nb::none(), "alibi_slopes"_a = nb::none(), "return_attn"_a = false,
      "k_scales"_a = nb::none(), "v_scales"_a = nb::none(), "cu_seqlens"_a = nb::none(),
      "num_decodes"_a = 0, "shared_prefixes"_a = nb::none(), annotations...);
}

}  // namespace mlx_paged

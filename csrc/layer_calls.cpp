#include "csrc/layer_calls.h"

#include "csrc/cpu/layers/layer_ops.h"
#include "csrc/metal/plans.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// The index of each head's part of each block of `tables`, in an array of the pool whose blocks and
// heads are one axis.
mx::array head_runs(const mx::array& tables, int heads) {
  const mx::array first = mx::multiply(mx::expand_dims(tables, 1), mx::array(heads));
  return mx::add(first, mx::expand_dims(mx::arange(0, heads, mx::int32), 1));
}

OptionalArray scales_of(const Arrays& stored, int index) {
  return stored.size() > 2 ? OptionalArray(stored[2 + index]) : std::nullopt;
}

}  // namespace

ForwardArrays::ForwardArrays(OptionalArray slot_mapping, mx::array block_tables,
                             mx::array context_lens, OptionalArray shared_prefixes,
                             mx::array row_tables, int max_context, OptionalArray held)
    : slot_mapping(std::move(slot_mapping)),
      block_tables(std::move(block_tables)),
      context_lens(std::move(context_lens)),
      shared_prefixes(std::move(shared_prefixes)),
      row_tables(std::move(row_tables)),
      max_context(max_context),
      held(std::move(held)) {}

const mx::array& ForwardArrays::runs(int heads) {
  for (const auto& [of_heads, runs] : runs_) {
    if (of_heads == heads) {
      return runs;
    }
  }
  return runs_.emplace_back(heads, head_runs(row_tables, heads)).second;
}

KnownAttention::KnownAttention(const mx::array& q, std::optional<int> window, bool shares,
                               bool rotates)
    : dtype(q.dtype()),
      heads(q.shape(1)),
      columns(q.shape(2)),
      window(window),
      shares(shares),
      rotates(rotates),
      device(mx::default_device()) {}

std::optional<Arrays> append_kv(const mx::array& k, const mx::array& v, const Arrays& stored,
                                ForwardArrays& forward, const KnownWrite& known) {
  const bool is_quantized = stored.size() > 2;
  const auto fits = [&](const mx::array& x, const mx::array& cache) {
    return x.ndim() == 4 && x.dtype() == known.dtype && x.shape(1) == cache.shape(0) &&
           x.shape(3) == dim_of(cache);
  };
  const auto is_native = [&] {
    return known.device == mx::Device::cpu ||
           (has_metal() && unsupported_on_metal(k.shape(-1), v.shape(-1)).empty());
  };
  const bool has_tokens =
      forward.max_context > 0 && stored[0].size() > 0 && forward.row_tables.size() > 0;
  if (!forward.slot_mapping || known.device != mx::default_device() || is_transforming() ||
      !has_tokens || !fits(k, stored[0]) || !fits(v, stored[1]) || !is_native()) {
    return std::nullopt;
  }
  const auto rows = [&](const mx::array& x) {
    const bool is_taken = x.shape(0) == 1 || x.shape(2) == 1;
    const mx::array taken = is_taken ? x : mx::flatten(mx::transpose(x, {0, 2, 1, 3}), 0, 1);
    return known.rotates ? hadamard(taken, {}) : taken;
  };
  Arrays found = write_kv(rows(k), rows(v), stored[0], stored[1], *forward.slot_mapping,
                          scales_of(stored, 0), scales_of(stored, 1), {});
  const mx::array& runs = forward.runs(stored[0].shape(0));
  for (int i = 0; i < 2; ++i) {
    const mx::array read =
        is_quantized ? dequantized_blocks(found[i], found[2 + i], forward.row_tables,
                                          forward.max_context, runs, known.dtype, known.rotates)
                     : gather_blocks(found[i], forward.row_tables, forward.max_context, runs);
    found.push_back(forward.held ? mx::where(*forward.held, read, mx::array(0, read.dtype()))
                                 : read);
  }
  return found;
}

OptionalArray attend_known(const mx::array& q, const Arrays& stored, const ForwardArrays& forward,
                           const KnownAttention& known, float scale) {
  if (q.ndim() != 4 || q.dtype() != known.dtype || q.shape(1) != known.heads ||
      q.shape(2) != known.columns || known.device != mx::default_device() || is_transforming()) {
    return std::nullopt;
  }
  AttentionInputs in{known.rotates ? hadamard(q, {}) : q,
                     stored[0],
                     stored[1],
                     forward.block_tables,
                     forward.context_lens,
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     scales_of(stored, 0),
                     scales_of(stored, 1),
                     known.shares ? forward.shared_prefixes : std::nullopt};
  const AttentionOptions options{scale, true, false, known.window, std::nullopt};
  const auto out = std::get<mx::array>(paged_attention(std::move(in), options, false, {}));
  return known.rotates ? hadamard(out, {}) : out;
}

}  // namespace mlx_paged

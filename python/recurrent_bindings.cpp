#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "csrc/cpu/recurrent/recurrent_ops.h"
#include "python/bindings.h"

namespace mlx_paged {

namespace {

constexpr const char* kRecurrentDoc =
    R"(Recurrent layers of a model, one op a kind.

Arrays are float32, float16 or bfloat16 of any layout. Sums are float32, results are rounded once.
Tokens are computed one after the other: bits depend neither on the chunks in which they come nor on
the other sequences. A state of None is zeros. The ops run on CPUs only. They raise ValueError if a
shape or dtype does not fit.)";

constexpr const char* kGatedDeltaDoc =
    R"(The gated delta rule (Yang et al., "Gated Delta Networks", 2024). Of each token, where S is the state:
``S = S diag(g); S = S + b (v - S k) k^T; out = S q``.

q and k are ``[B, T, G, K]``, v ``[B, T, H, V]``, G a divisor of H; gates ``[B, T, H]`` or
``[B, T, H, K]`` float32; betas ``[B, T, H]``; the state ``[B, H, V, K]`` float32. Tokens where `mask`,
``[B, T]`` bool, is false leave the state as it is, and their outputs are 0. Returns the outputs
``[B, T, H, V]`` and the state after the last token.)";

constexpr const char* kStateSpaceScanDoc =
    R"(The scan of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024). Of each token, where S is the state
and ``s = clip(softplus(dt + dt_bias), *limits)``:
``S = exp(-s exp(a_log)) S + s x b^T; out = S c + d x``.

x is ``[B, T, H, D]``, b and c ``[B, T, G, N]``, G a divisor of H; dt ``[B, T, H]``; a_log, d and
dt_bias ``[H]``; the state ``[B, H, D, N]`` float32. `mask` is as in :func:`gated_delta`. Returns the
outputs ``[B, T, H, D]``, float32 if d is, and the state after the last token.)";

constexpr const char* kSelectiveScanDoc =
    R"(The scan of Mamba (Gu and Dao, "Mamba", 2023). Of each token and channel, where S is the state and
``s = softplus(dt)``: ``S = exp(-s exp(a_log)) S + s x b; out = S c + d x``.

x and dt are ``[B, T, D]``, a_log ``[D, N]``, b and c ``[B, T, N]``, d ``[D]``, the state
``[B, D, N]``, all of one dtype. The state is rounded to it after each token. Returns the outputs
``[B, T, D]`` and the state after the last token.)";

constexpr const char* kConvolutionDoc =
    R"(A convolution of each channel by itself: ``out[t] = bias + sum_k weight[:, k, 0] * x[t + k]`` of
``x [B, T, C]``, weight ``[C, K, 1]`` and bias ``[C]`` or None, all of one dtype. The result is
``[B, T - K + 1, C]``.)";

std::pair<mx::array, mx::array> pair_of(const Arrays& arrays) { return {arrays[0], arrays[1]}; }

}  // namespace

void bind_recurrent(nb::module_& module) {
  nb::module_ m = module.def_submodule("recurrent", kRecurrentDoc);
  m.def(
      "gated_delta",
      [](const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& gates,
         const mx::array& betas, const OptionalArray& state, const OptionalArray& mask,
         mx::StreamOrDevice stream) {
        return pair_of(gated_delta(q, k, v, gates, betas, state, mask, stream));
      },
      "q"_a, "k"_a, "v"_a, "gates"_a, "betas"_a, "state"_a = nb::none(), "mask"_a = nb::none(),
      nb::kw_only(), "stream"_a = nb::none(), kGatedDeltaDoc);
  m.def(
      "state_space_scan",
      [](const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c,
         const mx::array& d, const mx::array& dt, const mx::array& dt_bias,
         const OptionalArray& state, const OptionalArray& mask, std::pair<float, float> limits,
         mx::StreamOrDevice stream) {
        return pair_of(state_space_scan(x, a_log, b, c, d, dt, dt_bias, state, mask, limits.first,
                                        limits.second, stream));
      },
      "x"_a, "a_log"_a, "b"_a, "c"_a, "d"_a, "dt"_a, "dt_bias"_a, "state"_a = nb::none(),
      "mask"_a = nb::none(), nb::kw_only(), "limits"_a, "stream"_a = nb::none(),
      kStateSpaceScanDoc);
  m.def(
      "selective_scan",
      [](const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c,
         const mx::array& d, const mx::array& dt, const OptionalArray& state,
         mx::StreamOrDevice stream) {
        return pair_of(selective_scan(x, a_log, b, c, d, dt, state, stream));
      },
      "x"_a, "a_log"_a, "b"_a, "c"_a, "d"_a, "dt"_a, "state"_a = nb::none(), nb::kw_only(),
      "stream"_a = nb::none(), kSelectiveScanDoc);
  m.def("depthwise_convolution", &depthwise_convolution, "x"_a, "weight"_a, "bias"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none(), kConvolutionDoc);
}

}  // namespace mlx_paged

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "csrc/cpu/layers/layer_ops.h"
#include "csrc/factor_files.h"
#include "python/bindings.h"

namespace mlx_paged {

namespace {

constexpr const char* kDoc =
    R"(Layers of a model in one pass each; MLX's CPU backend needs several passes.

Arrays are float32, float16 or bfloat16 of any layout. Norms and rotary embeddings are rounded where
MLX rounds them. Activations are rounded once, at the end. The ops run on CPUs only. They raise
ValueError if a shape or dtype does not fit.)";

constexpr const char* kRmsNormDoc =
    R"(``mx.fast.rms_norm``: ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis of ``x [..., W]``;
`weight` is ``[W]`` of x's dtype, or None.)";

constexpr const char* kRopeDoc =
    R"(``mx.fast.rope`` of ``x [B, H, L, D]`` or ``[B, L, D]``: rotary position embedding (Su et al.,
"RoFormer", 2021). `offset` is the position of each sequence's first token, an int or ``[B]`` or
``[1]`` integers. With ``frequencies [P]`` float32, P <= D / 2, pair i of token l is rotated by
``scale * (offset + l) * frequencies[i]`` radians; dims from 2 P on pass through. Pairs are dims
``(i, i + P)``, or ``(2i, 2i + 1)`` if `traditional`.)";

constexpr const char* kActivateDoc =
    R"(The activation of this name in ``mlx.nn``, times `factor`: of x's shape and dtype, or None.)";

constexpr const char* kLikeliestDoc =
    R"(Of ``x [..., W]``, W at most 2^24, two float32 numbers on the last axis: ``total = mx.logsumexp(x)``,
rounded to x's dtype, and ``mx.argmax(x - total)``, the first one of equal elements. With `allowed`,
for ``x [R, W]``: of ``mask(x, allowed)``, if it has no NaN and not only -inf.)";

constexpr const char* kMaskDoc =
    R"(``x [R, W]`` with -inf where bit ``i % 32`` of ``allowed[r, i // 32]`` is 0. `allowed` is
``[R, ceil(W / 32)]`` uint32. This op runs on GPUs too, of several of MLX's operations.)";

constexpr const char* kHadamardDoc =
    R"(The orthonormal Hadamard transform of the last axis of ``x [..., W]``, W at most 4,096, or of its
parts if W is no power of two: parts are powers of two, the largest ones first. It is its own
inverse. This op runs on GPUs too, of MLX's operations.)";

constexpr const char* kLinearDoc =
    R"(``x [..., D] @ weight.T + bias``, rounded once; weight ``[O, D]``, bias ``[O]`` or None, all of
x's dtype. Sums are float32. A row's result does not depend on the other rows.)";

constexpr const char* kLowRankDoc =
    R"(``y [..., O]`` with the terms ``(x @ a[i].T) @ b[i]`` in the rows whose index i is from 0 to S - 1;
other rows as they are. `a` is ``[S, r, D]``, `b` ``[S, r, O]``, r at most 512, `indices` one int32 for
each row of y. ``x [..., D]`` has as many rows, or one for each n rows of y. All but the indices have
one dtype. Sums are float32; ``x @ a[i].T`` and the result are rounded.)";

constexpr const char* kIsDenseDoc =
    R"(Whether the elements of an evaluated array lie one after the other. True of others.)";

constexpr const char* kReadFactorsDoc =
    R"(Tensors of a file as factors, read in one call without Python's lock. Each of `stored` is a tuple:
where the tensor's bytes begin, its type as safetensors names it, its shape ``[..., rows, columns]``,
whether the factor is ``[..., columns, rows]``, a number that each element is multiplied by in
float32, and the factor's dtype. Returns the bytes of all factors as one array; the factors, which
are parts of it, each from a multiple of 64 bytes on; and the index of the first factor with NaN or
infinity, or -1. Raises ValueError if the file is too short, RuntimeError if it cannot be opened.)";

constexpr const char* kWriteSlotDoc =
    R"(Write into row `slot` of each stack ``[S, ..., r, C]`` its factor, ``[..., at most r, C]``, and
zeros after it; zeros alone for None. Stacks and factors are evaluated; the stacks change in place.)";

bool is_dense(const mx::array& array) {
  return array.status() == mx::array::Status::unscheduled || array.flags().row_contiguous;
}

constexpr const char* kQuantizedLinearDoc =
    R"(:func:`linear` with a weight of ``mx.quantize``, mode "affine": uint32 ``[O, D * bits / 32]`` of 4 or
8 bits; scales and biases, here `offsets`, ``[O, D / group_size]`` of x's dtype, for groups of 32,
64 or 128.)";

constexpr const char* kSwitchLinearDoc =
    R"(Layers of experts: ``x[..., 0, :] @ weight[indices].T + bias[indices]``, rounded once. `indices`
``[.., K]`` are uint32 or int32; x is ``[.., K, 1, D]`` or ``[.., 1, 1, D]``, and the result
``[.., K, 1, O]``. The weight is ``[E, O, D]`` of x's dtype, or of ``mx.quantize`` as in
:func:`quantized_linear` ``[E, O, D * bits / 32]`` with scales and offsets ``[E, O, D / group_size]``. Without
offsets, 4 bits in groups of 32 are those of mode "mxfp4", and scales are uint8. The bias is
``[E, O]``. A row with an index outside [0, E) is NaN. A row's result does not depend on the other
rows.)";

mx::array rope_of(const mx::array& x, const std::variant<int, mx::array>& offset,
                  const mx::array& frequencies, float scale, bool traditional,
                  mx::StreamOrDevice stream) {
  const int* number = std::get_if<int>(&offset);
  const mx::array offsets = number ? mx::array(*number) : std::get<mx::array>(offset);
  return rope(x, offsets, frequencies, scale, traditional, stream);
}

template <cpu::Activation kActivation>
mx::array activation(const mx::array& x, const OptionalArray& factor, mx::StreamOrDevice stream) {
  return activate(x, factor, kActivation, stream);
}

}  // namespace

void bind_layers(nb::module_& module) {
  nb::module_ m = module.def_submodule("layers", kDoc);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
        "stream"_a = nb::none(), kRmsNormDoc);
  m.def("rope", &rope_of, "x"_a, "offset"_a, "frequencies"_a, nb::kw_only(), "scale"_a = 1.0f,
        "traditional"_a = false, "stream"_a = nb::none(), kRopeDoc);
  m.def("silu", &activation<cpu::Activation::kSilu>, "x"_a, "factor"_a = nb::none(), nb::kw_only(),
        "stream"_a = nb::none(), kActivateDoc);
  m.def("gelu_approx", &activation<cpu::Activation::kGeluApprox>, "x"_a, "factor"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none(), kActivateDoc);
  m.def("linear", &linear, "x"_a, "weight"_a, "bias"_a = nb::none(), nb::kw_only(),
        "stream"_a = nb::none(), kLinearDoc);
  m.def("quantized_linear", &quantized_linear, "x"_a, "weight"_a, "scales"_a, "offsets"_a,
        "bias"_a = nb::none(), nb::kw_only(), "group_size"_a, "bits"_a, "stream"_a = nb::none(),
        kQuantizedLinearDoc);
  m.def("switch_linear", &switch_linear, "x"_a, "indices"_a, "weight"_a, "scales"_a = nb::none(),
        "offsets"_a = nb::none(), "bias"_a = nb::none(), nb::kw_only(), "group_size"_a = 0,
        "bits"_a = 0, "stream"_a = nb::none(), kSwitchLinearDoc);
  m.def("low_rank_terms", &low_rank_terms, "y"_a, "x"_a, "a"_a, "b"_a, "indices"_a, nb::kw_only(),
        "stream"_a = nb::none(), kLowRankDoc);
  m.def("read_factors", &read_factors, "path"_a, "stored"_a,
        nb::call_guard<nb::gil_scoped_release>(), kReadFactorsDoc);
  m.def("write_slot", &write_slot, "stacks"_a, "factors"_a, "slot"_a,
        nb::call_guard<nb::gil_scoped_release>(), kWriteSlotDoc);
  m.def("is_dense", &is_dense, "array"_a, kIsDenseDoc);
  m.def("likeliest", &likeliest, "x"_a, "allowed"_a = nb::none(), nb::kw_only(),
        "stream"_a = nb::none(), kLikeliestDoc);
  m.def("hadamard", &hadamard, "x"_a, nb::kw_only(), "stream"_a = nb::none(), kHadamardDoc);
  m.def("mask", &mask, "x"_a, "allowed"_a, nb::kw_only(), "stream"_a = nb::none(), kMaskDoc);
}

}  // namespace mlx_paged

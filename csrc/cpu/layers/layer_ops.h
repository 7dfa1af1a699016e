// Normalisations, rotary embeddings, activations and log-sum-exp for MLX's CPU backend, which
// composes each of many passes: one pass. They compute what mx.fast.rms_norm, mx.fast.rope,
// mlx.nn.silu, mlx.nn.gelu_approx and mx.logsumexp do.
//
// Each validates its arguments on the calling thread (std::invalid_argument, ValueError in Python).
// All arrays are float32, float16 or bfloat16, of any layout.
#pragma once

#include "csrc/cpu/layers/layer_kernels.h"
#include "csrc/ops.h"

namespace mlx_paged {

// x [..., W] / sqrt(mean(x^2) + eps) * weight [W], in x's dtype, which is weight's too.
mx::array rms_norm(const mx::array& x, const OptionalArray& weight, float eps,
                   mx::StreamOrDevice stream);

// Rotates the first 2 P dims of x [B, ..., L, D], of 3 or 4 axes: pair i of token l by the angle
// scale * (offset + l) * frequencies[i] (Su et al., "RoFormer", 2021). offset is one integer or B
// of them, frequencies [P] is float32. Pairs are the dims (i, i + P), if `traditional` (2i, 2i +
// 1).
mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& frequencies,
               float scale, bool traditional, mx::StreamOrDevice stream);

// The frequencies [dims / 2] of mx.fast.rope with this base, bit for bit.
mx::array rope_frequencies(int dims, float base, mx::StreamOrDevice stream);

// activation(x) * factor; factor has x's shape and dtype, or is absent.
mx::array activate(const mx::array& x, const OptionalArray& factor, cpu::Activation activation,
                   mx::StreamOrDevice stream);

// log(sum(e^x)) over the last axis, which stays with one element.
mx::array log_sum_exp(const mx::array& x, mx::StreamOrDevice stream);

}  // namespace mlx_paged

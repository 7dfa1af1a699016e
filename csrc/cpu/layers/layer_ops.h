// Normalisations, rotary embeddings, activations, log-sum-exps with the likeliest token, and linear
// layers on CPUs. MLX's CPU backend needs several passes of one thread for each.
// python/layer_bindings.cpp documents the ops.
#pragma once

#include "csrc/cpu/layers/layer_kernels.h"
#include "csrc/ops.h"

namespace mlx_paged {

mx::array rms_norm(const mx::array& x, const OptionalArray& weight, float eps,
                   mx::StreamOrDevice stream);

mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& frequencies,
               float scale, bool traditional, mx::StreamOrDevice stream);

mx::array activate(const mx::array& x, const OptionalArray& factor, cpu::Activation activation,
                   mx::StreamOrDevice stream);

mx::array likeliest(const mx::array& x, const OptionalArray& allowed, mx::StreamOrDevice stream);

// Linear layers are one node of the graph each.
mx::array linear(const mx::array& x, const mx::array& weight, const OptionalArray& bias,
                 mx::StreamOrDevice stream);

mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& offsets, const OptionalArray& bias, int group_size,
                           int bits, mx::StreamOrDevice stream);

// Each row of x meets the weight of the expert that it chose. One node of the graph.
mx::array switch_linear(const mx::array& x, const mx::array& indices, const mx::array& weight,
                        const OptionalArray& scales, const OptionalArray& offsets,
                        const OptionalArray& bias, int group_size, int bits,
                        mx::StreamOrDevice stream);

// Adds to each row of y the product of its row of x with two factors that it chose. One node.
mx::array low_rank_terms(const mx::array& y, const mx::array& x, const mx::array& a,
                         const mx::array& b, const mx::array& indices, mx::StreamOrDevice stream);

// x [R, W] with -inf where a bit of allowed, [R, ceil(W / 32)] uint32, is 0; on any device.
mx::array mask(const mx::array& x, const mx::array& allowed, mx::StreamOrDevice stream);

// The Hadamard transform of the rows of x, as of LayerKernels; on any device.
mx::array hadamard(const mx::array& x, mx::StreamOrDevice stream);

}  // namespace mlx_paged

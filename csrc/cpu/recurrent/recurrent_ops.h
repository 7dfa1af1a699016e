// Recurrent layers on CPUs: one node of the graph each, for chunks of prompts and for decodes.
// MLX's CPU backend needs several passes for each token or chunk.
// python/recurrent_bindings.cpp documents the ops.
#pragma once

#include "csrc/ops.h"

namespace mlx_paged {

// out [B, T, H, V] and the state after the last token.
Arrays gated_delta(const mx::array& q, const mx::array& k, const mx::array& v,
                   const mx::array& gates, const mx::array& betas, const OptionalArray& state,
                   const OptionalArray& mask, mx::StreamOrDevice stream);

// out [B, T, H, D] and the state after the last token.
Arrays state_space_scan(const mx::array& x, const mx::array& a_log, const mx::array& b,
                        const mx::array& c, const mx::array& d, const mx::array& dt,
                        const mx::array& dt_bias, const OptionalArray& state,
                        const OptionalArray& mask, float least, float most,
                        mx::StreamOrDevice stream);

// out [B, T, D] and the state after the last token.
Arrays selective_scan(const mx::array& x, const mx::array& a_log, const mx::array& b,
                      const mx::array& c, const mx::array& d, const mx::array& dt,
                      const OptionalArray& state, mx::StreamOrDevice stream);

// out [B, T - K + 1, C]
mx::array depthwise_convolution(const mx::array& x, const mx::array& weight,
                                const OptionalArray& bias, mx::StreamOrDevice stream);

}  // namespace mlx_paged

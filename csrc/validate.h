// Checks of the ops' arguments. A mistake throws std::invalid_argument; the message names the op,
// the argument, its value and the values that are allowed.
#pragma once

#include "csrc/ops.h"

namespace mlx_paged {

void check_attention(const AttentionInputs& inputs, const AttentionOptions& options);

void check_write(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                 const mx::array& v_cache, const mx::array& slot_mapping);

void check_copy(const mx::array& k_cache, const mx::array& v_cache, const mx::array& block_pairs);

// Throws unless the dtype is float32, float16 or bfloat16. GPUs have no float64, and attention in
// mx.fast refuses it too.
void check_floating(const char* op, const char* argument, const mx::array& a);

}  // namespace mlx_paged

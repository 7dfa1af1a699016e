// Checks of the ops' arguments. A mistake throws std::invalid_argument naming the op, the argument,
// what was given and what would do.
#pragma once

#include <string>

#include "csrc/paged_attention.h"
#include "mlx/array.h"

namespace mlx_paged {

void check_attention(const AttentionInputs& inputs, const AttentionConfig& config);

void check_write(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                 const mx::array& v_cache, const mx::array& slot_mapping);

void check_copy(const mx::array& k_cache, const mx::array& v_cache, const mx::array& block_pairs);

// The pool's strides are known only once it is evaluated, so primitives call this, not the ops:
// throws std::runtime_error unless the last axis is dense and, if `writable`, no element is shared
// by two indices of a broadcast view.
void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable);

}  // namespace mlx_paged

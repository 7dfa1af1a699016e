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

// Throws unless the last axis is dense and, if `writable`, no element is shared by two indices of a
// broadcast view. It is content with a pool whose memory is not known yet (pool_memory.h).
void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable);

// The same of keys and values; if `writable`, throws too if they share memory, so that one's rows
// would be written over the other's. Ops call this, and primitives call it again when they are
// evaluated: the memory of all pools is known then.
void check_pool_memory(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                       bool writable);

}  // namespace mlx_paged

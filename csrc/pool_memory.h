// Checks of a pool's memory.
#pragma once

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

// Throws std::invalid_argument unless the last axis is dense and, if `writable`, no two indices
// share an element (as they do in a broadcast view). Accepts a pool whose memory is not known yet.
void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable);

// Checks the layout of keys and values. If `writable`, also throws if the rows of both overlap. Ops
// call this, and primitives call it again when they are evaluated: then the memory of all pools is
// known.
void check_pool_memory(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                       bool writable);

}  // namespace mlx_paged

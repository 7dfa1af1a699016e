// Checks of the ops' arguments and of a pool's memory. A mistake throws std::invalid_argument in
// the form "[op] argument is X: expected Y".
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "csrc/ops.h"

namespace mlx_paged {

// A part of a message; a shape is in Python's notation.
template <typename Part>
const Part& printable(const Part& part) {
  return part;
}
std::string printable(const mx::Shape& shape);

template <typename Error = std::invalid_argument, typename... Parts>
[[noreturn]] void fail(std::string_view op, const Parts&... parts) {
  std::ostringstream message;
  message << "[" << op << "] ";
  (message << ... << printable(parts));
  throw Error(message.str());
}

template <typename... Parts>
void require(bool condition, std::string_view op, const Parts&... parts) {
  if (!condition) {
    fail(op, parts...);
  }
}

// `check_values` also checks the values of tables, lengths and cu_seqlens that are evaluated.
void check_attention(const AttentionInputs& inputs, const AttentionOptions& options,
                     bool check_values);

// K or V [T, H_kv, D] as it is; [B, H_kv, N, D], where B or N is 1, as a view of such rows. The
// array has memory.
mx::array token_rows(const mx::array& a);

// The inputs of the primitive: those given, in this order. Rows as a quantized pool has them become
// contiguous.
Arrays write_inputs(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                    const mx::array& v_cache, const mx::array& slot_mapping,
                    const OptionalArray& k_scales, const OptionalArray& v_scales,
                    mx::StreamOrDevice stream = {});

void check_copy(const mx::array& k_cache, const mx::array& v_cache, const mx::array& block_pairs);

// Throws unless the dtype is float32, float16 or bfloat16. GPUs have no float64, and attention in
// mx.fast refuses it too.
void check_floating(const char* op, const char* argument, const mx::array& a);

// Throws unless the last axis is dense and, if `writable`, no two indices share an element (as they
// do in a broadcast view). Accepts a pool whose memory is not known yet.
void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable);

// Checks the layout of keys and values. If `writable`, also throws if the rows of both overlap. Ops
// call this, and primitives call it again when they are evaluated: then the memory of all pools is
// known.
void check_pool_memory(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                       bool writable);

}  // namespace mlx_paged

// Launch plans: one function for each op makes them from shapes, strides and options. No launch has
// an empty grid.
#pragma once

#include <string>
#include <vector>

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"

namespace mlx_paged {

// `inputs` are the evaluated inputs of the primitive: see AttentionCall.
LaunchPlans plan_attention(const std::vector<mx::array>& inputs, const AttentionConfig& config);

// The most query rows that share a threadgroup.
constexpr int kMaxSharedRows = 4;

// Inputs k, v, k_cache, v_cache, slot_mapping; outputs the caches.
LaunchPlans plan_write_kv(const std::vector<mx::array>& inputs);

// Inputs k_cache, v_cache, block_pairs; outputs the caches.
LaunchPlans plan_copy_blocks(const std::vector<mx::array>& inputs);

// Why the Metal kernels do not support these head dimensions; empty if they do.
std::string unsupported_on_metal(int head_dim, int value_dim);

// The source of a launch's library: the headers of metal/, the file of its kernel and one
// instantiation.
std::string library_source(const LaunchPlan& plan);

// The name of that library in MLX's cache, which compares names only.
std::string library_name(const LaunchPlan& plan);

}  // namespace mlx_paged

// One function an op: shapes, strides and options to launches. No launch has an empty grid.
#pragma once

#include <string>
#include <vector>

#include "csrc/metal/launch_plan.h"
#include "csrc/paged_attention.h"
#include "mlx/array.h"

namespace mlx_paged {

// `inputs` are the primitive's, evaluated: see unflatten_inputs.
LaunchPlans plan_attention(const std::vector<mx::array>& inputs, const AttentionConfig& config);

// Query rows that share a threadgroup at most.
constexpr int kMostRows = 4;

// Inputs k, v, k_cache, v_cache, slot_mapping; outputs the caches.
LaunchPlans plan_write_kv(const std::vector<mx::array>& inputs);

// Inputs k_cache, v_cache, block_pairs; outputs the caches.
LaunchPlans plan_copy_blocks(const std::vector<mx::array>& inputs);

// Why the Metal kernels cannot take a pool with these head dimensions; empty if they can.
std::string unsupported_on_metal(int head_dim, int value_dim);

// The source of a launch's library: the headers of metal/, the file of its kernel and the one
// instantiation.
std::string library_source(const LaunchPlan& plan);

// A name for that source; MLX's cache of libraries knows them by name only.
std::string library_name(const LaunchPlan& plan);

}  // namespace mlx_paged

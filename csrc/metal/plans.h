// Launch plans: one function for each op makes them from shapes, strides and options, and `encode`
// encodes them on MLX's Metal stream. No launch has an empty grid. A plan with a pipeline that the
// compiler has refused is replaced by the simplest form of its kernels (refused_pipelines.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"

namespace mlx_paged {

// `inputs` are the evaluated inputs of the primitive: see AttentionCall.
LaunchPlans plan_attention(const Arrays& inputs, const AttentionConfig& config);

constexpr int kMaxSharedRows = 4;  // query rows that share a threadgroup at most

// Inputs k, v, k_cache, v_cache, slot_mapping; outputs the caches.
LaunchPlans plan_write_kv(const Arrays& inputs);

// Inputs k_cache, v_cache, block_pairs; outputs the caches.
LaunchPlans plan_copy_blocks(const Arrays& inputs);

// Why the Metal kernels do not support these head dimensions; empty if they do.
std::string unsupported_on_metal(int head_dim, int value_dim);

// Whether the kernel for many query rows computes such a pool, if queries have its dtype.
bool has_matrix_kernel(mx::Dtype dtype, int head_dim, int value_dim);

// The source of a launch's library: the headers of metal/, the file of its kernel and one
// instantiation.
std::string library_source(const LaunchPlan& plan);

// The name of that library in MLX's cache, which compares names only.
std::string library_name(const LaunchPlan& plan);

// Encodes the launches of one op on its stream. The outputs must have buffers.
void encode(const LaunchPlans& plans, const Arrays& inputs, Arrays& outputs, mx::Stream stream);

// Makes every later write to the pool wait for the next read that this op encodes.
void register_pool_read(const mx::array& pool, mx::Stream stream);

// Keeps an array's memory until the stream has computed what was encoded so far, and the rest of
// the primitive that is being encoded.
void keep_until_computed(const mx::array& array, mx::Stream stream);

// Compiles a launch's pipeline, unless MLX has it. Returns the compiler's message if it refuses the
// pipeline or its threadgroup, else nothing.
std::string refusal(const LaunchPlan& plan);

// Commits what a stream was given so far. The function that is returned waits until the completion
// handlers of these command buffers have run, and throws the error of one that failed: a GPU
// signals MLX's events before, so arrays that MLX calls available may hold anything. Both belong to
// the stream's thread. Empty where no GPU of Apple computes the stream.
std::function<void()> end_of_work(mx::Stream stream);

// Command buffers in which `encode` has encoded something since the process began.
size_t num_command_buffers();

// Whether this build can encode launches.
bool has_metal();

}  // namespace mlx_paged

// What the launches of the attention kernels share. metal/attention.h is the kernels' side of it.
#pragma once

#include <vector>

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"
#include "metal/params.h"

namespace mlx_paged {

constexpr int kLanes = 32;  // of a simdgroup

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How the query rows and the keys of a call are divided among threadgroups.
struct AttentionGeometry {
  int head_slots;  // KV heads; with a mapping, query heads
  int group;       // query heads of a slot
  int rows;        // of a threadgroup
  int row_tiles;
  int num_splits;
  int keys_per_split;
};

// Indices 0 to 13 of metal/attention.h.
std::vector<FunctionConstant> attention_constants(const AttentionInputs& in,
                                                  const AttentionOptions& options, bool split);

AttentionParams attention_params(const AttentionInputs& in, const AttentionOptions& options,
                                 const AttentionGeometry& g);

// Binds the optional inputs, which follow the five that every call has, at indices 9 to 14.
void bind_optional(const AttentionInputs& in, LaunchPlan& plan);

// The merge of the splits of each row: scratch buffer 0 has their outputs, 1 their maxima and sums.
LaunchPlan merge_plan(const AttentionInputs& in, const AttentionGeometry& g);

}  // namespace mlx_paged

// What the launches of the attention kernels share. metal/attention.h is the kernels' side of it.
#pragma once

#include <vector>

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"
#include "metal/params.h"

namespace mlx_paged {

constexpr int kLanes = 32;  // of a simdgroup
constexpr int kMaxSplits = 64;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How the keys of every sequence are divided among threadgroups.
struct Splits {
  int count;
  int keys;  // of a split
};

// How the query rows and the keys of a call are divided among threadgroups.
struct AttentionGeometry {
  int head_slots;  // KV heads; with a mapping, query heads
  int group;       // query heads of a slot
  int rows;        // of a threadgroup
  int row_tiles;
  Splits splits;
};

// Depends on shapes and options alone, so equal calls have equal results on every machine. A
// threadgroup whose split has no key that its rows see leaves at once, and stores nothing.
Splits split_keys(const AttentionInputs& in, const AttentionOptions& options,
                  int most_splits = kMaxSplits);

// Indices 0 to 13 and 18, of metal/pool_rows.h and metal/attention.h.
std::vector<FunctionConstant> attention_constants(const AttentionInputs& in,
                                                  const AttentionOptions& options, bool split);

AttentionParams attention_params(const AttentionInputs& in, const AttentionOptions& options,
                                 const AttentionGeometry& g);

// Binds inputs at indices 0 to 4 and 9 to 18, the output at 6 or, if the keys are split, the
// partial results at 7 and 8.
void bind_attention(const AttentionInputs& in, bool split, LaunchPlan& plan);

// The launches, and the merge of the splits of each row if there are several: scratch buffer 0 has
// their outputs, 1 their maxima and sums.
LaunchPlans with_merge(std::vector<LaunchPlan> launches, const AttentionInputs& in,
                       const AttentionOptions& options, const Splits& splits);

}  // namespace mlx_paged

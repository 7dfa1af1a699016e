// What the launches of the attention kernels share. metal/attention.h is the kernels' side of it.
#pragma once

#include <vector>

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"

namespace mlx_paged {

constexpr int kMaxSplits = 64;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How the keys of every sequence are divided among threadgroups.
struct Splits {
  int count;
  int keys;             // of a split
  int stored = count;   // partial results that a row has room for
  int shared_keys = 0;  // of a split of the keys that sequences share, if any may
};

// How the query rows and the keys of a call are divided among threadgroups.
struct AttentionGeometry {
  bool by_matrices;  // which kernel: metal/matrix_attention.metal or metal/paged_attention.metal
  int head_slots;    // KV heads; with a mapping, query heads
  int group;         // query heads of a slot
  int rows;          // of a threadgroup
  int row_tiles;
  Splits splits;
  bool of_shared = false;  // whether it computes shared keys, or each sequence's own ones
  int simdgroups = 4;      // of a threadgroup; by matrices always so many
};

// Splits for whose results there is memory.
int affordable_splits(const AttentionInputs& in);

// Depends on shapes and options alone, so equal calls have equal results on every machine:
// `num_tokens` are the most of a sequence, `threadgroups` those of a split. A window has splits for
// the keys that it leaves, wherever these are. A threadgroup whose split has no key that its rows
// see leaves at once, and stores nothing. `has_steps`: a threadgroup takes its keys in steps that
// wait for each other.
Splits split_keys(const AttentionInputs& in, const AttentionOptions& options, int num_tokens,
                  int threadgroups, int most_splits = kMaxSplits, bool has_steps = false);

// A launch of either kernel. By matrices it computes the sequences of a ragged batch from
// num_decodes on, and zeros for the tokens after the last one.
LaunchPlan attention_launch(const AttentionInputs& in, const AttentionOptions& options,
                            const AttentionGeometry& g);

// The launches, and the merge of the splits of each row if there are several: scratch buffer 0 has
// their outputs, 1 their maxima and sums. In a ragged batch `chunks` are the splits of its chunks.
LaunchPlans with_merge(std::vector<LaunchPlan> launches, const AttentionInputs& in,
                       const AttentionOptions& options, const Splits& splits, const Splits& chunks);

}  // namespace mlx_paged

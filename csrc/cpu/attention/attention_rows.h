// From arrays to the kernel's row tiles and back.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cpu/attention/attention_kernel.h"

namespace mlx_paged::cpu {

struct KeyRange {
  int32_t begin;
  int32_t end;
};

// Query heads by the KV head they read.
struct HeadGroups {
  std::vector<int32_t> heads;   // sorted by KV head
  std::vector<int32_t> starts;  // of KV head g's in `heads`; the last group, H_kv, reads none

  void assign(const AttentionArgs& args);
  int32_t size(int32_t kv_head) const { return starts[kv_head + 1] - starts[kv_head]; }
};

// Which rows one tile has: rows [begin, begin + count) of its sequence and KV head, counted over
// tokens, then over the heads of the group.
struct RowSpan {
  int32_t batch;
  int32_t kv_head;
  int32_t begin;
  int32_t count;
};

// Keys that any row of the span sees.
KeyRange visible_keys(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span);

// Fills `tile` for the span and writes its queries, rotated and scaled, to q [count, D].
void load_rows(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span, float* q,
               RowTile& tile);

// Folds `from` into `into`. Folding the parts of a context in order gives its state.
void merge(const SoftmaxState& into, const SoftmaxState& from, int32_t num_rows);

// Writes the rows' outputs and, if asked for, their softmax weights, of which the kernel has left
// the scores of `keys`.
void store_rows(const AttentionArgs& args, const RowTile& tile, KeyRange keys,
                const SoftmaxState& state);

}  // namespace mlx_paged::cpu

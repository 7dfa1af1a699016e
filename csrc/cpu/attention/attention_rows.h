// Conversion between arrays and the kernel's row tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cpu/attention/attention_kernel.h"

namespace mlx_paged::cpu {

struct KeyRange {
  int32_t begin;
  int32_t end;
};

// The tokens of one sequence on axis L.
struct TokenRange {
  int32_t first;
  int32_t count;
};

// Lies within axis L, whatever cu_seqlens holds.
TokenRange tokens_of(const AttentionArgs& args, int32_t batch);

// Query heads, grouped by their KV head.
struct HeadGroups {
  std::vector<int32_t> heads;   // sorted by KV head
  std::vector<int32_t> starts;  // where each KV head's group starts; group H_kv has no KV head

  void assign(const AttentionArgs& args);
  int32_t size(int32_t kv_head) const { return starts[kv_head + 1] - starts[kv_head]; }
};

// The rows of one tile: rows [begin, begin + count) of its sequence and KV head. Row number =
// token * heads of the group + head within the group.
struct RowSpan {
  int32_t batch;
  int32_t kv_head;
  int32_t begin;
  int32_t count;
};

// The smallest range that contains every key that a row of the span sees.
KeyRange visible_keys(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span);

// A tile without rows. Their queries, rotated and scaled, go to q [count, D padded].
RowTile empty_tile(const AttentionArgs& args, const RowSpan& span, float* q);

// Adds the rows of a span to a tile, and its queries.
void add_rows(const AttentionArgs& args, const HeadGroups& groups, const RowSpan& span,
              RowTile& tile);

// The rows from `first` on of a tile of several sequences, those of `span`, as a tile of their own.
RowTile rows_of(const RowTile& tile, const RowSpan& span, int32_t first);

// Copies rows [first, first + count) of a state to the first rows of another one.
void copy_rows(const SoftmaxState& to, const SoftmaxState& from, int32_t first, int32_t count);

// Merges `from` into `into`. Merging the splits of a context in order gives its state.
void merge(const SoftmaxState& into, const SoftmaxState& from, int32_t num_rows);

// Writes the outputs of the rows. If the call returns weights, turns the scores of `keys`, which
// the kernel wrote, into softmax weights.
void store_rows(const AttentionArgs& args, const RowTile& tile, KeyRange keys,
                const SoftmaxState& state);

}  // namespace mlx_paged::cpu

// How one call is divided into work items, and where these store their intermediate results.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "csrc/cpu/attention/attention_rows.h"

namespace mlx_paged::cpu {

// A context is split at multiples of this position and the parts are merged in order. Neither
// depends on the batch or on the number of threads, so no result does.
inline constexpr int32_t kSplitKeys = 8 * kKeyTile;

// Rows that share a pass over their KV head, and the keys that at least one of them sees.
struct PlannedTile {
  RowSpan span;
  KeyRange keys;
  bool fold;              // one thread computes all splits, one after the other
  int64_t partials;       // otherwise the offset of the states of its splits
  int32_t leader;         // the first of the tiles in its item
  int32_t num_followers;  // of a leader
  int32_t num_shared;     // so many of its first splits are computed with those of other sequences

  int32_t first_split() const { return keys.begin / kSplitKeys; }
  int32_t num_splits() const {
    return std::max(1, (keys.end + kSplitKeys - 1) / kSplitKeys - first_split());
  }
  int32_t num_items() const { return fold ? 1 : num_splits(); }
  KeyRange split(int32_t i) const {
    const int32_t begin = (first_split() + i) * kSplitKeys;
    return {std::max(begin, keys.begin), std::min(begin + kSplitKeys, keys.end)};
  }
};

inline constexpr int32_t kAllSplits = -1;

// The most tiles of one item: queries, states and keys fit in the second-level cache.
inline constexpr int64_t kMaxTiles = 16;

// A split of tiles of several sequences, which have its first keys in the same blocks.
struct SharedSplit {
  int32_t split;   // of the positions: it begins at split * kSplitKeys
  KeyRange keys;   // that all of the sequences have, up to a whole key tile
  int32_t member;  // its tiles are members [member, member + num_members)
  int32_t num_members;
};

// A unit of work for one thread: tiles [tile, tile + num_tiles) of one sequence and the same keys.
struct WorkItem {
  int32_t tile;
  int32_t num_tiles;
  int32_t split;  // or kAllSplits
};

// The start of the first cache line at or after `memory`: at most 15 elements later.
inline float* aligned(float* memory) {
  const auto at = reinterpret_cast<uintptr_t>(memory) / sizeof(float);
  return memory + (padded(static_cast<int32_t>(at % 16)) - at % 16);
}

// Size of a SoftmaxState in floats. It and its parts are multiples of a cache line.
inline int64_t state_floats(int32_t num_rows, int32_t o_stride) {
  return 2 * padded(num_rows) + int64_t{num_rows} * o_stride;
}

inline SoftmaxState state_at(float* memory, int32_t num_rows, int32_t o_stride) {
  return {memory, memory + padded(num_rows), memory + 2 * padded(num_rows), o_stride};
}

// The vectors keep their capacity from call to call.
class AttentionPlan {
 public:
  void assign(const AttentionArgs& args);

  const HeadGroups& groups() const { return groups_; }
  const std::vector<SharedSplit>& shared() const { return shared_; }
  std::span<const int32_t> members(const SharedSplit& shared) const {
    return {&members_[shared.member], static_cast<size_t>(shared.num_members)};
  }
  const std::vector<WorkItem>& items() const { return items_; }
  const PlannedTile& tile(int32_t i) const { return tiles_[i]; }
  int64_t multiply_adds() const { return multiply_adds_; }

  // The state of one split of a tile.
  SoftmaxState partial(int32_t tile, int32_t split);

  // Marks one split as done: of all tiles that are computed with this one, or of one of them if the
  // split is shared. Returns true if it was the last: then the states of the other splits are
  // visible to this thread.
  bool finish_split(int32_t tile);

 private:
  void add_tiles(const AttentionArgs& args);
  void share_splits(const AttentionArgs& args);
  void share(int32_t split, int32_t common, std::span<const int32_t> firsts, int32_t num_heads,
             int32_t most_rows);
  void end_members(int32_t split, int32_t common, int32_t begin);
  void place_partials();
  void add_items();
  int32_t tiles_together(int32_t first, int64_t max_tiles) const;

  HeadGroups groups_;
  std::vector<PlannedTile> tiles_;
  std::vector<SharedSplit> shared_;
  std::vector<int32_t> members_;  // tiles
  std::vector<WorkItem> items_;
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int32_t>[]> splits_left_;  // index: a leader
  size_t num_counters_ = 0;
  int32_t o_stride_ = 0;
  int64_t multiply_adds_ = 0;
};

}  // namespace mlx_paged::cpu

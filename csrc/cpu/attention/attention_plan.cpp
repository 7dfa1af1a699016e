#include "csrc/cpu/attention/attention_plan.h"

#include "csrc/cpu/thread_pool.h"

namespace mlx_paged::cpu {

namespace {

// 8 MiB. If the partial states of a call need more, tiles are folded: first those of many rows, so
// that a long prompt does not keep the splits of a decode from the other threads. The result is the
// same.
constexpr int64_t kMaxPartialFloats = 1 << 21;

// With this many items for each thread, no thread is idle for long at the end.
constexpr int64_t kItemsPerThread = 4;

// The most tiles of one item: queries, states and keys fit in the second-level cache.
constexpr int64_t kMaxTiles = 16;

}  // namespace

void AttentionPlan::assign(const AttentionArgs& args) {
  o_stride_ = padded(args.value_dim);
  groups_.assign(args);
  add_tiles(args);
  place_partials();
  add_items();
}

void AttentionPlan::add_tiles(const AttentionArgs& args) {
  tiles_.clear();
  multiply_adds_ = 0;
  for (int32_t batch = 0; batch < args.batch; ++batch) {
    const int32_t num_tokens = tokens_of(args, batch).count;
    for (int32_t kv_head = 0; kv_head <= args.num_kv_heads; ++kv_head) {
      const int32_t num_rows = groups_.size(kv_head) * num_tokens;
      for (int32_t begin = 0; begin < num_rows; begin += kMaxRows) {
        const RowSpan span = {batch, kv_head, begin, std::min(kMaxRows, num_rows - begin)};
        const KeyRange keys = visible_keys(args, groups_, span);
        tiles_.push_back({span, keys, false, 0});
        multiply_adds_ +=
            int64_t{keys.end - keys.begin} * span.count * (args.head_dim + args.value_dim);
      }
    }
  }
}

void AttentionPlan::place_partials() {
  int64_t num_floats = 0;
  for (const bool many_rows : {false, true}) {
    const int64_t before = num_floats;
    for (PlannedTile& tile : tiles_) {
      if ((tile.span.count >= kPackedRows) == many_rows) {
        tile.partials = num_floats;
        num_floats += tile.num_splits() > 1
                          ? tile.num_splits() * state_floats(tile.span.count, o_stride_)
                          : 0;
      }
    }
    if (num_floats > kMaxPartialFloats) {
      num_floats = before;
      for (PlannedTile& tile : tiles_) {
        tile.fold |= (tile.span.count >= kPackedRows) == many_rows;
      }
    }
  }
  if (static_cast<int64_t>(partials_.size()) < num_floats + 15) {
    partials_.resize(num_floats + 15);
  }
}

void AttentionPlan::add_items() {
  if (num_counters_ < tiles_.size()) {
    num_counters_ = tiles_.size();
    splits_left_ = std::make_unique<std::atomic<int32_t>[]>(num_counters_);
  }

  int64_t num_items = 0;
  for (const PlannedTile& tile : tiles_) {
    num_items += tile.num_items();
  }
  const int64_t max_tiles =
      std::clamp<int64_t>(num_items / (kItemsPerThread * num_threads()), 1, kMaxTiles);
  items_.clear();
  for (int32_t first = 0; first < static_cast<int32_t>(tiles_.size());) {
    const int32_t count = tiles_together(first, max_tiles);
    const int32_t splits = tiles_[first].num_items();
    splits_left_[first].store(splits, std::memory_order_relaxed);
    if (splits == 1) {
      items_.push_back({first, count, kAllSplits});
    } else {
      for (int32_t split = 0; split < splits; ++split) {
        items_.push_back({first, count, split});
      }
    }
    first += count;
  }
}

// How many tiles, starting with `first`, share an item. Results do not depend on it.
int32_t AttentionPlan::tiles_together(int32_t first, int64_t max_tiles) const {
  const PlannedTile& head = tiles_[first];
  const auto fits = [&](const PlannedTile& tile) {
    return tile.span.batch == head.span.batch && tile.span.count < kPackedRows &&
           tile.keys.begin == head.keys.begin && tile.keys.end == head.keys.end;
  };
  int32_t end = first + 1;
  while (end < static_cast<int32_t>(tiles_.size()) && end - first < max_tiles && fits(head) &&
         fits(tiles_[end])) {
    ++end;
  }
  return end - first;
}

SoftmaxState AttentionPlan::partial(int32_t tile, int32_t split) {
  const int32_t num_rows = tiles_[tile].span.count;
  const int64_t offset = tiles_[tile].partials + split * state_floats(num_rows, o_stride_);
  return state_at(aligned(partials_.data()) + offset, num_rows, o_stride_);
}

bool AttentionPlan::finish_split(const WorkItem& item) {
  return splits_left_[item.tile].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

}  // namespace mlx_paged::cpu

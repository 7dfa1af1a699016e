#include "csrc/cpu/attention_plan.h"

namespace mlx_paged::cpu {

namespace {

// 8 MiB. A call that would need more for its partial states gives each tile to one thread, which
// folds the splits one after the other, with the same result.
constexpr int64_t kMaxPartialFloats = 1 << 21;

}  // namespace

void Plan::assign(const AttentionArgs& args) {
  o_stride_ = padded(args.value_dim);
  groups_.assign(args);
  add_tiles(args);
  add_items();
}

void Plan::add_tiles(const AttentionArgs& args) {
  tiles_.clear();
  multiply_adds_ = 0;
  for (int32_t batch = 0; batch < args.batch; ++batch) {
    for (int32_t kv_head = 0; kv_head <= args.num_kv_heads; ++kv_head) {
      const int32_t num_rows = groups_.size(kv_head) * args.num_tokens;
      for (int32_t begin = 0; begin < num_rows; begin += kMaxRows) {
        const RowSpan span = {batch, kv_head, begin, std::min(kMaxRows, num_rows - begin)};
        const KeyRange keys = visible_keys(args, groups_, span);
        tiles_.push_back({span, keys, 0});
        multiply_adds_ +=
            int64_t{keys.end - keys.begin} * span.count * (args.head_dim + args.value_dim);
      }
    }
  }
}

void Plan::add_items() {
  int64_t num_floats = 0;
  for (PlannedTile& tile : tiles_) {
    tile.partials = num_floats;
    if (tile.num_splits() > 1) {
      num_floats += tile.num_splits() * state_floats(tile.span.count, o_stride_);
    }
  }
  const bool fold = num_floats > kMaxPartialFloats;
  if (!fold && static_cast<int64_t>(partials_.size()) < num_floats) {
    partials_.resize(num_floats);
  }
  if (num_counters_ < tiles_.size()) {
    num_counters_ = tiles_.size();
    splits_left_ = std::make_unique<std::atomic<int32_t>[]>(num_counters_);
  }

  items_.clear();
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const auto tile = static_cast<int32_t>(i);
    const int32_t num_splits = tiles_[i].num_splits();
    splits_left_[i].store(num_splits, std::memory_order_relaxed);
    if (fold || num_splits == 1) {
      items_.push_back({tile, kAllSplits});
      continue;
    }
    for (int32_t split = 0; split < num_splits; ++split) {
      items_.push_back({tile, split});
    }
  }
}

SoftmaxState Plan::partial(const WorkItem& item, int32_t split) {
  const PlannedTile& tile = tiles_[item.tile];
  const int64_t offset = tile.partials + split * state_floats(tile.span.count, o_stride_);
  return state_at(partials_.data() + offset, tile.span.count, o_stride_);
}

bool Plan::finish_split(const WorkItem& item) {
  return splits_left_[item.tile].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

}  // namespace mlx_paged::cpu

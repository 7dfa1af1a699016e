#include "csrc/cpu/attention/attention_plan.h"

#include "csrc/cpu/thread_pool.h"

namespace mlx_paged::cpu {

namespace {

// 8 MiB. If the partial states of a call need more, tiles are folded: first those of many rows, so
// that a long prompt does not keep the splits of a decode from the other threads. The result is the
// same.
constexpr int64_t kMaxPartialFloats = 1 << 21;

// The same where sequences share splits: 64 MiB. Folded tiles share nothing.
constexpr int64_t kMaxSharedFloats = 1 << 24;

// Fewer keys of a split than this are not worth computing together.
constexpr int32_t kMinShared = 2 * kKeyTile;

// With this many items for each thread, no thread is idle for long at the end.
constexpr int64_t kItemsPerThread = 4;

}  // namespace

void AttentionPlan::assign(const AttentionArgs& args) {
  o_stride_ = padded(args.value_dim);
  groups_.assign(args);
  add_tiles(args);
  share_splits(args);
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
        tiles_.push_back({span, keys, false, 0, 0, 0, 0});
        multiply_adds_ +=
            int64_t{keys.end - keys.begin} * span.count * (args.head_dim + args.value_dim);
      }
    }
  }
}

// Sequences that are neighbours in the order of shared_prefixes share a split if its first keys are
// in the same blocks. Only those share whose heads have one tile of few rows each.
void AttentionPlan::share_splits(const AttentionArgs& args) {
  shared_.clear();
  members_.clear();
  if (!args.shared_prefixes.data) {
    return;
  }
  std::vector<int32_t> firsts(args.batch, -1);  // of a sequence's tiles; -1: it shares none
  int32_t last = 0;
  for (int32_t t = 0; t + args.num_kv_heads <= static_cast<int32_t>(tiles_.size()); ++t) {
    const RowSpan& span = tiles_[t].span;
    const RowSpan& end = tiles_[t + args.num_kv_heads - 1].span;
    if (span.kv_head == 0 && end.batch == span.batch && end.kv_head == args.num_kv_heads - 1 &&
        span.count < kPackedRows) {
      firsts[span.batch] = t;
      last = std::max(last, tiles_[t].keys.end);
    }
  }
  const auto entry = [&args](int32_t row, int32_t i) {
    const auto& [data, strides] = args.shared_prefixes;
    return data[row * strides[0] + i * strides[1]];
  };
  // Many rows of a quantized pool would give other bits than few.
  const int32_t most_rows = args.k_scales.data ? kPackedRows - 1 : kMaxRows;
  std::vector<int32_t> run;
  for (int32_t begin = 0; begin + kMinShared <= last; begin += kSplitKeys) {
    int32_t common = 0;
    const auto end_run = [&] {
      share(begin / kSplitKeys, common, run, args.num_kv_heads, most_rows);
      run.clear();
    };
    for (int32_t i = 0; i < args.batch; ++i) {
      const int32_t sequence = entry(0, i);
      const bool exists = sequence >= 0 && sequence < args.batch && firsts[sequence] >= 0;
      const KeyRange keys = exists ? tiles_[firsts[sequence]].keys : KeyRange{0, 0};
      const int32_t seen = std::min(begin + kSplitKeys, keys.end) / kKeyTile * kKeyTile;
      const int32_t same = std::min(seen, entry(1, i) / kKeyTile * kKeyTile);
      if (same < begin + kMinShared) {
        end_run();
      }
      common = run.empty() ? seen : std::min(common, same);
      if (seen >= begin + kMinShared && keys.begin < begin + kSplitKeys) {
        run.push_back(firsts[sequence]);
      }
    }
    end_run();
  }
}

// Lets sequences, of which `firsts` are the first tiles, share a split, in parts that have about as
// many rows each. A tile that is alone in one split is so in all later ones.
void AttentionPlan::share(int32_t split, int32_t common, std::span<const int32_t> firsts,
                          int32_t num_heads, int32_t most_rows) {
  for (int32_t head = 0; head < num_heads; ++head) {
    int32_t num_rows = 0, longest = 0;
    for (const int32_t first : firsts) {
      num_rows += tiles_[first + head].span.count;
      longest = std::max(longest, tiles_[first + head].span.count);
    }
    const int32_t num_parts = std::max(1, (num_rows + most_rows - 1) / most_rows);
    const int32_t limit = std::min(most_rows, num_rows / num_parts + longest);
    auto begin = static_cast<int32_t>(members_.size());
    int32_t rows = 0;
    const auto end_part = [&] {
      end_members(split, common, begin);
      begin = static_cast<int32_t>(members_.size());
      rows = 0;
    };
    for (const int32_t first : firsts) {
      const PlannedTile& tile = tiles_[first + head];
      if (tile.first_split() + tile.num_shared < split) {
        continue;
      }
      if (rows + tile.span.count > limit) {
        end_part();
      }
      members_.push_back(first + head);
      rows += tile.span.count;
    }
    end_part();
  }
}

// Members from `begin` on share a split, if there are several.
void AttentionPlan::end_members(int32_t split, int32_t common, int32_t begin) {
  const int32_t num_members = static_cast<int32_t>(members_.size()) - begin;
  if (num_members < 2) {
    members_.resize(begin);
    return;
  }
  KeyRange keys = {common, common};
  for (int32_t i = begin; i < begin + num_members; ++i) {
    PlannedTile& tile = tiles_[members_[i]];
    ++tile.num_shared;
    keys.begin = std::min(keys.begin, std::max(split * kSplitKeys, tile.keys.begin));
  }
  shared_.push_back({split, keys, begin, num_members});
}

void AttentionPlan::place_partials() {
  const int64_t most = shared_.empty() ? kMaxPartialFloats : kMaxSharedFloats;
  int64_t num_floats = 0;
  for (const bool many_rows : {false, true}) {
    const int64_t before = num_floats;
    for (PlannedTile& tile : tiles_) {
      if ((tile.span.count >= kPackedRows) == many_rows) {
        tile.partials = num_floats;
        num_floats += tile.num_splits() > 1 || tile.num_shared > 0
                          ? tile.num_splits() * state_floats(tile.span.count, o_stride_)
                          : 0;
      }
    }
    if (num_floats > most) {
      num_floats = before;
      for (PlannedTile& tile : tiles_) {
        tile.fold |= (tile.span.count >= kPackedRows) == many_rows;
        tile.num_shared = 0;
      }
      shared_.clear();
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
    const int32_t splits = tiles_[first].num_items(), shared = tiles_[first].num_shared;
    splits_left_[first].store(splits - shared + count * shared, std::memory_order_relaxed);
    for (int32_t tile = first; tile < first + count; ++tile) {
      tiles_[tile].leader = first;
      tiles_[tile].num_followers = tile == first ? count - 1 : 0;
    }
    if (splits == 1 && shared == 0) {
      items_.push_back({first, count, kAllSplits});
    } else {
      for (int32_t split = shared; split < splits; ++split) {
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
           tile.keys.begin == head.keys.begin && tile.keys.end == head.keys.end &&
           tile.num_shared == head.num_shared;
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

bool AttentionPlan::finish_split(int32_t tile) {
  return splits_left_[tiles_[tile].leader].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

}  // namespace mlx_paged::cpu

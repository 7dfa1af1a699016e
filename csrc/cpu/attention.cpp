#include "csrc/cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/cpu/attention_rows.h"
#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"

namespace mlx_paged::cpu {

namespace {

// A context is split at multiples of this position and the parts are merged in order. Neither
// depends on the batch or on the number of threads, and so no result does.
constexpr int32_t kSplitKeys = 8 * kKeyTile;

// Beyond this, states of splits are folded one after the other by one thread.
constexpr int64_t kMaxPartialFloats = 1 << 21;

// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kMinParallelWork = 1 << 17;

// A row tile and the keys that its rows see.
struct Tile {
  RowSpan span;
  KeyRange keys;
  int64_t partials;  // offset of its splits' states, if it has more than one split

  int32_t first_split() const { return keys.begin / kSplitKeys; }
  int32_t num_splits() const {
    return std::max(1, (keys.end + kSplitKeys - 1) / kSplitKeys - first_split());
  }
  KeyRange split(int32_t i) const {
    const int32_t begin = (first_split() + i) * kSplitKeys;
    return {std::max(begin, keys.begin), std::min(begin + kSplitKeys, keys.end)};
  }
};

// One thread's unit of work: one split of a tile, or all of them.
struct Item {
  int32_t tile;
  int32_t split;  // kAllSplits
};
constexpr int32_t kAllSplits = -1;

int64_t state_floats(int32_t num_rows, int32_t o_stride) {
  return int64_t{num_rows} * (2 + o_stride);
}

SoftmaxState state_at(float* memory, int32_t num_rows, int32_t o_stride) {
  return {memory, memory + num_rows, memory + 2 * num_rows, o_stride};
}

// What one call does, in vectors that keep their capacity from call to call.
struct Plan {
  HeadGroups groups;
  std::vector<Tile> tiles;
  std::vector<Item> items;
  std::vector<float> partials;
  std::unique_ptr<std::atomic<int32_t>[]> counters;
  size_t num_counters = 0;
  int64_t work = 0;  // multiply-adds

  void assign(const AttentionArgs& args);

 private:
  void add_tiles(const AttentionArgs& args);
  void add_items(const AttentionArgs& args);
};

void Plan::assign(const AttentionArgs& args) {
  groups.assign(args);
  add_tiles(args);
  add_items(args);
}

void Plan::add_tiles(const AttentionArgs& args) {
  tiles.clear();
  work = 0;
  for (int32_t batch = 0; batch < args.batch; ++batch) {
    for (int32_t kv_head = 0; kv_head <= args.num_kv_heads; ++kv_head) {
      const int32_t num_rows = groups.size(kv_head) * args.num_tokens;
      for (int32_t begin = 0; begin < num_rows; begin += kMaxRows) {
        const RowSpan span = {batch, kv_head, begin, std::min(kMaxRows, num_rows - begin)};
        const KeyRange keys = visible_keys(args, groups, span);
        tiles.push_back({span, keys, 0});
        work += int64_t{keys.end - keys.begin} * span.count * (args.head_dim + args.value_dim);
      }
    }
  }
}

void Plan::add_items(const AttentionArgs& args) {
  const int32_t o_stride = padded(args.value_dim);
  int64_t num_floats = 0;
  for (Tile& tile : tiles) {
    if (tile.num_splits() > 1) {
      tile.partials = num_floats;
      num_floats += tile.num_splits() * state_floats(tile.span.count, o_stride);
    }
  }
  const bool one_thread = num_floats > kMaxPartialFloats;
  partials.resize(one_thread ? 0 : num_floats);

  items.clear();
  if (num_counters < tiles.size()) {
    num_counters = tiles.size();
    counters = std::make_unique<std::atomic<int32_t>[]>(num_counters);
  }
  for (size_t i = 0; i < tiles.size(); ++i) {
    const int32_t num_splits = tiles[i].num_splits();
    const auto index = static_cast<int32_t>(i);
    counters[i].store(num_splits, std::memory_order_relaxed);
    if (num_splits == 1 || one_thread) {
      items.push_back({index, kAllSplits});
      continue;
    }
    for (int32_t split = 0; split < num_splits; ++split) {
      items.push_back({index, split});
    }
  }
}

// One thread's buffers, grown as needed and kept.
struct Workspace {
  std::vector<float> memory;
  KernelScratch kernel;
  float* q;
  float* states[2];

  void reserve(const AttentionArgs& args) {
    const int64_t zeros = padded(std::max(args.head_dim, args.value_dim));
    const int64_t k_tile = int64_t{kKeyTile} * args.head_dim;
    const int64_t scores = kMaxRows * kKeyTile;
    const int64_t queries = int64_t{kMaxRows} * padded(args.head_dim);
    const int64_t state = padded(state_floats(kMaxRows, padded(args.value_dim)));
    const int64_t total = zeros + k_tile + scores + queries + 2 * state + 16;
    if (static_cast<int64_t>(memory.size()) < total) {
      memory.resize(total);
    }
    constexpr size_t kAlignment = 64;
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    float* next = memory.data() +
                  ((address + kAlignment - 1) / kAlignment * kAlignment - address) / sizeof(float);
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    float* zero_row = take(zeros);
    std::fill(zero_row, zero_row + zeros, 0.0f);
    kernel.zeros = zero_row;
    kernel.k_tile = take(k_tile);
    kernel.scores = take(scores);
    q = take(queries);
    states[0] = take(state);
    states[1] = take(state);
  }
};

// One call in progress.
class Run {
 public:
  Run(const AttentionArgs& args, Plan& plan)
      : args_(args), plan_(plan), attend_(active_kernel().attend) {}

  void item(int64_t i) const {
    const Item& item = plan_.items[i];
    thread_local Workspace workspace;
    workspace.reserve(args_);
    const Tile& tile = plan_.tiles[item.tile];
    RowTile rows;
    load_rows(args_, plan_.groups, tile.span, workspace.q, rows);
    if (item.split == kAllSplits) {
      all_splits(tile, rows, workspace);
    } else {
      one_split(tile, item, rows, workspace);
    }
  }

 private:
  void all_splits(const Tile& tile, const RowTile& rows, const Workspace& workspace) const {
    const int32_t o_stride = padded(args_.value_dim);
    const SoftmaxState total = state_at(workspace.states[0], rows.num_rows, o_stride);
    const SoftmaxState part = state_at(workspace.states[1], rows.num_rows, o_stride);
    attend(tile, 0, rows, workspace, total);
    for (int32_t split = 1; split < tile.num_splits(); ++split) {
      attend(tile, split, rows, workspace, part);
      merge(total, part, rows.num_rows);
    }
    store_rows(args_, rows, tile.keys, total);
  }

  // The thread that finishes a tile's last split merges them all.
  void one_split(const Tile& tile, const Item& item, const RowTile& rows,
                 const Workspace& workspace) const {
    attend(tile, item.split, rows, workspace, partial(tile, item.split));
    if (plan_.counters[item.tile].fetch_sub(1, std::memory_order_acq_rel) != 1) {
      return;
    }
    const SoftmaxState total = partial(tile, 0);
    for (int32_t split = 1; split < tile.num_splits(); ++split) {
      merge(total, partial(tile, split), rows.num_rows);
    }
    store_rows(args_, rows, tile.keys, total);
  }

  void attend(const Tile& tile, int32_t split, const RowTile& rows, const Workspace& workspace,
              const SoftmaxState& state) const {
    const KeyRange keys = tile.split(split);
    attend_(args_, rows, keys.begin, keys.end, workspace.kernel, state);
  }

  SoftmaxState partial(const Tile& tile, int32_t split) const {
    const int32_t o_stride = padded(args_.value_dim);
    const int64_t offset = tile.partials + split * state_floats(tile.span.count, o_stride);
    return state_at(plan_.partials.data() + offset, tile.span.count, o_stride);
  }

  const AttentionArgs& args_;
  Plan& plan_;
  AttendFunction attend_;
};

}  // namespace

void paged_attention(const AttentionArgs& args) {
  thread_local Plan plan;
  plan.assign(args);
  const Run run(args, plan);
  const auto body = [&run](int64_t i) { run.item(i); };
  const auto count = static_cast<int64_t>(plan.items.size());
  if (plan.work >= kMinParallelWork) {
    parallel_for(count, body);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    body(i);
  }
}

}  // namespace mlx_paged::cpu

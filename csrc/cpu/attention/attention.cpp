#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "csrc/cpu/attention/attention_plan.h"
#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"

namespace mlx_paged::cpu {

namespace {

// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kMinParallelWork = 1 << 19;

// The buffers of one thread. They grow as needed and are reused.
struct Workspace {
  KernelScratch kernel;
  std::vector<RowTile> tiles;
  std::vector<float*> q;  // of each tile, [num_rows, D padded]
  std::vector<SoftmaxState> total;
  std::vector<SoftmaxState> part;

  // Makes room for tiles of these numbers of rows.
  void reserve(const AttentionArgs& args, std::span<const int32_t> num_rows) {
    const int32_t o_stride = padded(args.value_dim);
    const int64_t zeros = padded(std::max(args.head_dim, args.value_dim));
    const int64_t scores = int64_t{kMaxRows} * kKeyTile;
    const int64_t packed = zeros * kKeyTile;
    int64_t rows = 0;
    for (const int32_t count : num_rows) {
      rows += padded(count);
    }
    const int64_t queries = rows * padded(args.head_dim);
    const int64_t size = 15 + zeros + scores + packed + queries + 2 * state_floats(rows, o_stride);
    if (static_cast<int64_t>(memory_.size()) < size) {
      memory_.resize(size);
    }
    float* next = aligned(memory_.data());
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    float* zero_row = take(zeros);
    std::fill(zero_row, zero_row + zeros, 0.0f);
    kernel.zeros = zero_row;
    kernel.scores = take(scores);
    kernel.packed = take(packed);

    const size_t num_tiles = num_rows.size();
    tiles.resize(num_tiles);
    q.resize(num_tiles);
    total.resize(num_tiles);
    part.resize(num_tiles);
    for (size_t t = 0; t < num_tiles; ++t) {
      const int32_t count = padded(num_rows[t]);
      q[t] = take(int64_t{count} * padded(args.head_dim));
      total[t] = state_at(take(state_floats(count, o_stride)), count, o_stride);
      part[t] = state_at(take(state_floats(count, o_stride)), count, o_stride);
    }
  }

 private:
  std::vector<float> memory_;
};

// One call in progress.
class AttentionRun {
 public:
  AttentionRun(const AttentionArgs& args, AttentionPlan& plan)
      : args_(args), plan_(plan), attend_(active_kernel().attend) {}

  void item(const WorkItem& item) const {
    thread_local Workspace space;
    load(space, item.tile, item.num_tiles);
    const PlannedTile& planned = plan_.tile(item.tile);
    if (item.split == kAllSplits) {
      all_splits(planned, space);
      return;
    }
    for (int32_t t = 0; t < item.num_tiles; ++t) {
      space.part[t] = plan_.partial(item.tile + t, item.split);
    }
    attend(space, planned.split(item.split), space.part);
    finish(item.tile);
  }

  // Computes the keys that are shared for all rows together, then each sequence's other keys.
  void shared(const SharedSplit& shared) const {
    thread_local Workspace space;
    const auto members = plan_.members(shared);
    int32_t num_rows = 0;
    for (const int32_t member : members) {
      num_rows += plan_.tile(member).span.count;
    }
    space.reserve(args_, {&num_rows, 1});
    RowTile& all = space.tiles[0];
    all = empty_tile(args_, plan_.tile(members[0]).span, space.q[0]);
    for (const int32_t member : members) {
      add_rows(args_, plan_.groups(), plan_.tile(member).span, all);
    }
    attend(space, shared.keys, space.part);
    int32_t row = 0;
    for (const int32_t member : members) {
      const PlannedTile& planned = plan_.tile(member);
      const int32_t split = shared.split - planned.first_split(), count = planned.span.count;
      const SoftmaxState own = plan_.partial(member, split);
      copy_rows(own, space.part[0], row, count);
      const KeyRange rest = {shared.keys.end, planned.split(split).end};
      if (rest.begin < rest.end) {
        const RowTile rows = rows_of(all, planned.span, row);
        attend_({args_, &rows, 1, rest.begin, rest.end, space.kernel, &own, true});
      }
      row += count;
      finish(member);
    }
  }

 private:
  // Rows and queries of neighbouring tiles.
  void load(Workspace& space, int32_t tile, int32_t num_tiles) const {
    int32_t num_rows[kMaxTiles];
    for (int32_t t = 0; t < num_tiles; ++t) {
      num_rows[t] = plan_.tile(tile + t).span.count;
    }
    space.reserve(args_, {num_rows, static_cast<size_t>(num_tiles)});
    for (int32_t t = 0; t < num_tiles; ++t) {
      const RowSpan& span = plan_.tile(tile + t).span;
      space.tiles[t] = empty_tile(args_, span, space.q[t]);
      add_rows(args_, plan_.groups(), span, space.tiles[t]);
    }
  }

  void all_splits(const PlannedTile& planned, Workspace& space) const {
    attend(space, planned.split(0), space.total);
    for (int32_t split = 1; split < planned.num_splits(); ++split) {
      attend(space, planned.split(split), space.part);
      for (size_t t = 0; t < space.tiles.size(); ++t) {
        merge(space.total[t], space.part[t], space.tiles[t].num_rows);
      }
    }
    for (size_t t = 0; t < space.tiles.size(); ++t) {
      store_rows(args_, space.tiles[t], planned.keys, space.total[t]);
    }
  }

  // Marks a split of a tile as done. The thread that finishes the last split of an item's tiles
  // merges them all, in order.
  void finish(int32_t tile) const {
    if (!plan_.finish_split(tile)) {
      return;
    }
    thread_local Workspace space;
    const int32_t leader = plan_.tile(tile).leader;
    load(space, leader, 1 + plan_.tile(leader).num_followers);
    for (size_t t = 0; t < space.tiles.size(); ++t) {
      const auto i = leader + static_cast<int32_t>(t);
      const SoftmaxState total = plan_.partial(i, 0);
      for (int32_t split = 1; split < plan_.tile(i).num_splits(); ++split) {
        merge(total, plan_.partial(i, split), space.tiles[t].num_rows);
      }
      store_rows(args_, space.tiles[t], plan_.tile(i).keys, total);
    }
  }

  void attend(const Workspace& space, KeyRange keys,
              const std::vector<SoftmaxState>& states) const {
    attend_({args_, space.tiles.data(), static_cast<int32_t>(space.tiles.size()), keys.begin,
             keys.end, space.kernel, states.data(), false});
  }

  const AttentionArgs& args_;
  AttentionPlan& plan_;
  Attend* attend_;
};

// Zeros for the tokens that belong to no sequence.
void clear_other_tokens(const AttentionArgs& args) {
  const int32_t* begin = args.cu_seqlens.data;
  if (begin && (begin[0] > 0 || begin[args.batch * args.cu_seqlens.strides[0]] < args.num_tokens)) {
    const int64_t size = args.q_dtype == DType::kFloat32 ? 4 : 2;
    std::memset(args.out, 0, args.num_tokens * args.out_strides[2] * size);
  }
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  clear_other_tokens(args);
  // One for each stream of MLX; the threads of the pool use it through `run`.
  thread_local AttentionPlan stream_plan;
  AttentionPlan& plan = stream_plan;
  plan.assign(args);
  const AttentionRun run(args, plan);
  const auto num_shared = static_cast<int64_t>(plan.shared().size());
  parallel_for(
      num_shared + static_cast<int64_t>(plan.items().size()),
      [&run, &plan, num_shared](int64_t i) {
        i < num_shared ? run.shared(plan.shared()[i]) : run.item(plan.items()[i - num_shared]);
      },
      plan.multiply_adds() >= kMinParallelWork);
}

}  // namespace mlx_paged::cpu

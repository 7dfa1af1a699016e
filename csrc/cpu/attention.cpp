#include "csrc/cpu/attention.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/cpu/attention_plan.h"
#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"

namespace mlx_paged::cpu {

namespace {

// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kMinParallelWork = 1 << 19;

// One thread's buffers, grown as needed and kept.
struct Workspace {
  KernelScratch kernel;
  float* q;
  SoftmaxState total;
  SoftmaxState part;

  void reserve(const AttentionArgs& args) {
    constexpr int64_t kAlignment = 16;  // floats, one cache line
    const int32_t o_stride = padded(args.value_dim);
    const int64_t zeros = padded(std::max(args.head_dim, args.value_dim));
    const int64_t queries = int64_t{kMaxRows} * padded(args.head_dim);
    const int64_t scores = int64_t{kMaxRows} * kKeyTile;
    const int64_t state = state_floats(kMaxRows, o_stride);
    const int64_t packed = zeros * kKeyTile;
    const int64_t size = kAlignment + zeros + queries + scores + packed + 2 * state;
    if (static_cast<int64_t>(memory_.size()) < size) {
      memory_.resize(size);
    }
    const auto misalignment = reinterpret_cast<uintptr_t>(memory_.data()) / sizeof(float);
    float* next = memory_.data() + (kAlignment - misalignment % kAlignment);
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    float* zero_row = take(zeros);
    std::fill(zero_row, zero_row + zeros, 0.0f);
    kernel.zeros = zero_row;
    kernel.scores = take(scores);
    kernel.packed = take(packed);
    q = take(queries);
    total = state_at(take(state), kMaxRows, o_stride);
    part = state_at(take(state), kMaxRows, o_stride);
  }

 private:
  std::vector<float> memory_;
};

// One call in progress.
class Run {
 public:
  Run(const AttentionArgs& args, Plan& plan)
      : args_(args), plan_(plan), attend_(active_kernel().attend) {}

  void item(const WorkItem& item) const {
    thread_local Workspace workspace;
    workspace.reserve(args_);
    const PlannedTile& tile = plan_.tile(item);
    RowTile rows;
    load_rows(args_, plan_.groups(), tile.span, workspace.q, rows);
    if (item.split == kAllSplits) {
      all_splits(tile, rows, workspace);
    } else {
      one_split(item, tile, rows, workspace);
    }
  }

 private:
  void all_splits(const PlannedTile& tile, const RowTile& rows, const Workspace& space) const {
    attend(tile.split(0), rows, space, space.total);
    for (int32_t split = 1; split < tile.num_splits(); ++split) {
      attend(tile.split(split), rows, space, space.part);
      merge(space.total, space.part, rows.num_rows);
    }
    store_rows(args_, rows, tile.keys, space.total);
  }

  // The thread that finishes a tile's last split merges them all, in order.
  void one_split(const WorkItem& item, const PlannedTile& tile, const RowTile& rows,
                 const Workspace& space) const {
    attend(tile.split(item.split), rows, space, plan_.partial(item, item.split));
    if (!plan_.finish_split(item)) {
      return;
    }
    const SoftmaxState total = plan_.partial(item, 0);
    for (int32_t split = 1; split < tile.num_splits(); ++split) {
      merge(total, plan_.partial(item, split), rows.num_rows);
    }
    store_rows(args_, rows, tile.keys, total);
  }

  void attend(KeyRange keys, const RowTile& rows, const Workspace& space,
              const SoftmaxState& state) const {
    attend_(args_, rows, keys.begin, keys.end, space.kernel, state);
  }

  const AttentionArgs& args_;
  Plan& plan_;
  AttendFunction attend_;
};

}  // namespace

void paged_attention(const AttentionArgs& args) {
  // One per stream of MLX; the threads of the pool reach it through `run`.
  thread_local Plan stream_plan;
  Plan& plan = stream_plan;
  plan.assign(args);
  const Run run(args, plan);
  const auto body = [&run, &plan](int64_t i) { run.item(plan.items()[i]); };
  const auto count = static_cast<int64_t>(plan.items().size());
  if (plan.multiply_adds() >= kMinParallelWork) {
    parallel_for(count, body);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    body(i);
  }
}

}  // namespace mlx_paged::cpu

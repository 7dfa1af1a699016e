#include <algorithm>
#include <cstdint>
#include <cstring>
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

  void reserve(const AttentionArgs& args, const PlannedTile* planned, int32_t num_tiles) {
    const int32_t o_stride = padded(args.value_dim);
    const int64_t zeros = padded(std::max(args.head_dim, args.value_dim));
    const int64_t scores = int64_t{kMaxRows} * kKeyTile;
    const int64_t packed = zeros * kKeyTile;
    int64_t rows = 0;
    for (int32_t t = 0; t < num_tiles; ++t) {
      rows += padded(planned[t].span.count);
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

    tiles.resize(num_tiles);
    q.resize(num_tiles);
    total.resize(num_tiles);
    part.resize(num_tiles);
    for (int32_t t = 0; t < num_tiles; ++t) {
      const int32_t count = padded(planned[t].span.count);
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
    thread_local Workspace workspace;
    const PlannedTile* planned = plan_.tiles(item);
    workspace.reserve(args_, planned, item.num_tiles);
    for (int32_t t = 0; t < item.num_tiles; ++t) {
      load_rows(args_, plan_.groups(), planned[t].span, workspace.q[t], workspace.tiles[t]);
    }
    if (item.split == kAllSplits) {
      all_splits(item, planned, workspace);
    } else {
      one_split(item, planned, workspace);
    }
  }

 private:
  void all_splits(const WorkItem& item, const PlannedTile* planned, Workspace& space) const {
    attend(item, planned->split(0), space, space.total);
    for (int32_t split = 1; split < planned->num_splits(); ++split) {
      attend(item, planned->split(split), space, space.part);
      for (int32_t t = 0; t < item.num_tiles; ++t) {
        merge(space.total[t], space.part[t], space.tiles[t].num_rows);
      }
    }
    for (int32_t t = 0; t < item.num_tiles; ++t) {
      store_rows(args_, space.tiles[t], planned->keys, space.total[t]);
    }
  }

  // The thread that finishes the last split of an item's tiles merges them all, in order.
  void one_split(const WorkItem& item, const PlannedTile* planned, Workspace& space) const {
    for (int32_t t = 0; t < item.num_tiles; ++t) {
      space.part[t] = plan_.partial(item.tile + t, item.split);
    }
    attend(item, planned->split(item.split), space, space.part);
    if (!plan_.finish_split(item)) {
      return;
    }
    for (int32_t t = 0; t < item.num_tiles; ++t) {
      const SoftmaxState total = plan_.partial(item.tile + t, 0);
      for (int32_t split = 1; split < planned->num_splits(); ++split) {
        merge(total, plan_.partial(item.tile + t, split), space.tiles[t].num_rows);
      }
      store_rows(args_, space.tiles[t], planned->keys, total);
    }
  }

  void attend(const WorkItem& item, KeyRange keys, const Workspace& space,
              const std::vector<SoftmaxState>& states) const {
    attend_({args_, space.tiles.data(), item.num_tiles, keys.begin, keys.end, space.kernel,
             states.data()});
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
  parallel_for(
      static_cast<int64_t>(plan.items().size()),
      [&run, &plan](int64_t i) { run.item(plan.items()[i]); },
      plan.multiply_adds() >= kMinParallelWork);
}

}  // namespace mlx_paged::cpu

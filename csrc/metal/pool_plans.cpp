#include <algorithm>
#include <optional>

#include "csrc/metal/arrays.h"
#include "csrc/metal/plans.h"
#include "metal/params.h"

namespace mlx_paged {

namespace {

constexpr uint32_t kThreads = 256;

// The launch for `depth` tokens of every head; none if there is nothing to write.
std::optional<LaunchPlan> pool_plan(const char* op, const mx::array& k_cache,
                                    const mx::array& v_cache, int depth) {
  const int vectors = std::max(k_cache.shape(3), v_cache.shape(3)) / kVector;
  if (vectors == 0 || depth == 0 || k_cache.size() == 0) {
    return std::nullopt;
  }
  check_metal_pool(op, "k_cache", k_cache, true);
  check_metal_pool(op, "v_cache", v_cache, true);
  LaunchPlan plan;
  plan.kernel = std::string(op) + "_" + metal_type(k_cache);
  plan.instantiation = std::string(op) + "<" + metal_type(k_cache) + ">";
  plan.grid = {static_cast<uint32_t>(vectors), static_cast<uint32_t>(k_cache.shape(0)),
               static_cast<uint32_t>(depth)};
  plan.grid_in_threads = true;
  // A threadgroup covers the vectors of a row, and as many heads as fit.
  const uint32_t x = std::min(plan.grid[0], kThreads);
  plan.threadgroup = {x, std::min(plan.grid[1], std::max(1u, kThreads / x)), 1};
  return plan;
}

}  // namespace

LaunchPlans plan_write_kv(const Arrays& inputs) {
  using Role = BufferBinding::Role;
  const mx::array &k = inputs[0], &v = inputs[1], &k_cache = inputs[2], &v_cache = inputs[3];
  std::optional<LaunchPlan> plan = pool_plan("write_kv", k_cache, v_cache, k.shape(0));
  if (!plan) {
    return {};
  }
  WriteParams p{};
  copy_strides(k, p.k_strides);
  copy_strides(v, p.v_strides);
  copy_strides(k_cache, p.k_cache_strides);
  copy_strides(v_cache, p.v_cache_strides);
  p.slots_stride = static_cast<int>(inputs[4].strides(0));
  p.num_tokens = k.shape(0);
  p.num_blocks = k_cache.shape(1);
  p.k_vectors = k.shape(2) / kVector;
  p.v_vectors = v.shape(2) / kVector;
  plan->set_params(3, p);
  using Type = FunctionConstant::Type;
  plan->constants = {{15, Type::kInt, k_cache.shape(2)},
                     {16, Type::kBool, has_whole_vectors(k) && has_whole_vectors(v)}};
  plan->buffers = {{0, Role::kInput, 0},
                   {1, Role::kInput, 1},
                   {2, Role::kInput, 4},
                   {4, Role::kPoolWrite, 0},
                   {5, Role::kPoolWrite, 1}};
  return {{*plan}, {}};
}

LaunchPlans plan_copy_blocks(const Arrays& inputs) {
  using Role = BufferBinding::Role;
  const mx::array &k_cache = inputs[0], &v_cache = inputs[1], &pairs = inputs[2];
  const int depth = pairs.shape(0) > 0 ? k_cache.shape(2) : 0;
  std::optional<LaunchPlan> plan = pool_plan("copy_blocks", k_cache, v_cache, depth);
  if (!plan) {
    return {};
  }
  CopyParams p{};
  copy_strides(k_cache, p.k_strides);
  copy_strides(v_cache, p.v_strides);
  copy_strides(pairs, p.pairs_strides);
  p.num_pairs = pairs.shape(0);
  p.num_blocks = k_cache.shape(1);
  p.k_vectors = k_cache.shape(3) / kVector;
  p.v_vectors = v_cache.shape(3) / kVector;
  plan->set_params(1, p);
  plan->buffers = {{0, Role::kInput, 2}, {2, Role::kPoolWrite, 0}, {3, Role::kPoolWrite, 1}};
  return {{*plan}, {}};
}

}  // namespace mlx_paged

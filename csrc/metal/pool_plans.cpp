#include <algorithm>

#include "csrc/metal/arrays.h"
#include "csrc/metal/plans.h"
#include "metal/params.h"

namespace mlx_paged {

namespace {

constexpr uint32_t kThreads = 256;

// A threadgroup covers the vectors of a row, and as many heads as fit.
std::array<uint32_t, 3> threadgroup_for(const std::array<uint32_t, 3>& grid) {
  const uint32_t x = std::min(grid[0], kThreads);
  return {x, std::min(grid[1], std::max(1u, kThreads / x)), 1};
}

LaunchPlan pool_plan(const std::string& kernel, const mx::array& k_cache,
                     const std::array<uint32_t, 3>& grid) {
  LaunchPlan plan;
  plan.kernel = kernel + "_" + metal_type(k_cache);
  plan.instantiation = kernel + "<" + metal_type(k_cache) + ">";
  plan.grid = grid;
  plan.grid_in_threads = true;
  plan.threadgroup = threadgroup_for(grid);
  return plan;
}

uint32_t vectors(const mx::array& k_cache, const mx::array& v_cache) {
  return static_cast<uint32_t>(std::max(k_cache.shape(3), v_cache.shape(3)) / kVector);
}

}  // namespace

LaunchPlans plan_write_kv(const std::vector<mx::array>& inputs) {
  using Role = BufferBinding::Role;
  const mx::array &k = inputs[0], &v = inputs[1], &k_cache = inputs[2], &v_cache = inputs[3];
  const std::array<uint32_t, 3> grid = {vectors(k_cache, v_cache),
                                        static_cast<uint32_t>(k.shape(1)),
                                        static_cast<uint32_t>(k.shape(0))};
  if (grid[0] * grid[1] * grid[2] == 0 || k_cache.size() == 0) {
    return {};
  }
  check_metal_pool("write_kv", "k_cache", k_cache, true);
  check_metal_pool("write_kv", "v_cache", v_cache, true);
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
  LaunchPlan plan = pool_plan("write_kv", k_cache, grid);
  using Type = FunctionConstant::Type;
  plan.constants = {{15, Type::kInt, k_cache.shape(2)},
                    {16, Type::kBool, has_whole_vectors(k) && has_whole_vectors(v)}};
  plan.buffers = {{0, Role::kInput, 0},
                  {1, Role::kInput, 1},
                  {2, Role::kInput, 4},
                  {4, Role::kPoolWrite, 0},
                  {5, Role::kPoolWrite, 1}};
  plan.set_params(3, p);
  return {{plan}, {}};
}

LaunchPlans plan_copy_blocks(const std::vector<mx::array>& inputs) {
  using Role = BufferBinding::Role;
  const mx::array &k_cache = inputs[0], &v_cache = inputs[1], &pairs = inputs[2];
  const std::array<uint32_t, 3> grid = {vectors(k_cache, v_cache),
                                        static_cast<uint32_t>(k_cache.shape(0)),
                                        static_cast<uint32_t>(k_cache.shape(2))};
  if (grid[0] * grid[1] * grid[2] == 0 || pairs.shape(0) == 0 || k_cache.size() == 0) {
    return {};
  }
  check_metal_pool("copy_blocks", "k_cache", k_cache, true);
  check_metal_pool("copy_blocks", "v_cache", v_cache, true);
  CopyParams p{};
  copy_strides(k_cache, p.k_strides);
  copy_strides(v_cache, p.v_strides);
  copy_strides(pairs, p.pairs_strides);
  p.num_pairs = pairs.shape(0);
  p.num_blocks = k_cache.shape(1);
  p.k_vectors = k_cache.shape(3) / kVector;
  p.v_vectors = v_cache.shape(3) / kVector;
  LaunchPlan plan = pool_plan("copy_blocks", k_cache, grid);
  plan.buffers = {{0, Role::kInput, 2}, {2, Role::kPoolWrite, 0}, {3, Role::kPoolWrite, 1}};
  plan.set_params(1, p);
  return {{plan}, {}};
}

}  // namespace mlx_paged

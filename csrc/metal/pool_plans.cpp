#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>

#include "csrc/kv_formats.h"
#include "csrc/metal/arrays.h"
#include "csrc/metal/plans.h"
#include "csrc/metal/refused_pipelines.h"
#include "metal/params.h"

namespace mlx_paged {

namespace {

constexpr uint32_t kThreads = 256;

// The launch of `width` threads for each of `depth` tokens of every head; none if there is nothing
// to write.
std::optional<LaunchPlan> pool_plan(const char* kernel, const std::string& type,
                                    const mx::array& k_cache, int width, int depth) {
  if (width == 0 || depth == 0 || k_cache.size() == 0) {
    return std::nullopt;
  }
  LaunchPlan plan;
  plan.kernel = std::string(kernel) + "_" + type;
  plan.instantiation = std::string(kernel) + "<" + type + ">";
  plan.grid = {static_cast<uint32_t>(width), static_cast<uint32_t>(k_cache.shape(0)),
               static_cast<uint32_t>(depth)};
  plan.grid_in_threads = true;
  // A threadgroup covers the vectors of a row, and as many heads as fit.
  const uint32_t x = std::min(plan.grid[0], kThreads);
  plan.threadgroup = {x, std::min(plan.grid[1], std::max(1u, kThreads / x)), 1};
  return plan;
}

// The bytes of a quantized cache or of rows as it has them, whose last axis is dense: keys and
// values may be stored in words of different sizes.
mx::array as_bytes(const mx::array& words) {
  if (!is_quantized(words)) {
    return words;
  }
  const int size = static_cast<int>(words.itemsize());
  mx::Shape shape = words.shape();
  mx::Strides strides = words.strides();
  shape.back() *= size;
  for (size_t axis = 0; axis + 1 < strides.size(); ++axis) {
    strides[axis] *= size;
  }
  strides.back() = 1;
  mx::array bytes(shape, mx::uint8, nullptr, {});
  bytes.copy_shared_buffer(words, strides, words.flags(), words.data_size() * size);
  return bytes;
}

// Whether rows of both caches are whole vectors at multiples of a vector.
bool have_whole_vectors(const mx::array& k_cache, const mx::array& v_cache) {
  return k_cache.shape(3) % kVector == 0 && v_cache.shape(3) % kVector == 0 &&
         has_whole_vectors(k_cache) && has_whole_vectors(v_cache);
}

// Whether the host knows that pairs (source, destination) may be copied in any order: no block is
// the destination of one and in another one.
bool have_no_order(const mx::array& pairs) {
  if (pairs.status() != mx::array::Status::available) {
    return false;
  }
  const auto block = [&](int pair, int side) {
    return pairs.data<int32_t>()[pair * pairs.strides(0) + side * pairs.strides(1)];
  };
  std::unordered_set<int32_t> destinations;
  for (int pair = 0; pair < pairs.shape(0); ++pair) {
    destinations.insert(block(pair, 1));
  }
  bool are_apart = destinations.size() == static_cast<size_t>(pairs.shape(0));
  for (int pair = 0; pair < pairs.shape(0); ++pair) {
    are_apart &= destinations.count(block(pair, 0)) == 0;
  }
  return are_apart;
}

// What the kernels for writes share: parameters and buffers. `caches` are as these kernels see
// them, and a part has `each` elements.
void bind_write(LaunchPlan& plan, const mx::array& k, const mx::array& v, const Arrays& caches,
                const Arrays& inputs, int each) {
  using Role = BufferBinding::Role;
  WriteParams p{};
  copy_strides(k, p.k_strides);
  copy_strides(v, p.v_strides);
  copy_strides(caches[0], p.k_cache_strides);
  copy_strides(caches[1], p.v_cache_strides);
  plan.buffers = {{0, Role::kInput, 0},
                  {1, Role::kInput, 1},
                  {2, Role::kInput, 4},
                  {4, Role::kPoolWrite, 0},
                  {5, Role::kPoolWrite, 1}};
  if (inputs.size() > 5) {
    check_pool_layout("write_kv", "k_scales", inputs[5], true);
    check_pool_layout("write_kv", "v_scales", inputs[6], true);
    copy_strides(inputs[5], p.k_scales_strides);
    copy_strides(inputs[6], p.v_scales_strides);
    plan.buffers.insert(plan.buffers.end(), {{6, Role::kPoolWrite, 2}, {7, Role::kPoolWrite, 3}});
  }
  p.slots_stride = static_cast<int>(inputs[4].strides(0));
  p.num_blocks = inputs[2].shape(1);
  p.k_vectors = k.shape(2) / each;
  p.v_vectors = v.shape(2) / each;
  p.block_size = inputs[2].shape(2);
  p.k_bits = is_sixes(inputs[2]) ? 6 : 8;
  p.v_bits = is_pairs(inputs[3]) ? 4 : is_sixes(inputs[3]) ? 6 : 8;
  p.group = kValueGroup;
  plan.set_params(3, p);
}

LaunchPlans whole_write(const Arrays& inputs) {
  const bool quantizes = inputs.size() > 5;
  const auto moved = [&](const mx::array& a) { return quantizes ? a : as_bytes(a); };
  const mx::array k = moved(token_rows(inputs[0])), v = moved(token_rows(inputs[1]));
  const mx::array k_cache = moved(inputs[2]), v_cache = moved(inputs[3]);
  const bool is_stored = !quantizes && is_quantized(k_cache);
  const int each = is_stored && !have_whole_vectors(k_cache, v_cache) ? 1 : kVector;
  const int lanes = quantizes ? 32 : std::max(k.shape(2), v.shape(2)) / each;
  std::optional<LaunchPlan> plan = pool_plan(quantizes ? "write_quantized" : "write_kv",
                                             metal_type(k), k_cache, lanes, k.shape(0));
  if (!plan) {
    return {};
  }
  for (const auto& [name, cache] : {std::pair{"k_cache", &k_cache}, {"v_cache", &v_cache}}) {
    const bool is_anywhere = each == 1 || is_sixes(*cache);
    (is_anywhere ? check_pool_layout : check_metal_pool)("write_kv", name, *cache, true);
  }
  bind_write(*plan, k, v, {k_cache, v_cache}, inputs, each);
  using Type = FunctionConstant::Type;
  plan->constants = {{15, Type::kInt, k_cache.shape(2)},
                     {16, Type::kBool, has_whole_vectors(k) && has_whole_vectors(v)}};
  if (quantizes) {
    plan->constants.push_back({19, Type::kBool, is_pairs(v_cache)});
    plan->constants.push_back({21, Type::kBool, is_sixes(k_cache)});
  } else {
    plan->constants.push_back({24, Type::kBool, each == 1});
  }
  return {{*plan}, {}};
}

// The simplest write: by elements, or by rows that are quantized.
LaunchPlans simplest_write(const Arrays& inputs) {
  const bool quantizes = inputs.size() > 5;
  const auto moved = [&](const mx::array& a) { return quantizes ? a : as_bytes(a); };
  const mx::array k = moved(token_rows(inputs[0])), v = moved(token_rows(inputs[1]));
  const Arrays caches = {as_bytes(inputs[2]), as_bytes(inputs[3])};
  const int width = quantizes ? 1 : std::max(k.shape(2), v.shape(2));
  std::optional<LaunchPlan> plan = pool_plan(quantizes ? "quantize_elements" : "write_elements",
                                             metal_type(k), caches[0], width, k.shape(0));
  if (!plan) {
    return {};
  }
  check_pool_layout("write_kv", "k_cache", caches[0], true);
  check_pool_layout("write_kv", "v_cache", caches[1], true);
  bind_write(*plan, k, v, caches, inputs, 1);
  return {{*plan}, {}};
}

LaunchPlans copy_plan(const Arrays& inputs, bool is_simplest) {
  using Role = BufferBinding::Role;
  const mx::array k_cache = as_bytes(inputs[0]), v_cache = as_bytes(inputs[1]), &pairs = inputs[2];
  const int num_pairs = pairs.shape(0), pairs_each = have_no_order(pairs) ? 1 : num_pairs;
  const int depth = num_pairs > 0 ? num_pairs / pairs_each * k_cache.shape(2) : 0;
  const bool is_whole = !is_simplest && (is_sixes(inputs[0]) ? have_whole_vectors(k_cache, v_cache)
                                                             : k_cache.shape(3) % kVector == 0 &&
                                                                   v_cache.shape(3) % kVector == 0);
  const int each = is_whole ? kVector : 1;
  const int width = std::max(k_cache.shape(3), v_cache.shape(3)) / each;
  std::optional<LaunchPlan> plan = pool_plan(is_simplest ? "copy_elements" : "copy_blocks",
                                             metal_type(k_cache), k_cache, width, depth);
  if (!plan) {
    return {};
  }
  if (is_whole) {
    check_metal_pool("copy_blocks", "k_cache", k_cache, true);
    check_metal_pool("copy_blocks", "v_cache", v_cache, true);
  }
  CopyParams p{};
  copy_strides(k_cache, p.k_strides);
  copy_strides(v_cache, p.v_strides);
  copy_strides(pairs, p.pairs_strides);
  p.pairs_each = pairs_each;
  p.num_blocks = k_cache.shape(1);
  p.block_size = k_cache.shape(2);
  p.k_vectors = k_cache.shape(3) / each;
  p.v_vectors = v_cache.shape(3) / each;
  plan->set_params(1, p);
  if (!is_simplest) {
    plan->constants = {{20, FunctionConstant::Type::kBool, is_whole}};
  }
  plan->buffers = {{0, Role::kInput, 2}, {2, Role::kPoolWrite, 0}, {3, Role::kPoolWrite, 1}};
  return {{*plan}, {}};
}

}  // namespace

LaunchPlans plan_write_kv(const Arrays& inputs) {
  LaunchPlans plans = whole_write(inputs);
  return needs_simplest_form(plans) ? simplest_write(inputs) : plans;
}

LaunchPlans plan_copy_blocks(const Arrays& inputs) {
  LaunchPlans plans = copy_plan(inputs, false);
  return needs_simplest_form(plans) ? copy_plan(inputs, true) : plans;
}

}  // namespace mlx_paged

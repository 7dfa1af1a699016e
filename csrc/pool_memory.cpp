// Checks of a pool's memory.
#include <cstdint>
#include <string_view>

#include "csrc/validate.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// The array, or what it will be when it is evaluated, with its memory: known for an array that is
// evaluated or scheduled, and for slices, transposes and squeezed axes of such an array. Any other
// array gets its memory when it is evaluated.
OptionalArray with_memory(const mx::array& a) {
  if (a.status() != mx::array::Status::unscheduled) {
    return a;
  }
  if (!a.has_primitive() || a.inputs().size() != 1) {
    return std::nullopt;
  }
  const std::string_view name = a.primitive().name();
  const bool is_view = name == "Slice" || name == "Transpose" || name == "Squeeze";
  const OptionalArray base = is_view ? with_memory(a.inputs()[0]) : std::nullopt;
  if (!base) {
    return std::nullopt;
  }
  Arrays view = {mx::array(a.shape(), a.dtype(), nullptr, Arrays{})};
  a.primitive().eval_cpu({*base}, view);  // copies nothing
  return view[0];
}

// Throws if both are one array, or if their first rows overlap. Buffers and offsets say that
// without an address: MLX's CUDA backend moves a buffer to other memory when its address is asked
// for.
void check_apart(const char* op, const mx::array& k_cache, const mx::array& v_cache) {
  bool is_shared = k_cache.id() == v_cache.id();
  const auto k = with_memory(k_cache), v = with_memory(v_cache);
  if (k && v && k_cache.size() > 0 && k->buffer().ptr() == v->buffer().ptr()) {
    const auto end = [](const mx::array& cache) {
      return cache.offset() + cache.shape(3) * static_cast<int64_t>(cache.itemsize());
    };
    is_shared |= k->offset() < end(*v) && v->offset() < end(*k);
  }
  require(!is_shared, op, "v_cache of shape ", v_cache.shape(),
          " shares memory with k_cache of shape ", k_cache.shape(),
          ": expected two arrays, or columns of one that do not overlap");
}

}  // namespace

void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable) {
  const OptionalArray memory = with_memory(pool);
  if (!memory || pool.size() == 0) {
    return;
  }
  require(pool.shape(3) <= 1 || memory->strides(3) == 1, op, argument, " of shape ", pool.shape(),
          " has stride ", memory->strides(3), " on its last axis: expected 1");
  for (int axis = 0; writable && axis < 3; ++axis) {
    require(pool.shape(axis) <= 1 || memory->strides(axis) != 0, op, argument, " of shape ",
            pool.shape(), " is a broadcast view along axis ", axis, ": expected memory of its own");
  }
}

void check_pool_memory(const char* op, const mx::array& k_cache, const mx::array& v_cache,
                       bool writable) {
  check_pool_layout(op, "k_cache", k_cache, writable);
  check_pool_layout(op, "v_cache", v_cache, writable);
  if (writable) {
    check_apart(op, k_cache, v_cache);
  }
}

}  // namespace mlx_paged

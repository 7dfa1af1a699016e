// Checks of a pool's memory.
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "csrc/validate.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

struct Memory {
  const std::byte* first;
  mx::Strides strides;  // in elements
};

Memory sliced(Memory memory, const mx::array& view) {
  const auto [start, stop, step] = static_cast<const mx::Slice&>(view.primitive()).state();
  int64_t offset = 0;
  for (size_t axis = 0; axis < start.size(); ++axis) {
    offset += start[axis] * memory.strides[axis];
    memory.strides[axis] *= step[axis];
  }
  memory.first += offset * static_cast<int64_t>(view.itemsize());
  return memory;
}

Memory transposed(Memory memory, const mx::array& view) {
  mx::Strides strides;
  for (const int axis : static_cast<const mx::Transpose&>(view.primitive()).state()) {
    strides.push_back(memory.strides[axis]);
  }
  return {memory.first, strides};
}

Memory squeezed(Memory memory, const mx::array& view) {
  std::vector<bool> is_gone(memory.strides.size());
  for (const int axis : static_cast<const mx::Squeeze&>(view.primitive()).state()) {
    is_gone[axis] = true;
  }
  mx::Strides strides;
  for (size_t axis = 0; axis < is_gone.size(); ++axis) {
    if (!is_gone[axis]) {
      strides.push_back(memory.strides[axis]);
    }
  }
  return {memory.first, strides};
}

// Known for an array that is evaluated or scheduled, and for slices, transposes and squeezed axes
// of such an array. Any other array gets its memory when it is evaluated.
std::optional<Memory> known_memory(const mx::array& a) {
  if (a.status() != mx::array::Status::unscheduled) {
    return Memory{a.data<std::byte>(), a.strides()};
  }
  if (!a.has_primitive() || a.inputs().size() != 1) {
    return std::nullopt;
  }
  const std::string_view name = a.primitive().name();
  const auto view = name == "Slice"       ? &sliced
                    : name == "Transpose" ? &transposed
                    : name == "Squeeze"   ? &squeezed
                                          : nullptr;
  const std::optional<Memory> memory = view ? known_memory(a.inputs()[0]) : std::nullopt;
  return memory ? std::optional(view(*memory, a)) : std::nullopt;
}

// Throws if both are one array, or if their first rows overlap.
void check_apart(const char* op, const mx::array& k_cache, const mx::array& v_cache) {
  bool is_shared = k_cache.id() == v_cache.id();
  const auto k = known_memory(k_cache), v = known_memory(v_cache);
  if (k && v && k_cache.size() > 0) {
    const auto row_bytes = [](const mx::array& cache) { return cache.shape(3) * cache.itemsize(); };
    is_shared |=
        k->first < v->first + row_bytes(v_cache) && v->first < k->first + row_bytes(k_cache);
  }
  require(!is_shared, op, "v_cache of shape ", v_cache.shape(),
          " shares memory with k_cache of shape ", k_cache.shape(),
          ": expected two arrays, or columns of one that do not overlap");
}

}  // namespace

void check_pool_layout(const char* op, const char* argument, const mx::array& pool, bool writable) {
  const std::optional<Memory> memory = known_memory(pool);
  if (!memory || pool.size() == 0) {
    return;
  }
  require(pool.shape(3) <= 1 || memory->strides[3] == 1, op, argument, " of shape ", pool.shape(),
          " has stride ", memory->strides[3], " on its last axis: expected 1");
  for (int axis = 0; writable && axis < 3; ++axis) {
    require(pool.shape(axis) <= 1 || memory->strides[axis] != 0, op, argument, " of shape ",
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

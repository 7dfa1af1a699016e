#include "csrc/pool_memory.h"

#include <string_view>
#include <vector>

#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

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

}  // namespace

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

}  // namespace mlx_paged

// A kernel launch as plain data. A GPU encodes it, an emulator executes it, tests compare it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace mlx_paged {

struct FunctionConstant {
  enum class Type { kBool, kInt };
  int index;
  Type type;
  int32_t value;
};

// The array at a buffer index: an input or output of the primitive, or scratch memory. Pools have
// roles of their own because they are written in place.
struct BufferBinding {
  enum class Role { kInput, kOutput, kPoolRead, kPoolWrite, kScratch };
  int index;
  Role role;
  int which;
};

struct LaunchPlan {
  std::string kernel;         // host name
  std::string instantiation;  // "template<...>" arguments included, e.g. paged_attention<half, ...>
  std::vector<FunctionConstant> constants;
  std::array<uint32_t, 3> grid;  // threadgroups, or threads if grid_in_threads
  bool grid_in_threads = false;
  std::array<uint32_t, 3> threadgroup;
  std::vector<BufferBinding> buffers;
  int params_index;
  std::vector<std::byte> params;

  // Name of the specialised pipeline in MLX's cache. Two launches share it only if all function
  // constants are equal. Values are unsigned, so the name contains only letters, digits and '_'.
  std::string pipeline_name() const {
    std::string name = kernel;
    for (const FunctionConstant& constant : constants) {
      const auto value = static_cast<uint32_t>(constant.value);
      name += '_' + std::to_string(constant.index) + '_' + std::to_string(value);
    }
    return name;
  }

  template <typename Params>
  void set_params(int index, const Params& value) {
    params_index = index;
    params.resize(sizeof(Params));
    std::memcpy(params.data(), &value, sizeof(Params));
  }
};

// The launches of one op, in order, and the bytes of each scratch buffer that they share. The last
// launch reads scratch buffers, the others write them.
struct LaunchPlans {
  std::vector<LaunchPlan> launches;
  std::vector<size_t> scratch_bytes;
};

}  // namespace mlx_paged

// Where arrays lie in memory, as far as that is known before anything is computed.
#pragma once

#include <cstddef>
#include <optional>

#include "mlx/array.h"

namespace mlx_paged {

namespace mx = mlx::core;

struct Memory {
  const std::byte* first;
  mx::Strides strides;  // in elements
};

// Known of an array that is evaluated or on its way, and of slices, transposes and squeezed axes of
// such an array; any other array gets its memory when it is evaluated.
std::optional<Memory> known_memory(const mx::array& a);

}  // namespace mlx_paged

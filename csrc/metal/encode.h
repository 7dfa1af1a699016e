// Encoding of launches on MLX's Metal stream.
#pragma once

#include <vector>

#include "csrc/metal/launch_plan.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged {

// Encodes the launches of one op on its stream. The outputs must have buffers.
void encode(const LaunchPlans& plans, const std::vector<mlx::core::array>& inputs,
            std::vector<mlx::core::array>& outputs, mlx::core::Stream stream);

// Makes every later write to the pool wait for the next read that this op encodes.
void register_pool_read(const mlx::core::array& pool, mlx::core::Stream stream);

// Whether this build can encode launches.
bool has_metal();

}  // namespace mlx_paged

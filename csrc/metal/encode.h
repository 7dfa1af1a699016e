// Encoding of launches on MLX's Metal stream.
#pragma once

#include <vector>

#include "csrc/metal/launch_plan.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace mlx_paged {

// Encodes the launches of one op on its stream. Outputs have their buffers already.
void encode(const LaunchPlans& plans, const std::vector<mlx::core::array>& inputs,
            std::vector<mlx::core::array>& outputs, mlx::core::Stream stream);

// Makes every later write to the pool wait for what is encoded next in this op, which reads it.
void register_pool_read(const mlx::core::array& pool, mlx::core::Stream stream);

// Whether this build can encode.
bool has_metal();

}  // namespace mlx_paged

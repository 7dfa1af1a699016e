#include <stdexcept>

#include "csrc/metal/encode.h"

namespace mlx_paged {

bool has_metal() { return false; }

void encode(const LaunchPlans&, const std::vector<mlx::core::array>&,
            std::vector<mlx::core::array>&, mlx::core::Stream) {
  throw std::runtime_error("[mlx_paged] this build has no Metal: use a CPU stream");
}

// Without Metal no op writes to a pool in place on a GPU.
void register_pool_read(const mlx::core::array&, mlx::core::Stream) {}

}  // namespace mlx_paged

#include <stdexcept>

#include "csrc/metal/encode.h"

namespace mlx_paged {

bool has_metal() { return false; }

void encode(const LaunchPlans&, const std::vector<mlx::core::array>&,
            std::vector<mlx::core::array>&, mlx::core::Stream) {
  throw std::runtime_error("[mlx_paged] this build has no Metal: use a CPU stream");
}

}  // namespace mlx_paged

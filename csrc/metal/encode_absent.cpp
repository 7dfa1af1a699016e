#include <stdexcept>

#include "csrc/metal/plans.h"

namespace mlx_paged {

bool has_metal() { return false; }

size_t num_command_buffers() { return 0; }

void encode(const LaunchPlans&, const Arrays&, Arrays&, mx::Stream) {
  throw std::runtime_error("[mlx_paged] this build has no Metal: use a CPU stream");
}

// Without Metal no array is computed within a primitive of a GPU.
void keep_until_computed(const mx::array&, mx::Stream) {}

std::string refusal(const LaunchPlan&) { return ""; }

// Other devices tell of an error before anybody can read what was computed.
std::function<void()> end_of_work(mx::Stream) { return nullptr; }

// Without Metal no op writes to a pool in place on a GPU.
void register_pool_read(const mx::array&, mx::Stream) {}

}  // namespace mlx_paged

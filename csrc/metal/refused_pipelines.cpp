#include "csrc/metal/refused_pipelines.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

namespace mlx_paged {

namespace {

struct Refused {
  std::mutex mutex;
  std::set<std::string> names;  // guarded by mutex
  std::atomic<bool> is_any = false;
  std::atomic<bool> is_every = false;
};

// Never destroyed: threads may plan while the process ends.
Refused& refused() {
  static auto* const refused = new Refused;
  return *refused;
}

}  // namespace

void note_refused_pipeline(const std::string& name) {
  const std::lock_guard lock(refused().mutex);
  refused().names.insert(name);
  refused().is_any = true;
}

void forget_refused_pipelines() {
  const std::lock_guard lock(refused().mutex);
  refused().names.clear();
  refused().is_any = false;
}

void use_simplest_forms(bool is_wanted) { refused().is_every = is_wanted; }

bool needs_simplest_form(const LaunchPlans& plans) {
  if (refused().is_every) {
    return !plans.launches.empty();
  }
  if (!refused().is_any) {
    return false;
  }
  const std::lock_guard lock(refused().mutex);
  return std::any_of(plans.launches.begin(), plans.launches.end(), [](const LaunchPlan& plan) {
    return refused().names.count(plan.pipeline_name()) > 0;
  });
}

}  // namespace mlx_paged

#include "simdgroup.h"

#include <algorithm>
#include <cstring>

#include "launch.h"

namespace emulator {
namespace {

bool is_matrix_multiplication(const char* operation) {
  return strcmp(operation, "simdgroup_multiply_accumulate") == 0;
}

bool is_matrix_access(const char* operation) {
  return strcmp(operation, "simdgroup_load") == 0 || strcmp(operation, "simdgroup_store") == 0;
}

}  // namespace

void Simdgroup::start(Launch* launch, Thread* first, int size) {
  launch_ = launch;
  barriers = {};
  values.is_reduced = false;
  lanes_.clear();
  for (int i = 0; i < size; i++) lanes_.push_back(first + i);
}

void Simdgroup::run() {
  do {
    run_ready_lanes();
  } while (complete_operation());
}

void Simdgroup::run_ready_lanes() {
  launch_->order.shuffle(lanes_);
  for (Thread* lane : lanes_) {
    if (lane->state != ThreadState::ready) continue;
    launch_->running = lane;
    lane->fiber.resume();
  }
  launch_->running = nullptr;
  if (launch_->monitor) launch_->monitor->meet();
  launch_->counts.simd_reductions += values.is_reduced;
  values.is_reduced = false;
}

bool Simdgroup::complete_operation() {
  // Diverged lanes wait at several places; the first in the code goes first.
  Thread* earliest = nullptr;
  for (Thread* lane : lanes_) {
    if (lane->state != ThreadState::at_simdgroup_operation) continue;
    if (!earliest || lane->site < earliest->site) earliest = lane;
  }
  if (!earliest) return false;
  const void* site = earliest->site;
  std::vector<Thread*> present;
  std::copy_if(lanes_.begin(), lanes_.end(), std::back_inserter(present), [&](Thread* lane) {
    return lane->state == ThreadState::at_simdgroup_operation && lane->site == site;
  });
  if (present.size() < lanes_.size()) report_missing_lanes(present);

  if (earliest->is_barrier) {
    barriers.pass(earliest->barrier_memory);
    launch_->counts.simdgroup_barriers++;
  } else {
    launch_->counts.simd_operations++;
    launch_->counts.matrix_multiplications += is_matrix_multiplication(earliest->operation);
    launch_->counts.matrix_accesses += is_matrix_access(earliest->operation);
  }
  values.active = 0;
  values.is_reduced = false;
  for (Thread* lane : present) {
    values.active |= 1u << lane->position.lane;
    values.value[lane->position.lane] = lane->published();
    lane->state = ThreadState::ready;
  }
  return true;
}

void Simdgroup::report_missing_lanes(const std::vector<Thread*>& present) const {
  const auto returned = std::count_if(lanes_.begin(), lanes_.end(), [](const Thread* lane) {
    return lane->state == ThreadState::returned;
  });
  launch_->findings.report(kind::divergent_operation, present[0]->site, [&] {
    return std::string(present[0]->operation) + " by " + std::to_string(present.size()) + " of " +
           std::to_string(lanes_.size()) + " lanes, " + std::to_string(returned) +
           " have returned; " + present[0]->name();
  });
}

}  // namespace emulator

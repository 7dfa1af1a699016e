// Operations that are counted where instrument.py finds them.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../device/abi.h"

namespace emulator {

enum Operation { exponential, multiply_64, kOperations };

struct OperationCounts {
  uint64_t by_simdgroups = 0;  // once for all lanes that execute it together
  uint64_t by_lanes = 0;
};

// As LineCounter, it takes the n-th time that a lane comes to a place since the lanes met for the
// n-th of them all.
class OperationCounter {
 public:
  void execute(const void* site, unsigned lane, Operation operation) {
    Place& place = places_[site];
    if (place.executions == 0) {
      place.operation = operation;
      executed_.push_back(&place);
    }
    const unsigned execution = ++place.executions_of_lane[lane];
    if (execution > place.executions) place.executions = execution;
    counts_[operation].by_lanes++;
  }
  // The lanes have met.
  void meet() {
    for (Place* place : executed_) {
      counts_[place->operation].by_simdgroups += place->executions;
      place->executions = 0;
      place->executions_of_lane.fill(0);
    }
    executed_.clear();
  }
  const OperationCounts& counts(int operation) const { return counts_[operation]; }

 private:
  struct Place {
    Operation operation;
    unsigned executions = 0;
    std::array<unsigned, kSimdWidth> executions_of_lane{};
  };

  std::array<OperationCounts, kOperations> counts_;
  std::unordered_map<const void*, Place> places_;
  std::vector<Place*> executed_;  // since the lanes last met
};

}  // namespace emulator

// The order in which threadgroups, simdgroups and lanes take their turns.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

namespace emulator {

class Order {
 public:
  // Without a seed everything runs in order of its index.
  explicit Order(std::optional<uint64_t> seed) : is_random_(seed.has_value()) {
    state_ = seed.value_or(0);
  }

  template <class Container>
  void shuffle(Container& items) {
    if (!is_random_) return;
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[next() % i]);
  }

 private:
  uint64_t next() {  // SplitMix64
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  bool is_random_;
  uint64_t state_;
};

}  // namespace emulator

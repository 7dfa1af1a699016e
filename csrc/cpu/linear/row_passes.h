// Rows that chose weights, as passes of rows with the same weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace mlx_paged::cpu {

// Rows of one weight. `first` is the place of the first one in `order`.
struct Pass {
  int64_t weight;
  int64_t first;
  int64_t rows;
};

// The rows of each weight as passes of at most `most` rows, and `order`: the rows, weight by
// weight. Rows whose weight does not exist are in no pass.
inline std::vector<Pass> passes_of(const int32_t* weights, int64_t count, int64_t num_weights,
                                   int64_t most, std::vector<int64_t>& order) {
  std::vector<int64_t> ends(num_weights + 1);
  const auto exists = [&](int64_t i) { return weights[i] >= 0 && weights[i] < num_weights; };
  for (int64_t i = 0; i < count; ++i) {
    ends[exists(i) ? weights[i] + 1 : 0] += exists(i);
  }
  std::vector<Pass> passes;
  for (int64_t w = 0; w < num_weights; ++w) {
    const int64_t begin = ends[w], end = begin + ends[w + 1];
    for (int64_t first = begin; first < end; first += most) {
      passes.push_back({w, first, std::min<int64_t>(most, end - first)});
    }
    ends[w + 1] = end;
  }
  order.resize(ends.back());
  for (int64_t i = 0; i < count; ++i) {
    if (exists(i)) {
      order[ends[weights[i]]++] = i;
    }
  }
  return passes;
}

}  // namespace mlx_paged::cpu

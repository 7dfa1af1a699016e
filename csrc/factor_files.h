// Factors of low-rank terms: from a file into memory, and from there into stacks.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/ops.h"

namespace mlx_paged {

// A tensor of a file: where its bytes begin, its type as safetensors names it, its shape
// [..., rows, columns], whether the factor is [..., columns, rows], the number that each element is
// multiplied by in float32, and the dtype of the factor.
using StoredFactor = std::tuple<uint64_t, std::string, std::vector<int>, bool, double, mx::Dtype>;

// Reads tensors of a file one after another. Returns their factors' bytes as one array, where each
// factor begins at a multiple of 64 and zeros lie between; the factors, which are parts of it; and
// the index of the first factor that has NaN or infinity, or -1. Throws std::invalid_argument if
// the file has fewer bytes than the tensors, std::runtime_error if it cannot be read.
std::tuple<mx::array, Arrays, int64_t> read_factors(const std::string& path,
                                                    const std::vector<StoredFactor>& stored);

// Writes into row `slot` of each of `stacks`, [S, ..., r, C] of rows that lie one after another,
// its factor [..., at most r, C], and zeros after it; zeros alone where it has none. All are in
// memory.
void write_slot(const Arrays& stacks, const std::vector<OptionalArray>& factors, int64_t slot);

}  // namespace mlx_paged

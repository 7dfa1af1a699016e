// Linear layers on CPUs, as one node of the graph; python/layer_bindings.cpp documents the ops.
#pragma once

#include "csrc/ops.h"

namespace mlx_paged {

mx::array linear(const mx::array& x, const mx::array& weight, const OptionalArray& bias,
                 mx::StreamOrDevice stream);

mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& offsets, const OptionalArray& bias, int group_size,
                           int bits, mx::StreamOrDevice stream);

}  // namespace mlx_paged

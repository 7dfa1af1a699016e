// The ops of csrc/cpu/layers/layer_ops.h as the submodule `layers`.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_paged {

void bind_layers(nanobind::module_& module);

}  // namespace mlx_paged

#pragma once

#include <nanobind/nanobind.h>

namespace mlx_paged {

// Adds the submodule `metal`.
void bind_plans(nanobind::module_& m);

}  // namespace mlx_paged

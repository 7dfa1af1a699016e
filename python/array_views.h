// `view_as`: arrays of a Python class of one's own.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_paged {

void bind_array_views(nanobind::module_& module);

}  // namespace mlx_paged

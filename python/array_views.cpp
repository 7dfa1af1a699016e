#include "python/array_views.h"

#include <new>

#include "mlx/array.h"

namespace mx = mlx::core;
namespace nb = nanobind;
using namespace nb::literals;

namespace mlx_paged {

namespace {

constexpr const char* kViewAsDoc =
    R"(The array as an instance of a subclass of ``mx.array``, whose ``__init__`` is not called.

Nothing is copied, now or when it is evaluated.

Raises:
    ValueError: `kind` is no subclass of ``mx.array``.)";

nb::object view_as(nb::type_object kind, const mx::array& array) {
  if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(kind.ptr()),
                        reinterpret_cast<PyTypeObject*>(nb::type<mx::array>().ptr()))) {
    throw nb::value_error("[view_as] kind is another class: expected a subclass of mx.array");
  }
  nb::object view = nb::inst_alloc(kind);
  new (nb::inst_ptr<mx::array>(view)) mx::array(array);
  nb::inst_mark_ready(view);
  return view;
}

}  // namespace

void bind_array_views(nb::module_& m) {
  m.def("view_as", &view_as, "kind"_a, "array"_a, kViewAsDoc);
}

}  // namespace mlx_paged

#include "csrc/layer_calls.h"
#include "python/bindings.h"

namespace mlx_paged {

namespace {

constexpr const char* kForwardArraysDoc =
    R"(The arrays of a :class:`mlx_paged.attention.forward.Forward` that its layers give the device. They
do not change.)";

constexpr const char* kKnownWriteDoc =
    R"(A kind of write of which is known that the current device has a kernel for it: `dtype` is that
of the model's keys and values. A pool that `rotates` stores the Hadamard transforms of rows.)";

constexpr const char* kKnownAttentionDoc =
    R"(A kind of attention of which is known that the current device has a kernel for it: queries like
`q`, ``[B, H, L, D]``, see the keys of `window`. `shares`: whether the kernel reads shared keys
once. `rotates`: as of :class:`KnownWrite`.)";

constexpr const char* kAppendKvDoc =
    R"(``write_kv`` of K/V as a model gives it, ``k [B, H_kv, N, D]`` and ``v [B, H_kv, N, D_v]``, and
``gather_blocks`` of all tokens, in one call. `stored` has the handles of all layers: lists of keys,
of values and of the scales of a quantized pool. The new handles of `layer` take the place of the
old ones. Returns the gathered keys and values in k's type as instances of two classes, subclasses
of ``mx.array`` with the attribute `cache`; they have zeros where the forward holds nothing. None,
and nothing is written, if the call is not of the known kind, on another device, within a function
transformation, and if there are no tokens to gather.)";

constexpr const char* kAttendKnownDoc =
    R"(Attention of a layer whose handles `stored` has, as in :func:`append_kv`. None if the call is not
of the known kind, on another device, and within a function transformation.)";

// A layer's arrays in the lists of all layers.
Arrays arrays_of(const nb::list& stored, size_t layer) {
  Arrays arrays;
  arrays.reserve(stored.size() + 2);
  for (nb::handle handles : stored) {
    arrays.push_back(nb::cast<const mx::array&>(nb::borrow<nb::list>(handles)[layer]));
  }
  return arrays;
}

// The array as an instance of a subclass of mx.array that names its cache.
nb::object handle_of(nb::handle kind, mx::array&& array, nb::handle cache) {
  static PyObject* const name = PyUnicode_InternFromString("cache");
  nb::object handle = nb::inst_alloc(kind);
  new (nb::inst_ptr<mx::array>(handle)) mx::array(std::move(array));
  nb::inst_mark_ready(handle);
  if (PyObject_SetAttr(handle.ptr(), name, cache.ptr()) != 0) {
    throw nb::python_error();
  }
  return handle;
}

nb::object append(nb::handle keys_kind, nb::handle values_kind, nb::handle cache,
                  const mx::array& k, const mx::array& v, const nb::list& stored, size_t layer,
                  ForwardArrays& forward, const KnownWrite& known) {
  auto found = append_kv(k, v, arrays_of(stored, layer), forward, known);
  if (!found) {
    return nb::none();
  }
  size_t next = 0;
  for (nb::handle handles : stored) {
    nb::borrow<nb::list>(handles)[layer] = nb::cast(std::move((*found)[next++]));
  }
  return nb::make_tuple(handle_of(keys_kind, std::move((*found)[next]), cache),
                        handle_of(values_kind, std::move((*found)[next + 1]), cache));
}

OptionalArray attend(const mx::array& q, const nb::list& stored, size_t layer,
                     const ForwardArrays& forward, const KnownAttention& known, float scale) {
  return attend_known(q, arrays_of(stored, layer), forward, known, scale);
}

}  // namespace

void bind_calls(nb::module_& m) {
  nb::class_<ForwardArrays>(m, "ForwardArrays", kForwardArraysDoc)
      .def(nb::init<OptionalArray, mx::array, mx::array, OptionalArray, mx::array, int,
                    OptionalArray>(),
           "slot_mapping"_a.none(), "block_tables"_a, "context_lens"_a, "shared_prefixes"_a.none(),
           "row_tables"_a, "max_context"_a, "held"_a.none())
      .def_ro("slot_mapping", &ForwardArrays::slot_mapping)
      .def_ro("block_tables", &ForwardArrays::block_tables)
      .def_ro("context_lens", &ForwardArrays::context_lens)
      .def_ro("row_tables", &ForwardArrays::row_tables)
      .def_ro("max_context", &ForwardArrays::max_context);
  nb::class_<KnownWrite>(m, "KnownWrite", kKnownWriteDoc)
      .def(
          "__init__",
          [](KnownWrite* self, mx::Dtype dtype, bool rotates) {
            new (self) KnownWrite{dtype, rotates};
          },
          "dtype"_a, "rotates"_a);
  nb::class_<KnownAttention>(m, "KnownAttention", kKnownAttentionDoc)
      .def(nb::init<const mx::array&, std::optional<int>, bool, bool>(), "q"_a, "window"_a.none(),
           "shares"_a, "rotates"_a)
      .def_ro("window", &KnownAttention::window)
      .def_ro("shares", &KnownAttention::shares);
  m.def("append_kv", &append, "keys_kind"_a, "values_kind"_a, "cache"_a, "k"_a, "v"_a, "stored"_a,
        "layer"_a, "forward"_a, "known"_a, kAppendKvDoc);
  m.def("attend_known", &attend, "q"_a, "stored"_a, "layer"_a, "forward"_a, "known"_a, "scale"_a,
        kAttendKnownDoc);
}

}  // namespace mlx_paged

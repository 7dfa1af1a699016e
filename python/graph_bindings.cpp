// What traces, keeps and builds MLX's graphs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <unordered_set>

#include "csrc/tape.h"
#include "mlx/compile.h"
#include "mlx/compile_impl.h"
#include "python/bindings.h"

namespace mlx_paged {

namespace {

constexpr const char* kIsTransformingDoc =
    R"(Whether this thread is within one of MLX's function transformations: grad, vjp, jvp, vmap or
compile.)";

constexpr const char* kSetFusionDoc =
    R"(Whether the graphs that ``mx.compile`` traces from now on, on any thread, have their elementwise
ops fused. Fused ops round differently, and on a CPU they need a C++ compiler.)";

constexpr const char* kHasValuesDoc =
    R"(Whether the array can be evaluated now: what mx.compile and mx.vmap trace has no values.)";

constexpr const char* kArraysInDoc =
    R"(The arrays in nested dicts, lists and tuples, in order, and a number of the rest: keys, lengths,
classes of dicts, and the numbers, strings and Nones beside the arrays.)";

constexpr const char* kWithArraysDoc =
    R"(A copy of nested dicts, lists and tuples with other arrays in the place of theirs, in the order of
:func:`arrays_in`. Raises ValueError if there are more or fewer than these.)";

constexpr const char* kAreOneDoc =
    R"(Whether two arrays of Python are one array of MLX. An array that is changed in place becomes
another one.)";

constexpr const char* kKeepCompiledDoc =
    R"(Functions that are compiled within the trace of these inputs stay so. ``mx.compile`` would trace
their ops with the others, and these would be fused otherwise or not at all.)";

constexpr const char* kTapeDoc =
    R"(Builds the graph between `inputs` and the arrays of a tree, `results`, again for other inputs, without
Python's code.

A graph that ``mx.compile`` has traced is built again node by node by MLX, which looks up each array
by its address. A tape has numbers in the place of addresses. Its nodes are those of the graph, in
the same order, but reshapes in a row are one or none. A node makes the views that it alone reads.
With `groups`, nodes in a row that a CPU computes are one node, which computes them in
their order; whoever evaluates any result must evaluate the first one. The inputs may be arrays
without values, see :func:`without_values`. Raises ValueError if two of them are one array, or if a result depends on an
array of `elsewhere`: on an input that the traced function has captured, which would be the same in
each graph.

Calling the tape with other inputs returns their tree of results, not evaluated, or None if an input
has another shape or dtype than the input in its place.)";

constexpr const char* kWithoutValuesDoc =
    R"(Arrays of the same shapes and dtypes that have no values: MLX raises an error if it has to
evaluate a graph with them.)";

// Inputs of a trace are unscheduled arrays that nothing computes.
bool has_values(const mx::array& array) {
  std::vector<mx::array> left = {array};
  std::unordered_set<uintptr_t> known = {array.id()};
  while (is_transforming() && !left.empty()) {
    const mx::array next = left.back();
    left.pop_back();
    if (next.status() != mx::array::Status::unscheduled) {
      continue;
    }
    if (!next.has_primitive() || next.is_tracer()) {
      return false;
    }
    for (const mx::array& input : next.inputs()) {
      if (known.insert(input.id()).second) {
        left.push_back(input);
      }
    }
  }
  return true;
}

// Mixes a value into a number, so that each bit of it changes about half of the bits.
void mix(uint64_t& number, uint64_t value) {
  number = (number ^ value) * 0x9E3779B97F4A7C15ULL;
  number ^= number >> 29;
}

// The array of a Python object; null if it is another object.
const mx::array* array_of(nb::handle object) {
  static const PyObject* const type = nb::type<mx::array>().ptr();
  const bool is_array = reinterpret_cast<const PyObject*>(Py_TYPE(object.ptr())) == type ||
                        nb::isinstance<mx::array>(object);
  return is_array ? nb::inst_ptr<mx::array>(object) : nullptr;
}

// Adds the arrays of nested dicts, lists and tuples to `arrays`, and the rest to `number`: the
// sizes, the keys, the numbers, strings and Nones among the leaves, and the classes of modules.
void add_arrays(nb::handle tree, nb::list& arrays, uint64_t& number) {
  PyObject* object = tree.ptr();
  if (array_of(tree) != nullptr) {
    arrays.append(tree);
    mix(number, 1);
  } else if (PyDict_Check(object)) {
    mix(number, static_cast<uint64_t>(PyDict_Size(object)));
    mix(number, reinterpret_cast<uintptr_t>(Py_TYPE(object)));
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &value) != 0;) {
      mix(number, static_cast<uint64_t>(nb::hash(nb::handle(key))));
      add_arrays(value, arrays, number);
    }
  } else if (PyList_Check(object) || PyTuple_Check(object)) {
    mix(number, ~static_cast<uint64_t>(nb::len(tree)));
    for (const nb::handle value : tree) {
      add_arrays(value, arrays, number);
    }
  } else if (PyFloat_Check(object)) {
    mix(number, std::hash<double>{}(PyFloat_AS_DOUBLE(object)));
  } else if (PyLong_Check(object)) {  // Python's hashes of -1 and -2 are one
    mix(number, PyLong_AsUnsignedLongLongMask(object));
  } else if (PyUnicode_Check(object)) {
    mix(number, static_cast<uint64_t>(nb::hash(tree)));
  } else if (tree.is_none()) {
    mix(number, 2);
  }
}

std::pair<nb::list, int64_t> arrays_in(nb::handle tree) {
  nb::list arrays;
  uint64_t number = 0;
  add_arrays(tree, arrays, number);
  return {arrays, static_cast<int64_t>(number >> 2)};
}

// A copy of the tree whose arrays are the next ones of `arrays`.
nb::object with_next(nb::handle tree, const nb::list& arrays, size_t& next) {
  if (array_of(tree) != nullptr) {
    if (next == arrays.size()) {
      throw nb::value_error("[with_arrays] the tree has more arrays than were given");
    }
    return arrays[next++];
  }
  if (PyDict_Check(tree.ptr())) {
    nb::dict copy;
    for (const auto& [key, value] : nb::borrow<nb::dict>(tree)) {
      copy[key] = with_next(value, arrays, next);
    }
    return copy;
  }
  if (PyList_Check(tree.ptr()) || PyTuple_Check(tree.ptr())) {
    nb::list copy;
    for (const nb::handle value : tree) {
      copy.append(with_next(value, arrays, next));
    }
    return PyList_Check(tree.ptr()) ? nb::object(copy) : nb::object(nb::tuple(copy));
  }
  return nb::borrow(tree);
}

nb::object with_arrays(nb::handle tree, const nb::list& arrays) {
  size_t next = 0;
  nb::object copy = with_next(tree, arrays, next);
  if (next != arrays.size()) {
    throw nb::value_error("[with_arrays] the tree has fewer arrays than were given");
  }
  return copy;
}

// A tape of the arrays of a tree.
class TreeTape {
 public:
  TreeTape(const Arrays& inputs, nb::handle results, const Arrays& elsewhere, bool groups)
      : TreeTape(inputs, nb::cast<Arrays>(arrays_in(results).first), results, elsewhere, groups) {}

  nb::object operator()(const nb::list& inputs) const {
    Arrays arrays;
    arrays.reserve(inputs.size());
    for (const nb::handle input : inputs) {
      const mx::array* array = array_of(input);
      if (array == nullptr) {
        throw nb::type_error("[Tape] the inputs must be a list of arrays");
      }
      arrays.push_back(*array);
    }
    std::optional<Arrays> found = tape_(std::move(arrays));
    return found ? with_arrays(results_, nb::cast<nb::list>(nb::cast(*std::move(found))))
                 : nb::none();
  }

  size_t num_nodes() const { return tape_.num_nodes(); }
  std::vector<std::string> names() const { return tape_.names(); }

 private:
  TreeTape(const Arrays& inputs, const Arrays& outputs, nb::handle results, const Arrays& elsewhere,
           bool groups)
      : tape_(inputs, outputs, elsewhere, groups),
        results_(with_arrays(results, nb::cast<nb::list>(nb::cast(without_values(outputs))))) {}

  Tape tape_;
  nb::object results_;
};

}  // namespace

void bind_graphs(nb::module_& m) {
  m.def("is_transforming", &is_transforming, kIsTransformingDoc);
  m.def(
      "set_fusion",
      [](bool fuses) {
        mx::set_compile_mode(fuses ? mx::CompileMode::enabled : mx::CompileMode::no_fuse);
      },
      "fuses"_a, kSetFusionDoc);
  m.def(
      "clear_compiled", [] { mx::detail::compile_clear_cache(mx::detail::compile_cache()); },
      "Frees the graphs that ``mx.compile`` has traced in the calling thread.");
  m.def(
      "are_one", [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); }, "a"_a,
      "b"_a, kAreOneDoc);
  m.def("arrays_in", &arrays_in, "tree"_a, kArraysInDoc);
  m.def("with_arrays", &with_arrays, "tree"_a, "arrays"_a, kWithArraysDoc);
  m.def("has_values", &has_values, "array"_a, kHasValuesDoc);
  m.def(
      "keep_compiled",
      [](std::vector<mx::array> inputs) {
        for (mx::array& input : inputs) {
          input.set_tracer(false);
        }
      },
      "inputs"_a, kKeepCompiledDoc);
  m.def("without_values", &without_values, "arrays"_a, kWithoutValuesDoc);
  nb::class_<TreeTape>(m, "Tape", kTapeDoc)
      .def(nb::init<const Arrays&, nb::handle, const Arrays&, bool>(), "inputs"_a, "results"_a,
           "elsewhere"_a, "groups"_a = false)
      .def("__call__", &TreeTape::operator(), "inputs"_a)
      .def_prop_ro("num_nodes", &TreeTape::num_nodes)
      .def_prop_ro("names", &TreeTape::names, "The primitives of the nodes, by name, in order.");
}

}  // namespace mlx_paged

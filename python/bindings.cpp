#include "python/bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <new>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"
#include "mlx/version.h"

namespace mlx_paged {

namespace {

constexpr const char* kModuleDoc =
    R"(Compiled ops of mlx_paged.

Import ``mlx.core`` first: it loads libmlx and registers ``mlx.core.array``.

:mod:`mlx_paged.ops.paged` documents the dimensions and the layout of a pool.)";

constexpr const char* kGatherBlocksDoc =
    R"(The keys or values of a batch's sequences in one array, by a graph of MLX's own ops.

Args:
    cache: ``[H_kv, N, S, D]``: the keys or the values of a layer's pool.
    block_tables: ``[B, M]`` integers.
    num_tokens: tokens of each sequence, at most ``M * S``.

Returns:
    ``[B, H_kv, num_tokens, D]``, on the current device.

Raises:
    ValueError: an argument has another number of axes, or num_tokens is out of range.)";

constexpr const char* kTakeFromPoolDoc =
    R"(``mx.take(rows, indices, axis=0)`` for the memory of a pool, on the current device.

On a GPU, writes to the pool that are encoded later wait for this read. They do not wait for
``mx.take``.)";

constexpr const char* kPoolZerosDoc =
    R"(Zeros for a layer's pool.

On a CPU the array begins at the start of a page, so no row begins inside a cache line. Under Linux,
unless huge pages are switched off, every aligned stretch of 2 MiB inside the array is one huge
page: reads of random blocks are faster. The array takes up to 4 KiB more memory than its size, and
all of it at once, since zeros are written.

Args:
    shape: of the array.
    dtype: of the array.
    capacity: the size of the first axis up to which :func:`grown_in_place` shall work. On Linux
        without a GPU, an array with a capacity above its size takes only the memory that is
        written. Elsewhere, and where the system refuses the address space, it has no effect.
    stream: stream or device. A GPU gives plain zeros.)";

constexpr const char* kGrownInPlaceDoc =
    R"(An array of `num_blocks` blocks whose first ones are `blocks`, in the same memory. The others
are zeros until they are written.

Returns:
    None if the memory has no room: :func:`pool_zeros` made it with no capacity, or a smaller one.
    Also if the array is not evaluated or scheduled, or is no whole array in the order of its axes.

Args:
    blocks: an array of :func:`pool_zeros`, or one with the same memory.
    num_blocks: the new size of the first axis.
    stream: stream or device.)";

constexpr const char* kCheckTablesDoc =
    R"(Check the values of block tables and context lengths on the host.

This waits for nothing: of arrays that are not evaluated yet it checks only shapes and dtypes.

Args:
    op: name that starts the error message.
    block_tables: ``[B, M]`` int32.
    context_lens: ``[B]`` int32.
    num_blocks: N, blocks in the pool.
    block_size: S, tokens per block.

Raises:
    ValueError: a shape or dtype does not fit, a context length is outside ``[0, M * S]``, or a
        block id that a context reads is outside ``[0, N)``.)";

constexpr const char* kCheckCuSeqlensDoc =
    R"(Check the values of cu_seqlens on the host, as :func:`check_tables` does.

Args:
    op: name that starts the error message.
    cu_seqlens: ``[B + 1]`` int32.
    num_tokens: T, tokens of all sequences.
    num_decodes: how many of the first sequences have one token each.

Raises:
    ValueError: a shape or dtype does not fit, or the values do not rise from 0 to T, by one for
        each of the first `num_decodes` sequences.)";

constexpr const char* kIsTransformingDoc =
    R"(Whether this thread is within one of MLX's function transformations: grad, vjp, jvp, vmap or
compile.)";

constexpr const char* kHasValuesDoc =
    R"(Whether the array can be evaluated now: what mx.compile and mx.vmap trace has no values.)";

constexpr const char* kViewAsDoc =
    R"(The array as an instance of a subclass of ``mx.array``. Its ``__init__`` is not called.

Nothing is copied, now or when the array is evaluated.

Raises:
    ValueError: `kind` is not a subclass of ``mx.array``.)";

constexpr const char* kCpuFeaturesDoc =
    R"(Name of the build of the CPU kernels in use: "baseline", "avx2" or "avx512".

The environment variable MLX_PAGED_CPU, read at import, chooses a build. The default is the fastest
one that the machine supports.)";

// MLX does not export its own flag. An array that is marked as a tracer shows it.
bool is_transforming() {
  static const mx::array* const tracer = [] {
    auto* array = new mx::array(0);  // outlives MLX's own static objects
    array->set_tracer(true);
    return array;
  }();
  return tracer->is_tracer();
}

std::string version(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

bool has_values(const mx::array& array) {
  return array.status() != mx::array::Status::unscheduled || !array.is_tracer();
}

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

NB_MODULE(_ext, m) {
  m.doc() = kModuleDoc;

  // A bad environment variable fails the import, not a task on MLX's stream thread.
  cpu::active_kernel();
  cpu::num_threads();

  def_attention<mx::StreamOrDevice>(m, "paged_attention", &paged_attention, "stream"_a = nb::none(),
                                    "See :func:`mlx_paged.ops.paged_attention`.");
  def_varlen_attention<mx::StreamOrDevice>(m, "paged_attention_varlen", &paged_attention_varlen,
                                           "stream"_a = nb::none(),
                                           "See :func:`mlx_paged.ops.paged_attention_varlen`.");
  m.def("write_kv", &write_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slot_mapping"_a,
        nb::kw_only(), "stream"_a = nb::none(), "See :func:`mlx_paged.ops.write_kv`.");
  m.def("copy_blocks", &copy_blocks, "k_cache"_a, "v_cache"_a, "block_pairs"_a, nb::kw_only(),
        "stream"_a = nb::none(), "See :func:`mlx_paged.ops.copy_blocks`.");
  m.def("gather_blocks", &gather_blocks, "cache"_a, "block_tables"_a, "num_tokens"_a,
        kGatherBlocksDoc);
  m.def("take_from_pool", &take_from_pool, "rows"_a, "indices"_a, kTakeFromPoolDoc);
  m.def("pool_zeros", &pool_zeros, "shape"_a, "dtype"_a, nb::kw_only(), "capacity"_a = 0,
        "stream"_a = nb::none(), kPoolZerosDoc);
  m.def("grown_in_place", &grown_in_place, "blocks"_a, "num_blocks"_a, nb::kw_only(),
        "stream"_a = nb::none(), kGrownInPlaceDoc);
  m.def(
      "reserved_bytes", &reserved_bytes,
      "Bytes of all arrays that :func:`pool_zeros` made with a capacity. MLX counts none of them.");
  m.def("check_tables", &check_tables, "op"_a, "block_tables"_a, "context_lens"_a, "num_blocks"_a,
        "block_size"_a, kCheckTablesDoc);
  m.def("check_cu_seqlens", &check_cu_seqlens, "op"_a, "cu_seqlens"_a, "num_tokens"_a,
        "num_decodes"_a, kCheckCuSeqlensDoc);
  m.def("is_transforming", &is_transforming, kIsTransformingDoc);
  m.def("has_values", &has_values, "array"_a, kHasValuesDoc);
  m.def("view_as", &view_as, "kind"_a, "array"_a, kViewAsDoc);
  m.def("cpu_features", [] { return std::string(cpu::active_kernel().name); }, kCpuFeaturesDoc);
  m.def("supported_kernels", &cpu::supported_kernel_names,
        "Names of the builds of the CPU kernels that this machine can run, slowest first.");
  m.def("num_threads", &cpu::num_threads,
        "Threads that CPU kernels use: MLX_PAGED_NUM_THREADS, read at import, or the hardware's.");

  nb::dict built_with;
  built_with["mlx"] = version(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  built_with["nanobind"] = version(NB_VERSION_MAJOR, NB_VERSION_MINOR, NB_VERSION_PATCH);
  m.attr("BUILT_WITH") = built_with;

  bind_layers(m);
  bind_plans(m);
}

}  // namespace mlx_paged

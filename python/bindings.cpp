#include "python/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/validate.h"
#include "mlx/version.h"

namespace mlx_paged {

namespace {

constexpr const char* kModuleDoc =
    R"(Compiled ops of mlx_paged.

Import ``mlx.core`` first: it loads libmlx and registers ``mlx.core.array``.

:mod:`mlx_paged.ops.paged` documents the dimensions and the layout of a pool.)";

constexpr const char* kGatherBlocksDoc =
    R"(The keys or values of a batch's sequences in one array ``[B, H_kv, num_tokens, D]``, by a
graph of MLX's own ops on the current device: the first num_tokens of each row of ``block_tables
[B, M]`` in ``cache [H_kv, N, S, D]``. Arrays of a pool may have `head_runs`, from
:func:`mlx_paged.attention.forward.head_runs` of each table, which several calls can share. Raises
ValueError if an argument has another number of axes, or num_tokens is above ``M * S``.)";

constexpr const char* kTakeFromPoolDoc =
    R"(``mx.take(rows, indices, axis=0)`` for the memory of a pool, on the current device.

On a GPU, writes to the pool that are encoded later wait for this read. They do not wait for
``mx.take``.)";

constexpr const char* kPoolZerosDoc =
    R"(Zeros for a layer's pool; plain ones on a GPU.

On a CPU the array begins at the start of a page, so no row begins inside a cache line. Under Linux,
unless huge pages are switched off, every aligned stretch of 2 MiB inside the array is one huge
page: reads of random blocks are faster. The array takes up to 4 KiB more memory than its size, and
all of it at once, since zeros are written. With a `capacity` not below the first axis,
:func:`grown_in_place` works up to it, and the array takes only the memory that is written; but not
on a GPU, on another system than Linux, or where the system refuses the address space.)";

constexpr const char* kGrownInPlaceDoc =
    R"(An array of `num_blocks` blocks whose first ones are `blocks`, an array of :func:`pool_zeros`,
in the same memory. The others are zeros until they are written. None if the memory has no such capacity,
or if the array is not evaluated or scheduled, or is no whole array in the order of its axes.)";

constexpr const char* kDequantizedDoc =
    R"(Stored elements ``[..., columns]`` and their scales as rows ``[..., D]``: computed in float32, then
rounded to `dtype`. :mod:`mlx_paged.ops.formats` describes both.)";

constexpr const char* kPaddedArraysDoc =
    R"(The arrays of a forward of B rows with N columns: positions, slot_mapping, block_tables,
context_lens, offset and next_offset, as in :class:`mlx_paged.attention.forward.Forward`.

Column c of row b is position ``starts[b] + c``. It is a token if this is not negative and c is below
``lengths[b]``; any other column has slot -1. Context lengths include all columns. Row b has table
``rows[b]`` of ``tables [R, M]`` int32, with as many columns as the positions need.)";

constexpr const char* kDecodeArraysDoc =
    R"(The arrays of a forward of one token of each sequence, ``[rows]`` int32 each, which share one
memory: positions, context_lens and slot_mapping, as in
:class:`mlx_paged.attention.forward.Forward`.

Sequence i has its token at position ``starts[i]``. Row i of ``tables [R, M]`` int32 has its blocks.
The rows after the sequences are of nobody: position 0, context length 0 and slot -1.)";

constexpr const char* kViewAsDoc =
    R"(The array as an instance of `kind`, a subclass of ``mx.array`` (else ValueError), whose
``__init__`` is not called. Nothing is copied, now or when the array is evaluated.)";

constexpr const char* kCpuFeaturesDoc =
    R"(Name of the build of the CPU kernels in use: "baseline", "avx2" or "avx512".

The environment variable MLX_PAGED_CPU, read at import, chooses a build. The default is the fastest
one that the machine supports.)";

using HostTables = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Arrays padded_arrays(const std::vector<int>& starts, const std::vector<int>& lengths, int columns,
                     const HostTables& tables, const std::vector<int>& rows, int block_size) {
  const auto batch = static_cast<int>(starts.size()), width = static_cast<int>(tables.shape(1));
  int longest = 1;
  for (const int start : starts) {
    longest = std::max(longest, start + columns);
  }
  const int num_blocks = (longest + block_size - 1) / block_size;
  std::vector<int32_t> positions, slots, blocks, contexts, stops;
  for (int i = 0; i < batch; ++i) {
    const int32_t* const table = tables.data() + int64_t{rows[i]} * width;
    for (int column = 0; column < columns; ++column) {
      const int position = starts[i] + column, entry = position / block_size;
      const bool is_token = position >= 0 && column < lengths[i];
      require(!is_token || entry < width, "padded_arrays", "table ", rows[i], " has ", width,
              " blocks: expected one for position ", position);
      positions.push_back(position);
      slots.push_back(is_token ? table[entry] * block_size + position % block_size : -1);
    }
    for (int entry = 0; entry < num_blocks; ++entry) {
      blocks.push_back(entry < width ? table[entry] : 0);
    }
    contexts.push_back(starts[i] + columns);
    stops.push_back(starts[i] + lengths[i]);
  }
  const auto array = [](const auto& values, const mx::Shape& shape) {
    return mx::array(values.begin(), shape, mx::int32);
  };
  return {array(positions, {batch, columns}),
          array(slots, {batch * columns}),
          array(blocks, {batch, num_blocks}),
          array(contexts, {batch}),
          array(starts, {batch}),
          array(stops, {batch})};
}

Arrays decode_arrays(const std::vector<int>& starts, const HostTables& tables, int rows,
                     int block_size) {
  const auto count = static_cast<int>(starts.size()), width = static_cast<int>(tables.shape(1));
  require(count <= rows && count <= static_cast<int>(tables.shape(0)), "decode_arrays",
          "starts has ", count, " entries: expected at most ", rows, ", the rows, and ",
          tables.shape(0), ", the tables");
  std::vector<int32_t> values(3 * static_cast<size_t>(rows));
  int32_t *const positions = values.data(), *const contexts = positions + rows,
                 *const slots = contexts + rows;
  std::fill(slots, slots + rows, -1);
  for (int i = 0; i < count; ++i) {
    const int position = starts[i], entry = position / block_size;
    require(position >= 0 && entry < width, "decode_arrays", "starts[", i, "] is ", position,
            ": expected 0 to ", width * block_size - 1, ", what the tables hold");
    positions[i] = position;
    contexts[i] = position + 1;
    slots[i] = tables.data()[int64_t{i} * width + entry] * block_size + position % block_size;
  }
  const mx::array all(values.begin(), {3, rows}, mx::int32);
  Arrays parts;
  for (int part = 0; part < 3; ++part) {
    mx::array& view = parts.emplace_back(mx::Shape{rows}, mx::int32, nullptr, Arrays{});
    view.copy_shared_buffer(all, {1}, {true, true, true}, rows, int64_t{part} * rows);
    view.set_status(mx::array::Status::available);
  }
  return parts;
}

std::string version(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
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

  def_attention<bool, mx::StreamOrDevice>(m, "paged_attention", &paged_attention,
                                          "check_tables"_a = false, "stream"_a = nb::none(),
                                          "See :func:`mlx_paged.ops.paged_attention` and "
                                          ":func:`mlx_paged.ops.paged_attention_varlen`.");
  m.def("write_kv", &write_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slot_mapping"_a,
        nb::kw_only(), "k_scales"_a = nb::none(), "v_scales"_a = nb::none(),
        "stream"_a = nb::none(), "See :func:`mlx_paged.ops.write_kv`.");
  m.def("copy_blocks", &copy_blocks, "k_cache"_a, "v_cache"_a, "block_pairs"_a, nb::kw_only(),
        "stream"_a = nb::none(), "See :func:`mlx_paged.ops.copy_blocks`.");
  m.def("gather_blocks", &gather_blocks, "cache"_a, "block_tables"_a, "num_tokens"_a,
        "head_runs"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none(), kGatherBlocksDoc);
  m.def("take_from_pool", &take_from_pool, "rows"_a, "indices"_a, kTakeFromPoolDoc);
  m.def("pool_zeros", &pool_zeros, "shape"_a, "dtype"_a, nb::kw_only(), "capacity"_a = 0,
        "stream"_a = nb::none(), kPoolZerosDoc);
  m.def("grown_in_place", &grown_in_place, "blocks"_a, "num_blocks"_a, nb::kw_only(),
        "stream"_a = nb::none(), kGrownInPlaceDoc);
  m.def(
      "reserved_bytes", &reserved_bytes,
      "Bytes of all arrays that :func:`pool_zeros` made with a capacity. MLX counts none of them.");
  m.def("dequantized", &dequantized, "cache"_a, "scales"_a, "dtype"_a, nb::kw_only(),
        "stream"_a = nb::none(), kDequantizedDoc);
  m.def("padded_arrays", &padded_arrays, "starts"_a, "lengths"_a, "columns"_a, "tables"_a, "rows"_a,
        "block_size"_a, kPaddedArraysDoc);
  m.def("decode_arrays", &decode_arrays, "starts"_a, "tables"_a, "rows"_a, "block_size"_a,
        kDecodeArraysDoc);
  bind_calls(m);
  bind_graphs(m);
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
  bind_recurrent(m);
  bind_plans(m);
}

}  // namespace mlx_paged

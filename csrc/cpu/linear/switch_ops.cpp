#include <algorithm>
#include <cstring>
#include <memory>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/layers/layer_ops.h"
#include "csrc/cpu/layers/layer_primitives.h"
#include "csrc/cpu/linear/packed_rows.h"
#include "csrc/cpu/linear/row_passes.h"
#include "csrc/validate.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// The most rows that are packed at once. More rows read the weights of their experts again.
constexpr int64_t kRowsOfBatch = 4 * cpu::kRowsOfPass;

// One layer of experts. Bytes are those of one expert.
struct Experts {
  cpu::LinearArgs first;  // of expert 0
  int64_t count;
  int64_t weight_bytes;
  int64_t scale_bytes;
  int64_t offset_bytes;
  int64_t bias_bytes;
  int64_t row_bytes;  // of out

  cpu::LinearArgs args_of(int64_t expert) const {
    const auto at = [expert](const void* data, int64_t bytes) -> const void* {
      return data ? static_cast<const std::byte*>(data) + expert * bytes : nullptr;
    };
    cpu::LinearArgs args = first;
    args.weight = at(first.weight, weight_bytes);
    args.scales = at(first.scales, scale_bytes);
    args.offsets = at(first.offsets, offset_bytes);
    args.bias = at(first.bias, bias_bytes);
    return args;
  }
};

// Row i of out meets expert indices[i] and row i * x.count() / count of x.
void compute(const Experts& layer, const cpu::DenseRows& x, const int32_t* indices, int64_t count) {
  const cpu::LinearKernels& kernels = cpu::active_kernel().linear;
  const int64_t stride = cpu::packed_stride(layer.first.depth);
  const int64_t width = layer.first.width, itemsize = layer.row_bytes / width;
  const int64_t rows_of_x = count / x.count();
  auto* out = static_cast<std::byte*>(layer.first.out);
  std::vector<int64_t> order;
  const std::vector<cpu::Pass> passes =
      cpu::passes_of(indices, count, layer.count, cpu::kRowsOfPass, order);
  if (static_cast<int64_t>(order.size()) < count) {
    std::memset(out, 0xff, count * layer.row_bytes);  // NaN, for rows without an expert
  }
  std::vector<std::byte> results;
  for (size_t begin = 0, end = 0; begin < passes.size(); begin = end) {
    const int64_t first = passes[begin].first;
    int64_t rows = 0;
    for (; end < passes.size() && rows + passes[end].rows <= kRowsOfBatch; ++end) {
      rows += passes[end].rows;
    }
    float* packed = cpu::packed_rows(rows * stride);
    cpu::parallel_for(
        rows,
        [&](int64_t r) {
          cpu::RowBuffer buffer;
          const void* row = x.row(order[first + r] / rows_of_x, buffer);
          kernels.pack(layer.first, row, packed + r * stride);
        },
        rows * stride >= cpu::kProductsOfTask);
    results.resize(rows * layer.row_bytes);
    const int64_t num_passes = end - begin;
    const int64_t column_passes = (width + cpu::kColumnsOfPass - 1) / cpu::kColumnsOfPass;
    const int64_t work = (rows + num_passes * cpu::kRowsOfRead) * layer.first.depth * width /
                         cpu::kRowsOfRead / num_passes;
    const int64_t most =
        std::max<int64_t>(1, cpu::kTasksOfThread * cpu::num_threads() / num_passes);
    const int64_t tasks = std::clamp<int64_t>(work / cpu::kProductsOfTask, 1, most);
    const int64_t columns = (column_passes + tasks - 1) / tasks * cpu::kColumnsOfPass;
    const int64_t parts = (width + columns - 1) / columns;
    cpu::parallel_for(
        num_passes * parts,
        [&](int64_t i) {
          const cpu::Pass& pass = passes[begin + i / parts];
          const int64_t from = i % parts * columns, to = std::min(width, from + columns);
          const int64_t at = pass.first - first;
          std::byte* result = results.data() + at * layer.row_bytes;
          kernels.multiply(layer.args_of(pass.weight), packed + at * stride, pass.rows, from, to,
                           result);
          for (int64_t r = 0; r < pass.rows; ++r) {
            std::memcpy(out + order[pass.first + r] * layer.row_bytes + from * itemsize,
                        result + r * layer.row_bytes + from * itemsize, (to - from) * itemsize);
          }
        },
        num_passes * work >= cpu::kProductsOfTask);
  }
}

// Inputs x, indices, weight, with `bits` scales, in mode "affine" offsets, and the bias if there is
// one.
struct SwitchLinear {
  static constexpr const char* kName = "PagedSwitchLinear";
  int bits;  // 0: the weight is not quantized
  int group;
  bool has_offsets;
  bool has_bias;

  bool operator==(const SwitchLinear&) const = default;

  static mx::Shape shape(const Arrays& inputs) {
    mx::Shape shape = inputs[1].shape();
    shape.push_back(1);
    shape.push_back(inputs[2].shape(1));
    return shape;
  }

  auto task(const Arrays& inputs, mx::array& out) const {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    std::vector<cpu::DenseRows> arrays;
    for (size_t i = 1; i < inputs.size(); ++i) {
      arrays.emplace_back(inputs[i]);
    }
    Experts layer = {};
    layer.first.dtype = cpu::dtype_of(out);
    layer.first.bits = bits;
    layer.first.group = group;
    layer.first.depth = inputs[0].shape(-1);
    layer.first.width = inputs[2].shape(1);
    layer.first.out = out.data<std::byte>();
    layer.count = inputs[2].shape(0);
    const auto bytes_each = [&](size_t i) {
      return static_cast<int64_t>(inputs[i].nbytes()) / std::max<int64_t>(1, layer.count);
    };
    layer.weight_bytes = bytes_each(2);
    layer.scale_bytes = bits ? bytes_each(3) : 0;
    layer.offset_bytes = has_offsets ? bytes_each(4) : 0;
    layer.bias_bytes = has_bias ? bytes_each(inputs.size() - 1) : 0;
    layer.row_bytes = static_cast<int64_t>(out.itemsize()) * layer.first.width;
    const int64_t count = inputs[1].size();
    return [layer, count, x = cpu::DenseRows(inputs[0]), arrays, op = *this]() mutable {
      if (count == 0 || layer.first.width == 0) {
        return;
      }
      std::vector<cpu::RowBuffer> buffers(arrays.size());
      std::vector<const void*> data;
      for (size_t i = 0; i < arrays.size(); ++i) {
        data.push_back(arrays[i].all(buffers[i]));
      }
      layer.first.weight = data[1];
      layer.first.scales = op.bits ? data[2] : nullptr;
      layer.first.offsets = op.has_offsets ? data[3] : nullptr;
      layer.first.bias = op.has_bias ? data.back() : nullptr;
      compute(layer, x, static_cast<const int32_t*>(data[0]), count);
    };
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const auto offsets = has_offsets ? OptionalArray(inputs[4]) : OptionalArray();
    const auto product =
        bits ? mx::gather_qmm(inputs[0], inputs[2], inputs[3], offsets, std::nullopt, inputs[1],
                              true, group, bits, has_offsets ? "affine" : "mxfp4", std::nullopt,
                              false, s)
             : mx::gather_mm(inputs[0], mx::swapaxes(inputs[2], -1, -2, s), std::nullopt, inputs[1],
                             false, s);
    return has_bias ? mx::add(product,
                              mx::expand_dims(mx::take(inputs.back(), inputs[1], 0, s), -2, s), s)
                    : product;
  }
};

}  // namespace

mx::array switch_linear(const mx::array& x, const mx::array& indices, const mx::array& weight,
                        const OptionalArray& scales, const OptionalArray& offsets,
                        const OptionalArray& bias, int group_size, int bits,
                        mx::StreamOrDevice stream) {
  const char* op = "switch_linear";
  check_floating(op, "x", x);
  require(indices.dtype() == mx::uint32 || indices.dtype() == mx::int32, op, "indices have dtype ",
          indices.dtype(), ": expected uint32 or int32");
  require(x.ndim() == indices.ndim() + 2 && x.ndim() >= 3 && x.shape(-2) == 1 && x.shape(-1) > 0,
          op, "x has shape ", x.shape(), ": expected the axes of indices and [1, D]");
  for (int axis = 0; axis < static_cast<int>(indices.ndim()); ++axis) {
    const bool is_last = axis + 1 == static_cast<int>(indices.ndim());
    require(x.shape(axis) == indices.shape(axis) || (is_last && x.shape(axis) == 1), op, "x has ",
            x.shape(axis), " on axis ", axis, ": expected ", indices.shape(axis));
  }
  Arrays inputs = {x, indices, weight};
  require(scales.has_value() == (bits != 0) && (bits == 0 || bits == 4 || bits == 8), op,
          "bits is ", bits, ": expected 4 or 8 with scales, or 0 without");
  if (bits) {
    require(group_size == 32 || group_size == 64 || group_size == 128, op, "group_size is ",
            group_size, ": expected 32, 64 or 128");
    require(x.shape(-1) % group_size == 0 && weight.dtype() == mx::uint32, op,
            "expected uint32 weights and x with a multiple of group_size on its last axis");
    require(offsets || (bits == 4 && group_size == 32 && scales->dtype() == mx::uint8), op,
            "offsets are None: expected mxfp4, uint8 scales of groups of 32");
  }
  const int depth = bits ? x.shape(-1) / 32 * bits : x.shape(-1);
  require(weight.ndim() == 3 && weight.shape(2) == depth, op, "weight has shape ", weight.shape(),
          ": expected [experts, outputs, ", depth, "]");
  const auto add = [&](const char* name, const mx::array& array, const mx::Shape& shape) {
    require(array.shape() == shape, op, name, " has shape ", array.shape(), ": expected ", shape);
    inputs.push_back(array);
  };
  if (bits) {
    const mx::Shape groups = {weight.shape(0), weight.shape(1), x.shape(-1) / group_size};
    add("scales", *scales, groups);
    if (offsets) {
      add("offsets", *offsets, groups);
    }
  }
  if (bias) {
    add("bias", *bias, {weight.shape(0), weight.shape(1)});
  }
  for (size_t i = bits ? 3 : 2; i < inputs.size(); ++i) {
    const bool is_exponents = bits && !offsets && i == 3;
    require(is_exponents || inputs[i].dtype() == x.dtype(), op, "x has dtype ", x.dtype(),
            " but another array has ", inputs[i].dtype(), ": expected the same");
  }
  const SwitchLinear layer = {bits, group_size, offsets.has_value(), bias.has_value()};
  auto primitive = std::make_shared<LayerPrimitive<SwitchLinear>>(mx::to_stream(stream), layer);
  const mx::Shape shape = SwitchLinear::shape(inputs);
  return mx::array(shape, x.dtype(), std::move(primitive), std::move(inputs));
}

}  // namespace mlx_paged

#include <algorithm>
#include <memory>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/layers/layer_ops.h"
#include "csrc/cpu/layers/layer_primitives.h"
#include "csrc/cpu/linear/packed_rows.h"
#include "csrc/validate.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

void compute(const cpu::LinearArgs& args, const cpu::DenseRows& x) {
  if (args.width == 0) {
    return;
  }
  const cpu::LinearKernels& kernels = cpu::active_kernel().linear;
  const int64_t stride = cpu::packed_stride(args.depth);
  const int64_t row_bytes = args.width * (x.row_bytes() / args.depth);
  for (int64_t first = 0; first < x.count(); first += cpu::kRowsOfPass) {
    const int64_t rows = std::min<int64_t>(cpu::kRowsOfPass, x.count() - first);
    float* packed = cpu::packed_rows(rows * stride);
    cpu::parallel_for(
        rows,
        [&](int64_t r) {
          cpu::RowBuffer buffer;
          kernels.pack(args, x.row(first + r, buffer), packed + r * stride);
        },
        rows * stride >= cpu::kProductsOfTask);
    auto* out = static_cast<std::byte*>(args.out) + first * row_bytes;
    const int64_t passes = (args.width + cpu::kColumnsOfPass - 1) / cpu::kColumnsOfPass;
    const int64_t work = (rows + cpu::kRowsOfRead) * args.depth * args.width / cpu::kRowsOfRead;
    const int64_t most = cpu::kTasksOfThread * cpu::num_threads();
    const int64_t tasks = std::clamp<int64_t>(work / cpu::kProductsOfTask, 1, most);
    const int64_t columns = (passes + tasks - 1) / tasks * cpu::kColumnsOfPass;
    cpu::parallel_for((args.width + columns - 1) / columns, [&](int64_t i) {
      const int64_t end = std::min<int64_t>(args.width, (i + 1) * columns);
      kernels.multiply(args, packed, rows, i * columns, end, out);
    });
  }
}

// Inputs x, weight, with `bits` scales and offsets, and the bias if there is one.
struct Linear {
  static constexpr const char* kName = "PagedLinear";
  int bits;  // 0: the weight is not quantized
  int group;

  bool operator==(const Linear&) const = default;

  static mx::Shape shape(const Arrays& inputs) {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[1].shape(0);
    return shape;
  }

  OptionalArray bias(const Arrays& inputs) const {
    const size_t others = bits ? 4 : 2;
    return inputs.size() > others ? OptionalArray(inputs[others]) : OptionalArray();
  }

  auto task(const Arrays& inputs, mx::array& out) const {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    std::vector<cpu::DenseRows> arrays;
    for (size_t i = 1; i < inputs.size(); ++i) {
      arrays.emplace_back(inputs[i]);
    }
    cpu::LinearArgs args = {};
    args.dtype = cpu::dtype_of(out);
    args.bits = bits;
    args.group = group;
    args.depth = inputs[0].shape(-1);
    args.width = inputs[1].shape(0);
    args.out = out.data<std::byte>();
    return [args, x = cpu::DenseRows(inputs[0]), arrays, op = *this]() mutable {
      cpu::RowBuffer buffers[4];
      const void* data[4] = {};
      for (size_t i = 0; i < arrays.size(); ++i) {
        data[i] = arrays[i].all(buffers[i]);
      }
      args.weight = data[0];
      args.bias = data[op.bits ? 3 : 1];
      args.scales = data[1];
      args.offsets = data[2];
      compute(args, x);
    };
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const auto product = bits ? mx::quantized_matmul(inputs[0], inputs[1], inputs[2], inputs[3],
                                                     true, group, bits, "affine", s)
                              : mx::matmul(inputs[0], mx::transpose(inputs[1], s), s);
    const OptionalArray added = bias(inputs);
    return added ? mx::add(product, *added, s) : product;
  }
};

mx::array make(Linear op, Arrays inputs, const OptionalArray& bias, mx::StreamOrDevice stream) {
  const mx::array x = inputs[0], weight = inputs[1];
  check_floating("linear", "x", x);
  require(x.ndim() >= 1 && x.shape(-1) > 0, "linear",
          "x has no elements on its last axis: expected at least one");
  const int depth = op.bits ? x.shape(-1) / 32 * op.bits : x.shape(-1);
  require(weight.ndim() == 2 && weight.shape(1) == depth, "linear", "weight has shape ",
          weight.shape(), ": expected [outputs, ", depth, "]");
  if (bias) {
    require(bias->ndim() == 1 && bias->shape(0) == weight.shape(0), "linear", "bias has shape ",
            bias->shape(), ": expected [", weight.shape(0), "]");
    inputs.push_back(*bias);
  }
  for (size_t i = op.bits ? 2 : 1; i < inputs.size(); ++i) {
    require(inputs[i].dtype() == x.dtype(), "linear", "x has dtype ", x.dtype(),
            " but another array has ", inputs[i].dtype(), ": expected the same");
  }
  auto primitive = std::make_shared<LayerPrimitive<Linear>>(mx::to_stream(stream), op);
  const mx::Shape shape = Linear::shape(inputs);
  return mx::array(shape, x.dtype(), std::move(primitive), std::move(inputs));
}

}  // namespace

mx::array linear(const mx::array& x, const mx::array& weight, const OptionalArray& bias,
                 mx::StreamOrDevice stream) {
  return make(Linear{0, 0}, {x, weight}, bias, stream);
}

mx::array quantized_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& offsets, const OptionalArray& bias, int group_size,
                           int bits, mx::StreamOrDevice stream) {
  require(bits == 4 || bits == 8, "linear", "bits is ", bits, ": expected 4 or 8");
  require(group_size == 32 || group_size == 64 || group_size == 128, "linear", "group_size is ",
          group_size, ": expected 32, 64 or 128");
  require(weight.dtype() == mx::uint32 && x.ndim() >= 1 && x.shape(-1) % group_size == 0, "linear",
          "expected uint32 weights and x with a multiple of group_size on its last axis");
  require(weight.ndim() == 2 && scales.shape() == offsets.shape() &&
              scales.shape() == mx::Shape{weight.shape(0), x.shape(-1) / group_size},
          "linear", "scales have shape ", scales.shape(), " and offsets ", offsets.shape(),
          ": expected [outputs, groups] of both");
  return make(Linear{bits, group_size}, {x, weight, scales, offsets}, bias, stream);
}

}  // namespace mlx_paged

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>
#include <typeinfo>

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

// Factors a [count, rank, depth] and b [count, rank, width].
struct Factors {
  cpu::LinearArgs first;  // of a[0]; its width is the rank
  const std::byte* b;
  int64_t count;
  int64_t itemsize;
  int64_t width;

  int64_t rank() const { return first.width; }

  // Adds the terms of rows of y with the weight of `pass`.
  void add(const cpu::Pass& pass, const cpu::DenseRows& x, const int64_t* rows, int64_t rows_of_x,
           std::byte* y) const {
    const cpu::LinearKernels& kernels = cpu::active_kernel().linear;
    cpu::LinearArgs args = first;
    args.weight =
        static_cast<const std::byte*>(first.weight) + pass.weight * rank() * first.depth * itemsize;
    const int64_t stride = cpu::packed_stride(args.depth);
    float* packed = cpu::packed_rows(pass.rows * stride);
    std::byte products[cpu::kRowsOfLowRank * cpu::kMostTerms * sizeof(float)];
    void* to[cpu::kRowsOfLowRank];
    cpu::RowBuffer buffer;
    for (int64_t r = 0; r < pass.rows; ++r) {
      const int64_t row = rows[pass.first + r];
      kernels.pack(args, x.row(row / rows_of_x, buffer), packed + r * stride);
      to[r] = y + row * width * itemsize;
    }
    kernels.multiply(args, packed, pass.rows, 0, rank(), products);
    kernels.add_products(args.dtype, products, b + pass.weight * rank() * width * itemsize,
                         pass.rows, rank(), width, to);
  }
};

// Row i of y meets factors indices[i] and row i * x.count() / count of x.
void compute(const Factors& factors, const cpu::DenseRows& x, const int32_t* indices, int64_t count,
             std::byte* y) {
  std::vector<int64_t> order;
  const int64_t tasks = cpu::kTasksOfThread * cpu::num_threads();
  const int64_t most = std::clamp<int64_t>((count + tasks - 1) / tasks, 1, cpu::kRowsOfLowRank);
  const std::vector<cpu::Pass> passes = cpu::passes_of(indices, count, factors.count, most, order);
  const int64_t reads = order.size() + passes.size() * cpu::kRowsOfRead;
  const int64_t work = reads * factors.rank() * (factors.first.depth + factors.width);
  cpu::parallel_for(
      passes.size(),
      [&](int64_t i) { factors.add(passes[i], x, order.data(), count / x.count(), y); },
      work / cpu::kRowsOfRead >= cpu::kProductsOfTask);
}

// The task that adds terms to `to`, the rows of `out`. x, a, b and indices are `inputs`.
auto terms_task(const Arrays& inputs, const mx::array& out, std::byte* to) {
  Factors factors = {};
  factors.first.dtype = cpu::dtype_of(out);
  factors.first.depth = inputs[1].shape(2);
  factors.first.width = inputs[1].shape(1);
  factors.count = inputs[1].shape(0);
  factors.itemsize = static_cast<int64_t>(out.itemsize());
  factors.width = inputs[2].shape(2);
  return [factors, to, bytes = out.nbytes(), count = static_cast<int64_t>(inputs[3].size()),
          x = cpu::DenseRows(inputs[0]), a = cpu::DenseRows(inputs[1]),
          b = cpu::DenseRows(inputs[2]), indices = cpu::DenseRows(inputs[3])]() mutable {
    if (bytes == 0) {
      return;
    }
    cpu::RowBuffer buffers[3];
    factors.first.weight = a.all(buffers[0]);
    factors.b = static_cast<const std::byte*>(b.all(buffers[1]));
    compute(factors, x, static_cast<const int32_t*>(indices.all(buffers[2])), count, to);
  };
}

// Inputs y, x, a, b, indices.
struct LowRank {
  static constexpr const char* kName = "PagedLowRank";

  bool operator==(const LowRank&) const = default;

  static mx::Shape shape(const Arrays& inputs) { return inputs[0].shape(); }

  auto task(const Arrays& inputs, mx::array& out) const {
    const mx::array& y = inputs[0];
    const bool is_in_place = y.is_donatable() && y.flags().row_contiguous;
    if (is_in_place) {
      out.copy_shared_buffer(y);
    } else {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    const Arrays others(inputs.begin() + 1, inputs.end());
    return
        [is_in_place, to = out.data<std::byte>(), bytes = out.nbytes(), y_rows = cpu::DenseRows(y),
         add = terms_task(others, out, out.data<std::byte>())]() mutable {
          cpu::RowBuffer buffer;
          if (!is_in_place && bytes > 0) {
            std::memcpy(to, y_rows.all(buffer), bytes);
          }
          add();
        };
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array &y = inputs[0], index = mx::flatten(inputs[4], s);
    const auto exists = mx::logical_and(mx::greater_equal(index, mx::array(0), s),
                                        mx::less(index, mx::array(inputs[2].shape(0)), s), s);
    const auto chosen = mx::where(exists, index, mx::array(0), s);
    const auto one_by_one = [&](const mx::array& rows) {
      const auto found = mx::astype(mx::reshape(rows, {-1, 1, rows.shape(-1)}, s), mx::float32, s);
      return mx::repeat(found, index.size() / found.shape(0), 0, s);
    };
    const auto factor = [&](size_t i) {
      return mx::astype(mx::take(inputs[i], chosen, 0, s), mx::float32, s);
    };
    const auto first = mx::matmul(one_by_one(inputs[1]), mx::swapaxes(factor(2), 1, 2, s), s);
    const auto rounded = mx::astype(mx::astype(first, y.dtype(), s), mx::float32, s);
    const auto sum = mx::add(one_by_one(y), mx::matmul(rounded, factor(3), s), s);
    const auto found = mx::where(mx::reshape(exists, {-1, 1, 1}, s), sum, one_by_one(y), s);
    return mx::astype(mx::reshape(found, y.shape(), s), y.dtype(), s);
  }
};

// A linear layer and the terms of its rows, as one node of the graph. Inputs are those of the
// layer, of which x is the first, and a, b, indices.
struct AdaptedLinear {
  static constexpr const char* kName = "PagedAdaptedLinear";
  std::shared_ptr<cpu::TaskPrimitive> layer;

  bool operator==(const AdaptedLinear& other) const {
    const mx::Primitive &own = *layer, &theirs = *other.layer;
    return typeid(own) == typeid(theirs) && own.is_equivalent(theirs);
  }

  static Arrays of_layer(const Arrays& inputs) { return {inputs.begin(), inputs.end() - 3}; }

  static Arrays of_terms(const Arrays& inputs) {
    Arrays found = {inputs[0]};
    found.insert(found.end(), inputs.end() - 3, inputs.end());
    return found;
  }

  static mx::Shape shape(const Arrays& inputs) {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs.end()[-2].shape(2);
    return shape;
  }

  // One task for both: a group of nodes dispatches its tasks later, all in one.
  auto task(const Arrays& inputs, mx::array& out) const {
    Arrays outputs = {out};
    auto of_base = layer->task(of_layer(inputs), outputs);
    return [of_base = std::move(of_base),
            add = terms_task(of_terms(inputs), out, out.data<std::byte>())]() mutable {
      of_base();
      add();
    };
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    Arrays given = of_terms(inputs);
    given.insert(given.begin(),
                 mx::array(shape(inputs), inputs[0].dtype(), layer, of_layer(inputs)));
    return LowRank{}.composed(given, s);
  }
};

// Whether y is the output of a linear layer of this package for x on this stream, not yet computed.
bool is_linear_of(const mx::array& y, const mx::array& x, mx::Stream stream) {
  return y.has_primitive() && y.status() == mx::array::Status::unscheduled &&
         std::string_view(y.primitive().name()) == "PagedLinear" && y.inputs()[0].id() == x.id() &&
         y.primitive().stream() == stream;
}

}  // namespace

mx::array low_rank_terms(const mx::array& y, const mx::array& x, const mx::array& a,
                         const mx::array& b, const mx::array& indices, mx::StreamOrDevice stream) {
  const char* op = "low_rank_terms";
  check_floating(op, "y", y);
  const auto has_dtype = [&](const char* name, const mx::array& array) {
    require(array.dtype() == y.dtype(), op, "y has dtype ", y.dtype(), " but ", name, " has ",
            array.dtype(), ": expected the same");
  };
  has_dtype("x", x), has_dtype("a", a), has_dtype("b", b);
  require(a.ndim() == 3 && b.ndim() == 3 && a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1),
          op, "a has shape ", a.shape(), " and b ", b.shape(),
          ": expected [S, r, D] and [S, r, O]");
  require(0 < a.shape(1) && a.shape(1) <= cpu::kMostTerms && a.shape(2) > 0, op, "a has shape ",
          a.shape(), ": expected a rank from 1 to ", cpu::kMostTerms, " and inputs");
  require(x.ndim() >= 1 && x.shape(-1) == a.shape(2), op, "x has shape ", x.shape(),
          ": expected [..., ", a.shape(2), "]");
  require(y.ndim() >= 1 && y.shape(-1) == b.shape(2), op, "y has shape ", y.shape(),
          ": expected [..., ", b.shape(2), "]");
  require(indices.dtype() == mx::int32, op, "indices have dtype ", indices.dtype(),
          ": expected int32");
  const size_t rows = y.size() / std::max(1, y.shape(-1)), rows_of_x = x.size() / x.shape(-1);
  require(indices.size() == rows || y.size() == 0, op, "indices are ", indices.size(),
          ": expected one for each of ", rows, " rows of y");
  require(y.size() == 0 || (rows_of_x > 0 && rows % rows_of_x == 0), op, "x has ", rows_of_x,
          " rows: expected ", rows, ", or a divisor of it");
  const mx::Stream own = mx::to_stream(stream);
  if (is_linear_of(y, x, own)) {
    Arrays inputs = y.inputs();
    inputs.insert(inputs.end(), {a, b, indices});
    const AdaptedLinear op = {std::static_pointer_cast<cpu::TaskPrimitive>(y.primitive_ptr())};
    return mx::array(y.shape(), y.dtype(), std::make_shared<LayerPrimitive<AdaptedLinear>>(own, op),
                     std::move(inputs));
  }
  auto primitive = std::make_shared<LayerPrimitive<LowRank>>(own, LowRank{});
  return mx::array(y.shape(), y.dtype(), std::move(primitive), {y, x, a, b, indices});
}

}  // namespace mlx_paged

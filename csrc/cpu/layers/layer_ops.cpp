#include "csrc/cpu/layers/layer_ops.h"

#include <bit>
#include <cmath>
#include <memory>
#include <numbers>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/layers/layer_primitives.h"
#include "csrc/validate.h"
#include "mlx/allocator.h"
#include "mlx/fast.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

const cpu::LayerKernels& kernels_for(const mx::array& out) {
  return cpu::active_kernel().layers[static_cast<int>(cpu::dtype_of(out))];
}

std::byte* allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<std::byte>();
}

// Reuses the buffer of one of the first `count` inputs, of the same size, if nothing else needs
// that buffer.
std::byte* allocate_in_place(const Arrays& inputs, size_t count, mx::array& out) {
  for (size_t i = 0; i < count; ++i) {
    const mx::array& input = inputs[i];
    if (input.size() == out.size() && input.flags().row_contiguous && input.is_donatable()) {
      out.copy_shared_buffer(input);
      return out.data<std::byte>();
    }
  }
  return allocate(out);
}

// The second input, which may be absent.
OptionalArray second(const Arrays& inputs) {
  return inputs.size() > 1 ? OptionalArray(inputs[1]) : OptionalArray();
}

// x, or what its second input, the words of allowed bits, leaves of it: -inf elsewhere.
mx::array allowed_of(const Arrays& inputs, mx::Stream s) {
  const mx::array& x = inputs[0];
  if (inputs.size() == 1) {
    return x;
  }
  const mx::array places = mx::arange(0, 8, mx::uint8, s);  // of the bits of a word's four bytes
  const mx::array one(1, mx::uint8), forbidden(-INFINITY, x.dtype());
  const mx::array bytes = mx::view(mx::contiguous(inputs[1], false, s), mx::uint8, s);
  mx::array bits = mx::right_shift(mx::expand_dims(bytes, -1, s), places, s);
  bits = mx::flatten(mx::bitwise_and(bits, one, s), -2, -1, s);
  bits = mx::slice(bits, {0, 0}, x.shape(), s);
  return mx::where(mx::equal(bits, one, s), x, forbidden, s);
}

// Calls compute(x, y, to) for each row of the first input, of the second one and of the output. The
// second input may have one row for all, or be absent: then y is null.
template <typename Compute>
auto for_rows(const Arrays& inputs, const mx::array& out, std::byte* to, Compute compute) {
  const cpu::DenseRows x(inputs[0]);
  const auto y = inputs.size() > 1 ? std::optional(cpu::DenseRows(inputs[1])) : std::nullopt;
  const int64_t row_bytes = x.count() ? out.nbytes() / x.count() : 0;
  return [x, y, to, row_bytes, compute](int64_t begin, int64_t end) {
    cpu::RowBuffer buffer, other_buffer;
    for (int64_t r = begin; r < end; ++r) {
      const void* other = y ? y->row(y->count() > 1 ? r : 0, other_buffer) : nullptr;
      compute(x.row(r, buffer), other, to + r * row_bytes);
    }
  };
}

// An op on the rows of its first input. The kernels of ops compute rows [begin, end).
struct RowOp {
  bool operator==(const RowOp&) const = default;

  static int64_t count(const mx::array& x) { return cpu::DenseRows(x).count(); }
  static mx::Shape shape(const Arrays& inputs) { return inputs[0].shape(); }
};

// Inputs x and, if there is one, the weight.
struct RmsNorm : RowOp {
  static constexpr const char* kName = "PagedRmsNorm";
  float eps;

  bool operator==(const RmsNorm&) const = default;

  auto kernel(const Arrays& inputs, mx::array& out) const {
    return for_rows(inputs, out, allocate(out),
                    [&kernels = kernels_for(out), eps = eps, width = inputs[0].shape(-1)](
                        const void* x, const void* weight, void* to) {
                      kernels.rms_norm(x, weight, eps, width, to);
                    });
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    return mx::fast::rms_norm(inputs[0], second(inputs), eps, s);
  }
};

// Inputs x, offset, frequencies. All heads of one token share its angles, so one thread rotates
// them.
struct Rope : RowOp {
  static constexpr const char* kName = "PagedRope";
  float scale;
  bool traditional;

  bool operator==(const Rope&) const = default;

  static int64_t count(const mx::array& x) { return int64_t{x.shape(0)} * x.shape(-2); }

  auto kernel(const Arrays& inputs, mx::array& out) const {
    const mx::array &x = inputs[0], &offsets = inputs[1];
    const int64_t heads = x.ndim() == 4 ? x.shape(1) : 1, tokens = x.shape(-2);
    return [&kernels = kernels_for(out), rows = cpu::DenseRows(x),
            frequencies = cpu::DenseRows(inputs[2]), offset = offsets.data<int32_t>(),
            offset_stride = offsets.size() > 1 ? offsets.strides(0) : 0, heads, tokens, op = *this,
            to = allocate(out)](int64_t begin, int64_t end) {
      const int32_t pairs = frequencies.width();
      cpu::RowBuffer buffer, frequency_buffer;
      std::vector<float> sines(pairs), cosines(pairs);
      const auto* omega = static_cast<const float*>(frequencies.row(0, frequency_buffer));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t b = i / tokens, l = i % tokens;
        const auto first = static_cast<float>(offset[b * offset_stride]);
        const float position = (static_cast<float>(l) + first) * op.scale;
        kernels.angles(position, omega, pairs, sines.data(), cosines.data());
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t r = (b * heads + h) * tokens + l;
          kernels.rotate(rows.row(r, buffer), sines.data(), cosines.data(), pairs, rows.width(),
                         op.traditional, to + r * rows.row_bytes());
        }
      }
    };
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    return mx::fast::rope(inputs[0], 2 * inputs[2].shape(0), traditional, std::nullopt, scale,
                          inputs[1], mx::reciprocal(inputs[2], s), s);
  }
};

// Inputs x and, if there is one, the factor.
struct Activate : RowOp {
  static constexpr const char* kName = "PagedActivate";
  cpu::Activation activation;

  bool operator==(const Activate&) const = default;

  auto kernel(const Arrays& inputs, mx::array& out) const {
    return for_rows(inputs, out, allocate_in_place(inputs, inputs.size(), out),
                    [&kernels = kernels_for(out), activation = activation,
                     width = inputs[0].ndim() ? inputs[0].shape(-1) : 1](
                        const void* x, const void* factor, void* to) {
                      kernels.activate(activation, x, factor, width, to);
                    });
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array& x = inputs[0];
    const auto number = [&](double value) { return mx::array(value, x.dtype()); };
    mx::array gate = mx::sigmoid(x, s);
    if (activation == cpu::Activation::kGeluApprox) {
      const mx::array cube = mx::multiply(number(0.044715), mx::power(x, number(3), s), s);
      const mx::array inner =
          mx::multiply(number(std::sqrt(2 * std::numbers::inv_pi)), mx::add(x, cube, s), s);
      gate = mx::multiply(number(0.5), mx::add(number(1), mx::tanh(inner, s), s), s);
    }
    const mx::array active = mx::multiply(x, gate, s);
    return inputs.size() > 1 ? mx::multiply(active, inputs[1], s) : active;
  }
};

// Inputs x and, if there are any, the words of allowed bits; the output has two numbers for a row.
struct Likeliest : RowOp {
  static constexpr const char* kName = "PagedLikeliest";

  static mx::Shape shape(const Arrays& inputs) {
    mx::Shape shape = inputs[0].shape();
    shape.back() = 2;
    return shape;
  }

  auto kernel(const Arrays& inputs, mx::array& out) const {
    return for_rows(inputs, out, allocate(out),
                    [&kernels = kernels_for(inputs[0]), width = inputs[0].shape(-1)](
                        const void* x, const void* allowed, std::byte* to) {
                      kernels.likeliest(x, allowed, width, reinterpret_cast<float*>(to));
                    });
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array kept = allowed_of(inputs, s), total = mx::logsumexp(kept, -1, true, s);
    const mx::array index = mx::argmax(mx::subtract(kept, total, s), -1, true, s);
    return mx::concatenate({mx::astype(total, mx::float32, s), mx::astype(index, mx::float32, s)},
                           -1, s);
  }
};

// Inputs x and the words of allowed bits.
struct Mask : RowOp {
  static constexpr const char* kName = "PagedMask";

  auto kernel(const Arrays& inputs, mx::array& out) const {
    return for_rows(
        inputs, out, allocate_in_place(inputs, 1, out),
        [&kernels = kernels_for(out), width = inputs[0].shape(-1)](
            const void* x, const void* allowed, void* to) { kernels.mask(x, allowed, width, to); });
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const { return allowed_of(inputs, s); }
};

struct Hadamard : RowOp {
  static constexpr const char* kName = "PagedHadamard";

  auto kernel(const Arrays& inputs, mx::array& out) const {
    return for_rows(inputs, out, allocate_in_place(inputs, 1, out),
                    [&kernels = kernels_for(out), width = inputs[0].shape(-1)](
                        const void* x, const void*, void* to) { kernels.hadamard(x, width, to); });
  }

  mx::array composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array& x = inputs[0];
    Arrays parts;
    for (int first = 0, width = x.shape(-1); x.size() && first < width;
         first += parts.back().shape(-1)) {
      mx::Shape start(x.ndim(), 0), stop = x.shape();
      start.back() = first;
      stop.back() = first + static_cast<int>(std::bit_floor(static_cast<unsigned>(width - first)));
      parts.push_back(mx::hadamard_transform(mx::slice(x, start, stop, s), std::nullopt, s));
    }
    return parts.empty() ? x : mx::concatenate(parts, -1, s);
  }
};

// The output has x's dtype, or another one.
template <typename Op>
mx::array make(Op op, Arrays inputs, mx::StreamOrDevice stream,
               std::optional<mx::Dtype> other = std::nullopt) {
  auto primitive = std::make_shared<LayerPrimitive<Op>>(mx::to_stream(stream), op);
  const mx::Shape shape = Op::shape(inputs);
  const mx::Dtype dtype = other.value_or(inputs[0].dtype());
  return mx::array(shape, dtype, std::move(primitive), std::move(inputs));
}

// Adds the words of allowed bits of x, which is the first input, if there are any.
void add_allowed(const char* op, const OptionalArray& allowed, Arrays& inputs) {
  const mx::array& x = inputs[0];
  if (!allowed) {
    return;
  }
  require(x.ndim() == 2, op, "x has ", x.ndim(), " axes: expected 2");
  const mx::Shape shape = {x.shape(0), (x.shape(1) + 31) / 32};
  require(allowed->dtype() == mx::uint32 && allowed->shape() == shape, op, "allowed has shape ",
          allowed->shape(), " and dtype ", allowed->dtype(), ": expected ", shape, " of uint32");
  inputs.push_back(*allowed);
}

}  // namespace

mx::array rms_norm(const mx::array& x, const OptionalArray& weight, float eps,
                   mx::StreamOrDevice stream) {
  check_floating("rms_norm", "x", x);
  require(x.ndim() >= 1, "rms_norm", "x is a scalar: expected at least one axis");
  Arrays inputs = {x};
  if (weight) {
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1), "rms_norm", "weight has ",
            weight->size(), " elements in ", weight->ndim(), " axes: expected x's last axis, ",
            x.shape(-1));
    require(weight->dtype() == x.dtype(), "rms_norm", "weight has dtype ", weight->dtype(),
            " but x has ", x.dtype(), ": expected the same");
    inputs.push_back(*weight);
  }
  return make(RmsNorm{{}, eps}, std::move(inputs), stream);
}

mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& frequencies,
               float scale, bool traditional, mx::StreamOrDevice stream) {
  check_floating("rope", "x", x);
  require(x.ndim() == 3 || x.ndim() == 4, "rope", "x has ", x.ndim(), " axes: expected 3 or 4");
  require(frequencies.ndim() == 1 && frequencies.dtype() == mx::float32, "rope",
          "frequencies has dtype ", frequencies.dtype(), " and ", frequencies.ndim(),
          " axes: expected float32 and one");
  require(frequencies.size() > 0 && 2 * frequencies.shape(0) <= x.shape(-1), "rope",
          "frequencies has ", frequencies.size(),
          " elements: expected 1 to half of x's last axis, ", x.shape(-1) / 2);
  require(mx::issubdtype(offset.dtype(), mx::integer), "rope", "offset has dtype ", offset.dtype(),
          ": expected integers");
  require(offset.ndim() <= 1 && (offset.size() == 1 || offset.shape(0) == x.shape(0)), "rope",
          "offset has ", offset.size(), " elements in ", offset.ndim(),
          " axes: expected one, or one for each of ", x.shape(0), " sequences");
  const mx::array offsets = mx::astype(offset, mx::int32, stream);
  return make(Rope{{}, scale, traditional}, {x, offsets, frequencies}, stream);
}

mx::array activate(const mx::array& x, const OptionalArray& factor, cpu::Activation activation,
                   mx::StreamOrDevice stream) {
  check_floating("activate", "x", x);
  Arrays inputs = {x};
  if (factor) {
    require(factor->shape() == x.shape() && factor->dtype() == x.dtype(), "activate", "factor has ",
            factor->size(), " elements of ", factor->dtype(), ": expected x's shape and dtype, ",
            x.size(), " elements of ", x.dtype());
    inputs.push_back(*factor);
  }
  return make(Activate{{}, activation}, std::move(inputs), stream);
}

mx::array likeliest(const mx::array& x, const OptionalArray& allowed, mx::StreamOrDevice stream) {
  check_floating("likeliest", "x", x);
  require(x.ndim() >= 1 && x.shape(-1) > 0 && x.shape(-1) <= 1 << 24, "likeliest", "x has shape ",
          x.shape(), ": expected 1 to 2^24 elements on its last axis");
  Arrays inputs = {x};
  add_allowed("likeliest", allowed, inputs);
  return make(Likeliest{}, std::move(inputs), stream, mx::float32);
}

mx::array mask(const mx::array& x, const mx::array& allowed, mx::StreamOrDevice stream) {
  check_floating("mask", "x", x);
  Arrays inputs = {x};
  add_allowed("mask", allowed, inputs);
  const mx::Stream on = mx::to_stream(stream);
  return on.device == mx::Device::cpu ? make(Mask{}, inputs, on) : allowed_of(inputs, on);
}

mx::array hadamard(const mx::array& x, mx::StreamOrDevice stream) {
  check_floating("hadamard", "x", x);
  require(x.ndim() >= 1 && x.shape(-1) <= cpu::kMostTransformed, "hadamard", "x has shape ",
          x.shape(), ": expected at most ", cpu::kMostTransformed, " elements on its last axis");
  const mx::Stream on = mx::to_stream(stream);
  return on.device == mx::Device::cpu ? make(Hadamard{}, {x}, on) : Hadamard{}.composed({x}, on);
}

}  // namespace mlx_paged

#include "csrc/cpu/layers/layer_primitives.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/layers/dense_rows.h"
#include "csrc/cpu/mlx_args.h"
#include "csrc/cpu/thread_pool.h"
#include "mlx/allocator.h"

namespace mlx_paged {

namespace {

// Elements of one task. For fewer elements, waking a thread costs more than it saves.
constexpr int64_t kElementsOfTask = 1 << 16;

// Schedules the computation of `count` rows, on several threads if that pays: compute(begin, end)
// computes the rows [begin, end).
template <typename Compute>
void dispatch(mx::Stream stream, const Arrays& inputs, Arrays& outputs, int64_t count,
              int64_t elements_each, Compute compute) {
  const int64_t range = std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, elements_each));
  cpu::encoder_for(stream, inputs, outputs).dispatch([count, range, compute = std::move(compute)] {
    cpu::parallel_for((count + range - 1) / range,
                      [&](int64_t i) { compute(i * range, std::min(count, (i + 1) * range)); });
  });
}

const cpu::LayerKernels& kernels_for(const mx::array& out) {
  return cpu::active_kernel().layers[static_cast<int>(cpu::dtype_of(out))];
}

std::byte* allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<std::byte>();
}

// Reuses the buffer of an input of the same size, if nothing else needs that buffer.
std::byte* allocate_in_place(const Arrays& inputs, mx::array& out) {
  for (const mx::array& input : inputs) {
    if (input.size() == out.size() && input.flags().row_contiguous && input.is_donatable()) {
      out.copy_shared_buffer(input);
      return out.data<std::byte>();
    }
  }
  return allocate(out);
}

std::optional<cpu::DenseRows> optional_rows(const Arrays& inputs, size_t index) {
  return inputs.size() > index ? std::optional(cpu::DenseRows(inputs[index])) : std::nullopt;
}

}  // namespace

void LayerPrimitive::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[mlx_paged.layers] this op runs on CPUs only");
}

std::vector<mx::Shape> LayerPrimitive::output_shapes(const Arrays& inputs) {
  return {inputs[0].shape()};
}

bool RmsNorm::is_equivalent(const mx::Primitive& other) const {
  return eps_ == static_cast<const RmsNorm&>(other).eps_;
}

void RmsNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu::DenseRows x(inputs[0]);
  dispatch(stream(), inputs, outputs, x.count(), x.width(),
           [&kernels = kernels_for(outputs[0]), x, weight = optional_rows(inputs, 1), eps = eps_,
            out = allocate(outputs[0])](int64_t begin, int64_t end) {
             cpu::RowBuffer buffer, weight_buffer;
             const void* scale = weight ? weight->row(0, weight_buffer) : nullptr;
             for (int64_t r = begin; r < end; ++r) {
               kernels.rms_norm(x.row(r, buffer), scale, eps, x.width(), out + r * x.row_bytes());
             }
           });
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  const auto& rope = static_cast<const Rope&>(other);
  return scale_ == rope.scale_ && traditional_ == rope.traditional_;
}

// All heads of one token share its angles, so one thread rotates them.
void Rope::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const mx::array &x = inputs[0], &offsets = inputs[1];
  const int64_t heads = x.ndim() == 4 ? x.shape(1) : 1, tokens = x.shape(-2);
  dispatch(
      stream(), inputs, outputs, x.shape(0) * tokens, heads * x.shape(-1),
      [&kernels = kernels_for(outputs[0]), rows = cpu::DenseRows(x),
       frequencies = cpu::DenseRows(inputs[2]), offset = offsets.data<int32_t>(),
       offset_stride = offsets.size() > 1 ? offsets.strides(0) : 0, heads, tokens, scale = scale_,
       traditional = traditional_, out = allocate(outputs[0])](int64_t begin, int64_t end) {
        const int32_t pairs = frequencies.width();
        cpu::RowBuffer buffer, frequency_buffer;
        std::vector<float> sines(pairs), cosines(pairs);
        const auto* omega = static_cast<const float*>(frequencies.row(0, frequency_buffer));
        for (int64_t i = begin; i < end; ++i) {
          const int64_t b = i / tokens, l = i % tokens;
          const auto first = static_cast<float>(offset[b * offset_stride]);
          const float position = (static_cast<float>(l) + first) * scale;
          kernels.angles(position, omega, pairs, sines.data(), cosines.data());
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t r = (b * heads + h) * tokens + l;
            kernels.rotate(rows.row(r, buffer), sines.data(), cosines.data(), pairs, rows.width(),
                           traditional, out + r * rows.row_bytes());
          }
        }
      });
}

bool Activate::is_equivalent(const mx::Primitive& other) const {
  return activation_ == static_cast<const Activate&>(other).activation_;
}

void Activate::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu::DenseRows x(inputs[0]);
  dispatch(stream(), inputs, outputs, x.count(), x.width(),
           [&kernels = kernels_for(outputs[0]), x, factor = optional_rows(inputs, 1),
            activation = activation_,
            out = allocate_in_place(inputs, outputs[0])](int64_t begin, int64_t end) {
             cpu::RowBuffer buffer, factor_buffer;
             for (int64_t r = begin; r < end; ++r) {
               const void* by = factor ? factor->row(r, factor_buffer) : nullptr;
               kernels.activate(activation, x.row(r, buffer), by, x.width(),
                                out + r * x.row_bytes());
             }
           });
}

std::vector<mx::Shape> LogSumExp::output_shapes(const Arrays& inputs) {
  mx::Shape shape = inputs[0].shape();
  shape.back() = 1;
  return {shape};
}

void LogSumExp::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu::DenseRows x(inputs[0]);
  dispatch(stream(), inputs, outputs, x.count(), x.width(),
           [&kernels = kernels_for(outputs[0]), x, out = allocate(outputs[0])](int64_t begin,
                                                                               int64_t end) {
             cpu::RowBuffer buffer;
             for (int64_t r = begin; r < end; ++r) {
               kernels.log_sum_exp(x.row(r, buffer), x.width(), out + r * x.itemsize());
             }
           });
}

}  // namespace mlx_paged

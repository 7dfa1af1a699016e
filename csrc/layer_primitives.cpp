#include "csrc/layer_primitives.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include "csrc/cpu/cpu_features.h"
#include "csrc/cpu/dense_rows.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/dtypes.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

namespace {

// Below this many elements waking a thread costs more than it saves; a thread takes so many.
constexpr int64_t kElementsOfTask = 1 << 16;

// Calls body(begin, end) for ranges that make up [0, count), on several threads if that pays.
template <typename Body>
void for_ranges(int64_t count, int64_t elements_each, const Body& body) {
  const int64_t range = std::max<int64_t>(1, kElementsOfTask / std::max<int64_t>(1, elements_each));
  cpu::parallel_for((count + range - 1) / range,
                    [&](int64_t i) { body(i * range, std::min(count, (i + 1) * range)); });
}

// Allocates the output, in the buffer of an input of the same size that nobody else needs.
void allocate(const std::vector<mx::array>& inputs, mx::array& out, bool in_place) {
  for (const mx::array& input : inputs) {
    if (in_place && input.size() == out.size() && input.flags().row_contiguous &&
        input.is_donatable()) {
      out.copy_shared_buffer(input);
      return;
    }
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

template <typename Task>
void dispatch(mx::Stream stream, const std::vector<mx::array>& inputs, mx::array& out, Task task) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  encoder.set_output_array(out);
  encoder.dispatch(std::move(task));
}

}  // namespace

void LayerPrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[mlx_paged.layers] this op runs on CPUs only");
}

std::vector<mx::Shape> LayerPrimitive::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape()};
}

bool RmsNorm::is_equivalent(const mx::Primitive& other) const {
  return eps_ == static_cast<const RmsNorm&>(other).eps_;
}

void RmsNorm::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(inputs, outputs[0], false);
  const cpu::DenseRows x(inputs[0]);
  const cpu::DenseRows weight(inputs.back());
  const bool has_weight = inputs.size() > 1;
  auto* out = outputs[0].data<std::byte>();
  dispatch(stream(), inputs, outputs[0],
           [x, weight, has_weight, out, eps = eps_, dtype = cpu_dtype(outputs[0].dtype())] {
             const auto& kernels = cpu::active_kernel().layers;
             for_ranges(x.count(), x.width(), [&](int64_t begin, int64_t end) {
               cpu::RowBuffer buffer;
               cpu::RowBuffer weight_buffer;
               const void* scale = has_weight ? weight.row(0, weight_buffer) : nullptr;
               for (int64_t r = begin; r < end; ++r) {
                 kernels.rms_norm(dtype, x.row(r, buffer), scale, eps, x.width(),
                                  out + r * x.row_bytes());
               }
             });
           });
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  const auto& rope = static_cast<const Rope&>(other);
  return scale_ == rope.scale_ && traditional_ == rope.traditional_;
}

void Rope::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(inputs, outputs[0], false);
  const cpu::DenseRows x(inputs[0]);
  const cpu::DenseRows frequencies(inputs[2]);
  const auto* offsets = inputs[1].data<int32_t>();
  const int64_t offset_stride = inputs[1].size() > 1 ? inputs[1].strides(0) : 0;
  const int64_t batch = inputs[0].shape(0);
  const int64_t tokens = inputs[0].shape(-2);
  const int64_t heads = inputs[0].ndim() == 4 ? inputs[0].shape(1) : 1;
  auto* out = outputs[0].data<std::byte>();
  dispatch(stream(), inputs, outputs[0],
           [=, scale = scale_, traditional = traditional_, dtype = cpu_dtype(outputs[0].dtype())] {
             const auto& kernels = cpu::active_kernel().layers;
             const auto pairs = static_cast<int32_t>(frequencies.width());
             for_ranges(batch * tokens, heads * x.width(), [&](int64_t begin, int64_t end) {
               cpu::RowBuffer buffer;
               cpu::RowBuffer frequency_buffer;
               std::vector<float> sines(pairs);
               std::vector<float> cosines(pairs);
               const auto* omega = static_cast<const float*>(frequencies.row(0, frequency_buffer));
               for (int64_t i = begin; i < end; ++i) {
                 const int64_t b = i / tokens;
                 const int64_t l = i % tokens;
                 const float position =
                     (static_cast<float>(l) + static_cast<float>(offsets[b * offset_stride])) *
                     scale;
                 kernels.angles(dtype, position, omega, pairs, sines.data(), cosines.data());
                 for (int64_t h = 0; h < heads; ++h) {
                   const int64_t r = (b * heads + h) * tokens + l;
                   kernels.rotate(dtype, x.row(r, buffer), sines.data(), cosines.data(), pairs,
                                  x.width(), traditional, out + r * x.row_bytes());
                 }
               }
             });
           });
}

bool Activate::is_equivalent(const mx::Primitive& other) const {
  return activation_ == static_cast<const Activate&>(other).activation_;
}

void Activate::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(inputs, outputs[0], true);
  const cpu::DenseRows x(inputs[0]);
  const cpu::DenseRows factor(inputs.back());
  const bool has_factor = inputs.size() > 1;
  auto* out = outputs[0].data<std::byte>();
  dispatch(stream(), inputs, outputs[0],
           [=, activation = activation_, dtype = cpu_dtype(outputs[0].dtype())] {
             const auto& kernels = cpu::active_kernel().layers;
             for_ranges(x.count(), x.width(), [&](int64_t begin, int64_t end) {
               cpu::RowBuffer buffer;
               cpu::RowBuffer factor_buffer;
               for (int64_t r = begin; r < end; ++r) {
                 kernels.activate(dtype, activation, x.row(r, buffer),
                                  has_factor ? factor.row(r, factor_buffer) : nullptr, x.width(),
                                  out + r * x.row_bytes());
               }
             });
           });
}

std::vector<mx::Shape> LogSumExp::output_shapes(const std::vector<mx::array>& inputs) {
  mx::Shape shape = inputs[0].shape();
  shape.back() = 1;
  return {shape};
}

void LogSumExp::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate(inputs, outputs[0], false);
  const cpu::DenseRows x(inputs[0]);
  auto* out = outputs[0].data<std::byte>();
  const auto itemsize = static_cast<int64_t>(outputs[0].itemsize());
  dispatch(stream(), inputs, outputs[0], [=, dtype = cpu_dtype(outputs[0].dtype())] {
    const auto& kernels = cpu::active_kernel().layers;
    for_ranges(x.count(), x.width(), [&](int64_t begin, int64_t end) {
      cpu::RowBuffer buffer;
      for (int64_t r = begin; r < end; ++r) {
        kernels.log_sum_exp(dtype, x.row(r, buffer), x.width(), out + r * itemsize);
      }
    });
  });
}

}  // namespace mlx_paged

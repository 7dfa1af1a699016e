#include "csrc/cpu/layers/layer_primitives.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>

#include "csrc/cpu/layers/layer_rows.h"
#include "csrc/cpu/mlx_args.h"
#include "csrc/cpu/thread_pool.h"
#include "mlx/allocator.h"

namespace mlx_paged {

namespace {

// Elements of one task. For fewer elements, waking a thread costs more than it saves.
constexpr int64_t kElementsOfTask = 1 << 16;

// Computes all rows (layer_rows.h), on several threads if that pays.
template <typename Rows>
void compute(const Rows& rows) {
  const int64_t count = rows.count();
  const int64_t elements_each = std::max<int64_t>(1, rows.elements_each());
  const int64_t range = std::max<int64_t>(1, kElementsOfTask / elements_each);
  cpu::parallel_for((count + range - 1) / range,
                    [&](int64_t i) { rows.compute(i * range, std::min(count, (i + 1) * range)); });
}

template <typename Rows>
void dispatch(mx::Stream stream, const std::vector<mx::array>& inputs,
              std::vector<mx::array>& outputs, Rows rows) {
  cpu::encoder_for(stream, inputs, outputs).dispatch([rows = std::move(rows)] { compute(rows); });
}

std::byte* allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  return out.data<std::byte>();
}

// Reuses the buffer of an input of the same size, if nothing else needs that buffer.
std::byte* allocate_in_place(const std::vector<mx::array>& inputs, mx::array& out) {
  for (const mx::array& input : inputs) {
    if (input.size() == out.size() && input.flags().row_contiguous && input.is_donatable()) {
      out.copy_shared_buffer(input);
      return out.data<std::byte>();
    }
  }
  return allocate(out);
}

std::optional<cpu::DenseRows> optional_rows(const std::vector<mx::array>& inputs, size_t index) {
  return inputs.size() > index ? std::optional(cpu::DenseRows(inputs[index])) : std::nullopt;
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
  std::byte* out = allocate(outputs[0]);
  dispatch(stream(), inputs, outputs,
           cpu::RmsNormRows{.dtype = cpu::dtype_of(outputs[0]),
                            .x = cpu::DenseRows(inputs[0]),
                            .weight = optional_rows(inputs, 1),
                            .eps = eps_,
                            .out = out});
}

bool Rope::is_equivalent(const mx::Primitive& other) const {
  const auto& rope = static_cast<const Rope&>(other);
  return scale_ == rope.scale_ && traditional_ == rope.traditional_;
}

void Rope::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  std::byte* out = allocate(outputs[0]);
  const mx::array& x = inputs[0];
  const mx::array& offsets = inputs[1];
  dispatch(stream(), inputs, outputs,
           cpu::RopeRows{.dtype = cpu::dtype_of(outputs[0]),
                         .x = cpu::DenseRows(x),
                         .frequencies = cpu::DenseRows(inputs[2]),
                         .offsets = offsets.data<int32_t>(),
                         .offset_stride = offsets.size() > 1 ? offsets.strides(0) : 0,
                         .batch = x.shape(0),
                         .heads = x.ndim() == 4 ? x.shape(1) : 1,
                         .tokens = x.shape(-2),
                         .scale = scale_,
                         .traditional = traditional_,
                         .out = out});
}

bool Activate::is_equivalent(const mx::Primitive& other) const {
  return activation_ == static_cast<const Activate&>(other).activation_;
}

void Activate::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  std::byte* out = allocate_in_place(inputs, outputs[0]);
  dispatch(stream(), inputs, outputs,
           cpu::ActivateRows{.dtype = cpu::dtype_of(outputs[0]),
                             .activation = activation_,
                             .x = cpu::DenseRows(inputs[0]),
                             .factor = optional_rows(inputs, 1),
                             .out = out});
}

std::vector<mx::Shape> LogSumExp::output_shapes(const std::vector<mx::array>& inputs) {
  mx::Shape shape = inputs[0].shape();
  shape.back() = 1;
  return {shape};
}

void LogSumExp::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  std::byte* out = allocate(outputs[0]);
  dispatch(stream(), inputs, outputs,
           cpu::LogSumExpRows{
               .dtype = cpu::dtype_of(outputs[0]), .x = cpu::DenseRows(inputs[0]), .out = out});
}

}  // namespace mlx_paged

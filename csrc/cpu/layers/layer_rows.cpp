#include "csrc/cpu/layers/layer_rows.h"

#include <vector>

#include "csrc/cpu/cpu_features.h"

namespace mlx_paged::cpu {

void RmsNormRows::compute(int64_t begin, int64_t end) const {
  const LayerKernels& kernels = active_kernel().layers;
  RowBuffer buffer;
  RowBuffer weight_buffer;
  const void* scale = weight ? weight->row(0, weight_buffer) : nullptr;
  for (int64_t r = begin; r < end; ++r) {
    kernels.rms_norm(dtype, x.row(r, buffer), scale, eps, x.width(), out + r * x.row_bytes());
  }
}

float RopeRows::position(int64_t sequence, int64_t token) const {
  const int32_t offset = offsets[sequence * offset_stride];
  return (static_cast<float>(token) + static_cast<float>(offset)) * scale;
}

void RopeRows::compute(int64_t begin, int64_t end) const {
  const LayerKernels& kernels = active_kernel().layers;
  const int32_t pairs = frequencies.width();
  RowBuffer buffer;
  RowBuffer frequency_buffer;
  std::vector<float> sines(pairs);
  std::vector<float> cosines(pairs);
  const auto* omega = static_cast<const float*>(frequencies.row(0, frequency_buffer));
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / tokens;
    const int64_t l = i % tokens;
    kernels.angles(dtype, position(b, l), omega, pairs, sines.data(), cosines.data());
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t r = (b * heads + h) * tokens + l;
      kernels.rotate(dtype, x.row(r, buffer), sines.data(), cosines.data(), pairs, x.width(),
                     traditional, out + r * x.row_bytes());
    }
  }
}

void ActivateRows::compute(int64_t begin, int64_t end) const {
  const LayerKernels& kernels = active_kernel().layers;
  RowBuffer buffer;
  RowBuffer factor_buffer;
  for (int64_t r = begin; r < end; ++r) {
    kernels.activate(dtype, activation, x.row(r, buffer),
                     factor ? factor->row(r, factor_buffer) : nullptr, x.width(),
                     out + r * x.row_bytes());
  }
}

void LogSumExpRows::compute(int64_t begin, int64_t end) const {
  const LayerKernels& kernels = active_kernel().layers;
  RowBuffer buffer;
  for (int64_t r = begin; r < end; ++r) {
    kernels.log_sum_exp(dtype, x.row(r, buffer), x.width(), out + r * x.itemsize());
  }
}

}  // namespace mlx_paged::cpu

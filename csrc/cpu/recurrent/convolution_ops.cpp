#include <algorithm>
#include <memory>

#include "csrc/cpu/recurrent/recurrent_ops.h"
#include "csrc/cpu/recurrent/recurrent_primitive.h"
#include "csrc/validate.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// Inputs x, the weight and the bias, if there is one.
struct DepthwiseConvolution {
  static constexpr const char* kName = "PagedDepthwiseConvolution";
  static constexpr size_t kOutputs = 1;
  bool has_bias;

  bool operator==(const DepthwiseConvolution&) const = default;

  std::pair<std::vector<mx::Shape>, std::vector<mx::Dtype>> forms(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    return {{{x.shape(0), x.shape(1) - inputs[1].shape(1) + 1, x.shape(2)}}, {x.dtype()}};
  }

  auto task(const Arrays& inputs, Arrays& outputs) const {
    const int64_t batch = inputs[0].shape(0), tokens = outputs[0].shape(1);
    cpu::ConvolutionTile whole = {};
    whole.taps = inputs[1].shape(1);
    whole.channels = inputs[0].shape(2);
    std::vector<cpu::SmallArray> biases;
    if (has_bias) {
      biases.emplace_back(inputs[2]);
    }
    return [whole, batch, tokens, x = cpu::Tokens(inputs[0]), weights = cpu::SmallArray(inputs[1]),
            biases = std::move(biases), &kernels = cpu::recurrent_kernels(inputs[0]),
            itemsize = static_cast<int64_t>(outputs[0].itemsize()),
            out = outputs[0].data<std::byte>()]() mutable {
      x.prepare();
      const int64_t channels = whole.channels;
      const std::vector<float> weight = weights.floats();  // [channels, taps]
      const std::vector<float> bias = biases.empty() ? std::vector<float>() : biases[0].floats();
      std::vector<float> by_taps(weight.size());
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t k = 0; k < whole.taps; ++k) {
          by_taps[k * channels + c] = weight[c * whole.taps + k];
        }
      }
      constexpr int64_t kElements = 1 << 15;  // of a tile
      const int64_t each = std::clamp<int64_t>(kElements / channels, 1, tokens);
      const int64_t tiles = (tokens + each - 1) / each;
      const auto compute = [&](int64_t i) {
        const int64_t sequence = i / tiles, first = i % tiles * each;
        cpu::ConvolutionTile tile = whole;
        tile.tokens = std::min(each, tokens - first);
        tile.x = x.at(sequence) + first * x.step() * itemsize;
        tile.x_step = x.step();
        tile.weight = by_taps.data();
        tile.bias = bias.empty() ? nullptr : bias.data();
        tile.out = out + (sequence * tokens + first) * channels * itemsize;
        kernels.convolution(tile);
      };
      const int64_t work = batch * tokens * channels * whole.taps;
      cpu::parallel_for(batch * tiles, compute, work >= cpu::kRecurrentWork);
    };
  }

  Arrays composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array& x = inputs[0];
    const mx::array sum = mx::conv1d(x, inputs[1], 1, 0, 1, x.shape(2), s);
    return {has_bias ? mx::add(sum, inputs[2], s) : sum};
  }
};

}  // namespace

mx::array depthwise_convolution(const mx::array& x, const mx::array& weight,
                                const OptionalArray& bias, mx::StreamOrDevice stream) {
  const char* op = "depthwise_convolution";
  check_floating(op, "x", x);
  require(
      x.ndim() == 3 && weight.ndim() == 3 && weight.shape(0) == x.shape(2) && weight.shape(2) == 1,
      op, "x has shape ", x.shape(), " and weight ", weight.shape(),
      ": expected [B, T, C] and [C, K, 1]");
  require(x.shape(0) > 0 && x.shape(2) > 0 && weight.shape(1) > 0 && x.shape(1) >= weight.shape(1),
          op, "x has shape ", x.shape(), ": expected sequences, channels and at least ",
          weight.shape(1), " tokens");
  Arrays inputs = {x, weight};
  if (bias) {
    const mx::Shape shape = {x.shape(2)};
    require(bias->shape() == shape, op, "bias has shape ", bias->shape(), ": expected ", shape);
    inputs.push_back(*bias);
  }
  for (const mx::array& array : inputs) {
    require(array.dtype() == x.dtype(), op, "x has dtype ", x.dtype(), " but another array has ",
            array.dtype(), ": expected the same");
  }
  return make_recurrent(DepthwiseConvolution{bias.has_value()}, std::move(inputs), stream)[0];
}

}  // namespace mlx_paged

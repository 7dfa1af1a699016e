// Rows of a quantized pool as floating numbers, of MLX's ops.
#include <memory>

#include "csrc/compute_at_once.h"
#include "csrc/cpu/layers/layer_ops.h"
#include "csrc/kv_formats.h"
#include "csrc/ops.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Elements of 6 bits [.., 8 * words / 3], with their sign.
mx::array unpacked_sixes(const mx::array& words, mx::Stream s) {
  const mx::array threes =
      mx::astype(mx::unflatten(mx::view(words, mx::uint8, s), -1, {-1, 3}, s), mx::int32, s);
  const mx::array fours = mx::sum(mx::left_shift(threes, mx::arange(0, 24, 8, mx::int32, s), s), -1,
                                  /* keepdims= */ true, s);
  const mx::array signs = mx::left_shift(fours, mx::arange(26, 2, -6, mx::int32, s), s);
  return mx::flatten(mx::right_shift(signs, mx::array(26), s), -2, -1, s);
}

// Elements of 4 bits [.., 2 * bytes], from 0 to 15.
mx::array unpacked_pairs(const mx::array& bytes, mx::Stream s) {
  const mx::array low = mx::bitwise_and(bytes, mx::array(15, mx::uint8), s),
                  high = mx::right_shift(bytes, mx::array(4, mx::uint8), s);
  return mx::flatten(mx::stack({low, high}, -1, s), -2, -1, s);
}

// Every second element of the last axis, from `first` on.
mx::array every_second(const mx::array& a, int first, mx::Stream s) {
  mx::Shape start(a.ndim(), 0), steps(a.ndim(), 1);
  start.back() = first;
  steps.back() = 2;
  return mx::slice(a, start, a.shape(), steps, s);
}

// Keys or values of a quantized pool as rows of the model's type. One node of the graph: the graph
// of MLX's ops is made when the node is evaluated, which attention over the pool never does. Inputs
// cache, scales, block_tables, runs.
class DequantizedBlocks : public mx::Primitive {
 public:
  DequantizedBlocks(mx::Stream stream, mx::Dtype dtype, bool rotates)
      : mx::Primitive(stream), dtype_(dtype), rotates_(rotates) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override { compute(inputs, outputs[0]); }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override { compute(inputs, outputs[0]); }

  const char* name() const override { return "PoolRead"; }

 private:
  void compute(const Arrays& inputs, mx::array& out) {
    const mx::array tables = leaf_of(inputs[2]), runs = leaf_of(inputs[3]);
    const auto gathered = [&](int i) {
      return gather_blocks(leaf_of(inputs[i]), tables, out.shape(2), runs, stream());
    };
    const mx::array stored = dequantized(gathered(0), gathered(1), dtype_, stream());
    const mx::array rows = rotates_ ? hadamard(stored, stream()) : stored;
    compute_at_once(rows, inputs, stream());
    out.copy_shared_buffer(rows);
  }

  mx::Dtype dtype_;
  bool rotates_;
};

}  // namespace

mx::array dequantized(const mx::array& cache, const mx::array& scales, mx::Dtype dtype,
                      mx::StreamOrDevice stream) {
  const mx::Stream s = mx::to_stream(stream);
  const mx::array factors = mx::astype(scales, mx::float32, s);
  if (!is_pairs(cache)) {
    const mx::array elements = is_sixes(cache) ? unpacked_sixes(cache, s) : cache;
    return mx::astype(mx::multiply(mx::astype(elements, mx::float32, s), factors, s), dtype, s);
  }
  const mx::array nibbles = mx::astype(unpacked_pairs(cache, s), mx::float32, s);
  const mx::array groups =
      mx::floor_divide(mx::arange(0, nibbles.shape(-1), mx::int32, s), mx::array(kValueGroup), s);
  const auto of_elements = [&](int first) {
    return mx::take(every_second(factors, first, s), groups, -1, s);
  };
  const mx::array scaled = mx::multiply(nibbles, of_elements(0), s);
  return mx::astype(mx::add(scaled, of_elements(1), s), dtype, s);
}

mx::array dequantized_blocks(const mx::array& cache, const mx::array& scales,
                             const mx::array& block_tables, int num_tokens,
                             const mx::array& head_runs, mx::Dtype dtype, bool rotates) {
  return mx::array({block_tables.shape(0), cache.shape(0), num_tokens, dim_of(cache)}, dtype,
                   std::make_shared<DequantizedBlocks>(mx::to_stream({}), dtype, rotates),
                   {cache, scales, block_tables, head_runs});
}

}  // namespace mlx_paged

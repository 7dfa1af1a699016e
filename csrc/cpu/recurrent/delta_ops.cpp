#include <algorithm>
#include <memory>

#include "csrc/cpu/recurrent/recurrent_ops.h"
#include "csrc/cpu/recurrent/recurrent_primitive.h"
#include "csrc/validate.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// Inputs q, k, v, gates, betas, the state and the mask, if there are any.
struct GatedDelta {
  static constexpr const char* kName = "PagedGatedDelta";
  static constexpr size_t kOutputs = 2;
  bool has_state;
  bool has_mask;

  bool operator==(const GatedDelta&) const = default;

  std::pair<std::vector<mx::Shape>, std::vector<mx::Dtype>> forms(const Arrays& inputs) const {
    const mx::array& v = inputs[2];
    return {{v.shape(), {v.shape(0), v.shape(2), v.shape(3), inputs[1].shape(3)}},
            {inputs[0].dtype(), mx::float32}};
  }

  auto task(const Arrays& inputs, Arrays& outputs) const {
    const mx::array &k = inputs[1], &v = inputs[2], &gates = inputs[3];
    const int64_t heads = v.shape(2), repeats = heads / k.shape(2);
    cpu::DeltaTile whole = {};
    whole.has_vectors = gates.ndim() == 4;
    whole.beta_step = heads;
    std::vector<cpu::Tokens> arrays(inputs.begin(), inputs.begin() + 4);
    cpu::HeadTiles tiles(outputs, has_state ? &inputs[5] : nullptr,
                         has_mask ? &inputs.back() : nullptr);
    return [whole, heads, repeats, arrays = std::move(arrays), tiles = std::move(tiles),
            betas = cpu::SmallArray(inputs[4]),
            &kernels = cpu::recurrent_kernels(outputs[0])]() mutable {
      for (cpu::Tokens& array : arrays) {
        array.prepare();
      }
      tiles.prepare();
      const std::vector<float> beta = betas.floats();
      const auto compute = [&](int64_t i) {
        cpu::DeltaTile tile = whole;
        const auto [sequence, head, row] = tiles.fill(i, tile);
        tile.q = arrays[0].at(sequence, head / repeats);
        tile.k = arrays[1].at(sequence, head / repeats);
        tile.v = arrays[2].at(sequence, head, row);
        tile.q_step = arrays[0].step();
        tile.k_step = arrays[1].step();
        tile.v_step = arrays[2].step();
        tile.gates = reinterpret_cast<const float*>(arrays[3].at(sequence, head));
        tile.gate_step = arrays[3].step();
        tile.betas = beta.data() + sequence * tile.tokens * heads + head;
        kernels.delta(tile);
      };
      cpu::parallel_for(tiles.count(), compute, tiles.pays());
    };
  }

  Arrays composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array &k = inputs[1], &v = inputs[2], &gates = inputs[3];
    const int repeats = v.shape(2) / k.shape(2), tokens = v.shape(1);
    mx::array state = has_state ? inputs[5] : mx::zeros(forms(inputs).first[1], mx::float32, s);
    // Of a token, with a new axis where the state has the other one.
    const auto of = [&](const mx::array& a, int t, int axis) {
      return mx::expand_dims(mx::take(a, t, 1, s), axis, s);
    };
    const mx::array queries = mx::repeat(inputs[0], repeats, 2, s);
    const mx::array keys = mx::repeat(k, repeats, 2, s);
    Arrays all;
    for (int t = 0; t < tokens; ++t) {
      const mx::array key = of(keys, t, -2), before = state;
      const mx::array gate =
          gates.ndim() == 4 ? of(gates, t, -2) : mx::expand_dims(of(gates, t, -1), -1, s);
      state = mx::multiply(state, gate, s);
      const mx::array known = mx::sum(mx::multiply(state, key, s), -1, true, s);
      const mx::array beta = mx::expand_dims(of(inputs[4], t, -1), -1, s);
      const mx::array delta = mx::multiply(mx::subtract(of(v, t, -1), known, s), beta, s);
      state = mx::add(state, mx::multiply(key, delta, s), s);
      mx::array y = mx::sum(mx::multiply(state, of(queries, t, -2), s), -1, false, s);
      if (has_mask) {
        const mx::array kept = mx::expand_dims(mx::take(inputs.back(), t, 1, s), {1, 2, 3}, s);
        state = mx::where(kept, state, before, s);
        y = mx::where(mx::squeeze(kept, -1, s), y, mx::array(0.0f), s);
      }
      all.push_back(mx::astype(y, inputs[0].dtype(), s));
    }
    return {mx::stack(all, 1, s), state};
  }
};

}  // namespace

Arrays gated_delta(const mx::array& q, const mx::array& k, const mx::array& v,
                   const mx::array& gates, const mx::array& betas, const OptionalArray& state,
                   const OptionalArray& mask, mx::StreamOrDevice stream) {
  const char* op = "gated_delta";
  check_floating(op, "q", q);
  require(k.ndim() == 4 && v.ndim() == 4, op, "k has ", k.ndim(), " axes and v ", v.ndim(),
          ": expected [B, T, H, D]");
  const int batch = v.shape(0), tokens = v.shape(1), heads = v.shape(2);
  require(q.shape() == k.shape() && k.shape(0) == batch && k.shape(1) == tokens, op, "q has shape ",
          q.shape(), ", k ", k.shape(), " and v ", v.shape(), ": expected the same B, T and keys");
  require(v.size() > 0 && k.size() > 0 && heads % k.shape(2) == 0, op, "v has shape ", v.shape(),
          " and k ", k.shape(), ": expected elements, and a multiple of k's heads");
  require(q.dtype() == k.dtype() && q.dtype() == v.dtype(), op, "q has dtype ", q.dtype(), ", k ",
          k.dtype(), " and v ", v.dtype(), ": expected the same");
  const mx::Shape scalars = {batch, tokens, heads};
  const mx::Shape vectors = {batch, tokens, heads, k.shape(3)};
  require(gates.dtype() == mx::float32 && (gates.shape() == scalars || gates.shape() == vectors),
          op, "gates have shape ", gates.shape(), " and dtype ", gates.dtype(), ": expected ",
          scalars, " or ", vectors, " of float32");
  check_floating(op, "betas", betas);
  require(betas.shape() == scalars, op, "betas have shape ", betas.shape(), ": expected ", scalars);
  Arrays inputs = {q, k, v, gates, betas};
  if (state) {
    const mx::Shape shape = {batch, heads, v.shape(3), k.shape(3)};
    require(state->shape() == shape && state->dtype() == mx::float32, op, "state has shape ",
            state->shape(), " and dtype ", state->dtype(), ": expected ", shape, " of float32");
    inputs.push_back(*state);
  }
  if (mask) {
    const mx::Shape shape = {batch, tokens};
    require(mask->shape() == shape && mask->dtype() == mx::bool_, op, "mask has shape ",
            mask->shape(), " and dtype ", mask->dtype(), ": expected ", shape, " of bool");
    inputs.push_back(*mask);
  }
  return make_recurrent(GatedDelta{state.has_value(), mask.has_value()}, std::move(inputs), stream);
}

}  // namespace mlx_paged

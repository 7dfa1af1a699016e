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
    const int64_t batch = v.shape(0), heads = v.shape(2), repeats = heads / k.shape(2);
    const int32_t values = v.shape(3), columns = k.shape(3);
    cpu::DeltaTile whole = {};
    whole.tokens = v.shape(1);
    whole.columns = columns;
    whole.out_step = heads * values;
    whole.has_vectors = gates.ndim() == 4;
    whole.beta_step = heads;
    std::vector<cpu::Tokens> arrays(inputs.begin(), inputs.begin() + 4);
    if (has_mask) {
      arrays.emplace_back(inputs.back());
    }
    std::vector<cpu::States> states;
    if (has_state) {
      states.emplace_back(inputs[5]);
    }
    return [whole, batch, heads, repeats, values, columns, arrays = std::move(arrays),
            states = std::move(states), betas = cpu::SmallArray(inputs[4]), op = *this,
            &kernels = cpu::recurrent_kernels(outputs[0]),
            itemsize = static_cast<int64_t>(outputs[0].itemsize()),
            out = outputs[0].data<std::byte>(), new_state = outputs[1].data<float>()]() mutable {
      for (cpu::Tokens& array : arrays) {
        array.prepare();
      }
      for (cpu::States& each : states) {
        each.prepare();
      }
      const std::vector<float> beta = betas.floats();
      const int32_t rows = std::min(values, cpu::tile_rows(columns));
      const int64_t tiles = (values + rows - 1) / rows;
      const auto compute = [&](int64_t i) {
        const int64_t sequence = i / tiles / heads, head = i / tiles % heads;
        const int64_t row = i % tiles * rows, at = (sequence * heads + head) * values + row;
        cpu::DeltaTile tile = whole;
        tile.rows = static_cast<int32_t>(std::min<int64_t>(rows, values - row));
        tile.q = arrays[0].at(sequence, head / repeats);
        tile.k = arrays[1].at(sequence, head / repeats);
        tile.v = arrays[2].at(sequence, head, row);
        tile.q_step = arrays[0].step();
        tile.k_step = arrays[1].step();
        tile.v_step = arrays[2].step();
        tile.gates = reinterpret_cast<const float*>(arrays[3].at(sequence, head));
        tile.gate_step = arrays[3].step();
        tile.betas = beta.data() + sequence * tile.tokens * heads + head;
        if (op.has_state) {
          tile.state = reinterpret_cast<const float*>(states[0].at(sequence)) +
                       (head * values + row) * columns;
        }
        if (op.has_mask) {
          tile.mask = reinterpret_cast<const uint8_t*>(arrays.back().at(sequence));
          tile.mask_step = arrays.back().step();
        }
        tile.new_state = new_state + at * columns;
        tile.out = out + ((sequence * tile.tokens * heads + head) * values + row) * itemsize;
        tile.scratch = cpu::recurrent_scratch(cpu::scratch_of(tile.rows, columns));
        kernels.delta(tile);
      };
      const int64_t work = batch * heads * values * columns * whole.tokens;
      cpu::parallel_for(batch * heads * tiles, compute, work >= cpu::kRecurrentWork);
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

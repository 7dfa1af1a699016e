#include <algorithm>
#include <cmath>
#include <memory>

#include "csrc/cpu/recurrent/recurrent_ops.h"
#include "csrc/cpu/recurrent/recurrent_primitive.h"
#include "csrc/validate.h"
#include "mlx/ops.h"

namespace mlx_paged {

namespace {

// softplus(x), limited.
float step_size(float x, float least, float most) {
  const float y = std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
  return std::isnan(y) ? y : std::min(std::max(y, least), most);
}

mx::array softplus_of(const mx::array& x, mx::Stream s) {
  return mx::logaddexp(x, mx::array(0.0f, x.dtype()), s);
}

// Inputs x, a_log, b, c, d, dt, dt_bias, the state and the mask, if there are any.
struct StateSpaceScan {
  static constexpr const char* kName = "PagedStateSpaceScan";
  static constexpr size_t kOutputs = 2;
  bool has_state;
  bool has_mask;
  float least;
  float most;

  bool operator==(const StateSpaceScan&) const = default;

  std::pair<std::vector<mx::Shape>, std::vector<mx::Dtype>> forms(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    return {{x.shape(), {x.shape(0), x.shape(2), x.shape(3), inputs[2].shape(3)}},
            {mx::promote_types(x.dtype(), inputs[4].dtype()), mx::float32}};
  }

  auto task(const Arrays& inputs, Arrays& outputs) const {
    const mx::array &x = inputs[0], &b = inputs[2];
    const int64_t num_tokens = x.shape(0) * x.shape(1);
    const int64_t heads = x.shape(2), repeats = heads / b.shape(2);
    cpu::ScanTile whole = {};
    whole.dt_step = heads;
    whole.is_wide = outputs[0].dtype() == mx::float32;
    std::vector<cpu::Tokens> arrays = {cpu::Tokens(x), cpu::Tokens(b), cpu::Tokens(inputs[3])};
    cpu::HeadTiles tiles(outputs, has_state ? &inputs[7] : nullptr,
                         has_mask ? &inputs.back() : nullptr);
    return [whole, num_tokens, heads, repeats, arrays = std::move(arrays), tiles = std::move(tiles),
            a_logs = cpu::SmallArray(inputs[1]), skips = cpu::SmallArray(inputs[4]),
            dts = cpu::SmallArray(inputs[5]), biases = cpu::SmallArray(inputs[6]), op = *this,
            &kernels = cpu::recurrent_kernels(x)]() mutable {
      for (cpu::Tokens& array : arrays) {
        array.prepare();
      }
      tiles.prepare();
      const std::vector<float> skip = skips.floats(), bias = biases.floats();
      std::vector<float> rate = a_logs.floats();
      for (float& each : rate) {
        each = -std::exp(each);
      }
      std::vector<float> dt = dts.floats(), decay(dt.size());
      const auto compute_steps = [&](int64_t token) {
        for (int64_t h = 0; h < heads; ++h) {
          float& step = dt[token * heads + h];
          step = step_size(step + bias[h], op.least, op.most);
          decay[token * heads + h] = std::exp(rate[h] * step);
        }
      };
      cpu::parallel_for(num_tokens, compute_steps, tiles.pays());
      const auto compute = [&](int64_t i) {
        cpu::ScanTile tile = whole;
        const auto [sequence, head, row] = tiles.fill(i, tile);
        tile.x = arrays[0].at(sequence, head, row);
        tile.b = arrays[1].at(sequence, head / repeats);
        tile.c = arrays[2].at(sequence, head / repeats);
        tile.x_step = arrays[0].step();
        tile.b_step = arrays[1].step();
        tile.c_step = arrays[2].step();
        tile.dt = dt.data() + sequence * tile.tokens * heads + head;
        tile.decays = decay.data() + sequence * tile.tokens * heads + head;
        tile.skip = skip[head];
        kernels.scan(tile);
      };
      cpu::parallel_for(tiles.count(), compute, tiles.pays());
    };
  }

  Arrays composed(const Arrays& inputs, mx::Stream s) const {
    const auto wide = [&](const mx::array& a) { return mx::astype(a, mx::float32, s); };
    const mx::array x = wide(inputs[0]);
    const int tokens = x.shape(1), repeats = x.shape(2) / inputs[2].shape(2);
    const mx::array b = mx::repeat(wide(inputs[2]), repeats, 2, s);
    const mx::array c = mx::repeat(wide(inputs[3]), repeats, 2, s);
    const mx::array dt = mx::clip(softplus_of(mx::add(wide(inputs[5]), wide(inputs[6]), s), s),
                                  mx::array(least), mx::array(most), s);
    const mx::array rate = mx::negative(mx::exp(wide(inputs[1]), s), s);
    const mx::array decay = mx::exp(mx::multiply(dt, rate, s), s);
    mx::array state = has_state ? inputs[7] : mx::zeros(forms(inputs).first[1], mx::float32, s);
    const auto of = [&](const mx::array& a, int t) { return mx::take(a, t, 1, s); };
    Arrays all;
    for (int t = 0; t < tokens; ++t) {
      const mx::array before = state;
      const mx::array step = mx::multiply(of(x, t), mx::expand_dims(of(dt, t), -1, s), s);
      const mx::array added =
          mx::multiply(mx::expand_dims(step, -1, s), mx::expand_dims(of(b, t), -2, s), s);
      state = mx::add(mx::multiply(state, mx::expand_dims(of(decay, t), {-2, -1}, s), s), added, s);
      mx::array y = mx::sum(mx::multiply(state, mx::expand_dims(of(c, t), -2, s), s), -1, false, s);
      const mx::array skip = mx::expand_dims(wide(inputs[4]), -1, s);
      y = mx::add(y, mx::multiply(of(x, t), skip, s), s);
      if (has_mask) {
        const mx::array kept = mx::expand_dims(mx::take(inputs.back(), t, 1, s), {1, 2, 3}, s);
        state = mx::where(kept, state, before, s);
        y = mx::where(mx::squeeze(kept, -1, s), y, mx::array(0.0f), s);
      }
      all.push_back(mx::astype(y, forms(inputs).second[0], s));
    }
    return {mx::stack(all, 1, s), state};
  }
};

// Inputs x, a_log, b, c, d, dt and the state, if there is one.
struct SelectiveScan {
  static constexpr const char* kName = "PagedSelectiveScan";
  static constexpr size_t kOutputs = 2;
  bool has_state;

  bool operator==(const SelectiveScan&) const = default;

  std::pair<std::vector<mx::Shape>, std::vector<mx::Dtype>> forms(const Arrays& inputs) const {
    const mx::array& x = inputs[0];
    return {{x.shape(), {x.shape(0), x.shape(2), inputs[2].shape(2)}}, {x.dtype(), x.dtype()}};
  }

  auto task(const Arrays& inputs, Arrays& outputs) const {
    const mx::array &x = inputs[0], &b = inputs[2];
    const int64_t batch = x.shape(0), channels = x.shape(2);
    const int32_t columns = b.shape(2);
    cpu::SelectiveTile whole = {};
    whole.tokens = x.shape(1);
    whole.columns = columns;
    whole.out_step = channels;
    std::vector<cpu::Tokens> arrays = {cpu::Tokens(x), cpu::Tokens(inputs[5]), cpu::Tokens(b),
                                       cpu::Tokens(inputs[3])};
    std::vector<cpu::States> states;
    if (has_state) {
      states.emplace_back(inputs[6]);
    }
    return
        [whole, batch, channels, columns, arrays = std::move(arrays), states = std::move(states),
         a_logs = cpu::SmallArray(inputs[1]), skips = cpu::SmallArray(inputs[4]),
         &kernels = cpu::recurrent_kernels(x), itemsize = static_cast<int64_t>(x.itemsize()),
         out = outputs[0].data<std::byte>(), new_state = outputs[1].data<std::byte>()]() mutable {
          for (cpu::Tokens& array : arrays) {
            array.prepare();
          }
          for (cpu::States& each : states) {
            each.prepare();
          }
          const std::vector<float> a_log = a_logs.floats(), skip = skips.floats();
          constexpr int64_t kChannels = 64;  // of a tile
          const int64_t tiles = (channels + kChannels - 1) / kChannels;
          const auto compute = [&](int64_t i) {
            const int64_t sequence = i / tiles, row = i % tiles * kChannels;
            const int64_t state_at = row * columns * itemsize;
            cpu::SelectiveTile tile = whole;
            tile.rows = static_cast<int32_t>(std::min(kChannels, channels - row));
            // Channels are the last axis: Tokens::at has them as its last argument.
            tile.x = arrays[0].at(sequence, 0, row);
            tile.d = arrays[1].at(sequence, 0, row);
            tile.b = arrays[2].at(sequence);
            tile.c = arrays[3].at(sequence);
            tile.x_step = arrays[0].step();
            tile.d_step = arrays[1].step();
            tile.b_step = arrays[2].step();
            tile.c_step = arrays[3].step();
            tile.a = a_log.data() + row * columns;
            tile.skip = skip.data() + row;
            tile.state = states.empty() ? nullptr : states[0].at(sequence) + state_at;
            tile.new_state = new_state + sequence * channels * columns * itemsize + state_at;
            tile.out = out + (sequence * tile.tokens * channels + row) * itemsize;
            tile.scratch = cpu::recurrent_scratch(cpu::scratch_of(tile.rows, columns));
            kernels.selective(tile);
          };
          constexpr int64_t kExponential = 8;  // costs as much as so many multiplications
          const int64_t work = kExponential * batch * channels * columns * whole.tokens;
          cpu::parallel_for(batch * tiles, compute, work >= cpu::kRecurrentWork);
        };
  }

  Arrays composed(const Arrays& inputs, mx::Stream s) const {
    const mx::array &x = inputs[0], dt = softplus_of(inputs[5], s);
    const mx::array rate = mx::negative(mx::exp(inputs[1], s), s);
    mx::array state = has_state ? inputs[6] : mx::zeros(forms(inputs).first[1], x.dtype(), s);
    const auto of = [&](const mx::array& a, int t, int axis) {
      return mx::expand_dims(mx::take(a, t, 1, s), axis, s);
    };
    Arrays all;
    for (int t = 0; t < x.shape(1); ++t) {
      const mx::array step = of(dt, t, -1), input = of(x, t, -1);
      const mx::array decay = mx::exp(mx::multiply(step, rate, s), s);
      const mx::array added = mx::multiply(mx::multiply(step, input, s), of(inputs[2], t, 1), s);
      state = mx::add(mx::multiply(state, decay, s), added, s);
      const mx::array y = mx::sum(mx::multiply(state, of(inputs[3], t, 1), s), -1, false, s);
      all.push_back(mx::add(y, mx::multiply(mx::take(x, t, 1, s), inputs[4], s), s));
    }
    return {mx::stack(all, 1, s), state};
  }
};

void check_shape(const char* op, const char* name, const mx::array& a, const mx::Shape& shape) {
  require(a.shape() == shape, op, name, " has shape ", a.shape(), ": expected ", shape);
}

void check_dtype(const char* op, const char* name, const mx::array& a, mx::Dtype dtype) {
  require(a.dtype() == dtype, op, name, " has dtype ", a.dtype(), ": expected ", dtype);
}

}  // namespace

Arrays state_space_scan(const mx::array& x, const mx::array& a_log, const mx::array& b,
                        const mx::array& c, const mx::array& d, const mx::array& dt,
                        const mx::array& dt_bias, const OptionalArray& state,
                        const OptionalArray& mask, float least, float most,
                        mx::StreamOrDevice stream) {
  const char* op = "state_space_scan";
  check_floating(op, "x", x);
  require(x.ndim() == 4 && b.ndim() == 4 && x.size() > 0 && b.size() > 0, op, "x has shape ",
          x.shape(), " and b ", b.shape(), ": expected [B, T, H, D] and [B, T, G, N], not empty");
  const int batch = x.shape(0), tokens = x.shape(1), heads = x.shape(2);
  require(b.shape(0) == batch && b.shape(1) == tokens && heads % b.shape(2) == 0, op,
          "b has shape ", b.shape(), ": expected x's B and T, and a divisor of ", heads, " heads");
  check_shape(op, "c", c, b.shape());
  check_shape(op, "dt", dt, {batch, tokens, heads});
  check_dtype(op, "b", b, x.dtype());
  check_dtype(op, "c", c, x.dtype());
  check_floating(op, "dt", dt);
  const std::pair<const char*, const mx::array*> of_heads[] = {
      {"a_log", &a_log}, {"d", &d}, {"dt_bias", &dt_bias}};
  for (const auto& [name, array] : of_heads) {
    check_shape(op, name, *array, {heads});
    check_floating(op, name, *array);
  }
  require(d.dtype() == x.dtype() || d.dtype() == mx::float32, op, "d has dtype ", d.dtype(),
          ": expected x's or float32");
  Arrays inputs = {x, a_log, b, c, d, dt, dt_bias};
  if (state) {
    check_shape(op, "state", *state, {batch, heads, x.shape(3), b.shape(3)});
    check_dtype(op, "state", *state, mx::float32);
    inputs.push_back(*state);
  }
  if (mask) {
    check_shape(op, "mask", *mask, {batch, tokens});
    check_dtype(op, "mask", *mask, mx::bool_);
    inputs.push_back(*mask);
  }
  const StateSpaceScan scan = {state.has_value(), mask.has_value(), least, most};
  return make_recurrent(scan, std::move(inputs), stream);
}

Arrays selective_scan(const mx::array& x, const mx::array& a_log, const mx::array& b,
                      const mx::array& c, const mx::array& d, const mx::array& dt,
                      const OptionalArray& state, mx::StreamOrDevice stream) {
  const char* op = "selective_scan";
  check_floating(op, "x", x);
  require(x.ndim() == 3 && b.ndim() == 3 && x.size() > 0 && b.size() > 0, op, "x has shape ",
          x.shape(), " and b ", b.shape(), ": expected [B, T, D] and [B, T, N], not empty");
  check_shape(op, "b", b, {x.shape(0), x.shape(1), b.shape(2)});
  check_shape(op, "c", c, b.shape());
  check_shape(op, "dt", dt, x.shape());
  check_shape(op, "a_log", a_log, {x.shape(2), b.shape(2)});
  check_shape(op, "d", d, {x.shape(2)});
  Arrays inputs = {x, a_log, b, c, d, dt};
  if (state) {
    check_shape(op, "state", *state, {x.shape(0), x.shape(2), b.shape(2)});
    inputs.push_back(*state);
  }
  for (const mx::array& array : inputs) {
    require(array.dtype() == x.dtype(), op, "x has dtype ", x.dtype(), " but another array has ",
            array.dtype(), ": expected the same");
  }
  return make_recurrent(SelectiveScan{state.has_value()}, std::move(inputs), stream);
}

}  // namespace mlx_paged

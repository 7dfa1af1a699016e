// The ops that write and copy in a layer's pool, and their primitive.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "csrc/cpu/quantize.h"
#include "csrc/cpu/task.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/metal/plans.h"
#include "csrc/ops.h"
#include "csrc/validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Below this many bytes waking a thread costs more than it saves.
constexpr size_t kMinParallelBytes = 1 << 18;

// An array of any layout, with strides in bytes.
struct View {
  explicit View(const mx::array& a)
      : data(const_cast<std::byte*>(a.data<std::byte>())),
        dtype(a.dtype()),
        itemsize(static_cast<int>(a.itemsize())) {
    for (size_t axis = 0; axis < a.ndim(); ++axis) {
      shape[axis] = a.shape(axis);
      strides[axis] = a.strides(axis) * itemsize;
    }
  }

  std::byte* at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return data + i * strides[0] + j * strides[1] + k * strides[2];
  }

  int32_t index(int64_t i, int64_t j = 0) const { return *reinterpret_cast<int32_t*>(at(i, j)); }

  std::byte* data;
  mx::Dtype dtype;
  int itemsize;
  int shape[4] = {};
  int64_t strides[4] = {};
};

// Keys, values or scales [H_kv, N, S, D] of a layer's pool, with dense rows.
struct PoolView : View {
  using View::View;

  std::byte* row(int64_t head, int64_t slot) const {
    return at(head, slot / shape[2], slot % shape[2]);
  }

  int row_bytes() const { return shape[3] * itemsize; }
};

void copy_row(std::byte* to, const std::byte* from, const View& rows) {
  const int row_bytes = rows.shape[2] * rows.itemsize;
  if (rows.strides[2] == rows.itemsize) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  for (int offset = 0; offset < row_bytes; offset += rows.itemsize) {
    std::memcpy(to + offset, from, rows.itemsize);
    from += rows.strides[2];
  }
}

using QuantizeRow = void(const float* x, int width, std::byte* to, std::byte* scales);

QuantizeRow* quantize_row(const mx::array& cache) {
  return is_pairs(cache)   ? cpu::quantize_int4
         : is_sixes(cache) ? cpu::quantize_symmetric<31>
                           : cpu::quantize_symmetric<127>;
}

void load_row(const std::byte* from, const View& rows, std::vector<float>& x) {
  for (float& element : x) {
    element = rows.dtype == mx::float32 ? *reinterpret_cast<const float*>(from)
              : rows.dtype == mx::float16
                  ? static_cast<float>(*reinterpret_cast<const mx::float16_t*>(from))
                  : static_cast<float>(*reinterpret_cast<const mx::bfloat16_t*>(from));
    from += rows.strides[2];
  }
}

// Where rows [T, H_kv, D] go: keys or values, and their scales if they are quantized.
struct WriteTarget {
  PoolView pool;
  View rows;
  std::optional<PoolView> scales;
  QuantizeRow* quantize;
};

// Writes one head's rows to their slots, in order.
void write_head(const WriteTarget& target, const View& slots, int64_t head) {
  const auto& [pool, rows, scales, quantize] = target;
  const int64_t num_slots = int64_t{pool.shape[1]} * pool.shape[2];
  std::vector<float> x(scales ? rows.shape[2] : 0);
  for (int token = 0; token < rows.shape[0]; ++token) {
    const int64_t slot = slots.index(token);
    if (slot < 0 || slot >= num_slots) {
      continue;
    }
    if (!scales) {
      copy_row(pool.row(head, slot), rows.at(token, head), rows);
      continue;
    }
    load_row(rows.at(token, head), rows, x);
    quantize(x.data(), rows.shape[2], pool.row(head, slot), scales->row(head, slot));
  }
}

// Copies one head's part of each (source, destination) pair, in order.
void copy_head(const PoolView& pool, const View& pairs, int64_t head) {
  const bool dense = pool.strides[2] == pool.row_bytes();
  const int rows = dense ? 1 : pool.shape[2];
  const size_t bytes = size_t(pool.row_bytes()) * (dense ? pool.shape[2] : 1);
  const auto inside = [&](int32_t block) { return block >= 0 && block < pool.shape[1]; };
  for (int i = 0; i < pairs.shape[0]; ++i) {
    const int32_t source = pairs.index(i, 0), destination = pairs.index(i, 1);
    if (!inside(source) || !inside(destination) || source == destination) {
      continue;
    }
    for (int r = 0; r < rows; ++r) {
      std::memcpy(pool.at(head, destination, r), pool.at(head, source, r), bytes);
    }
  }
}

// Calls body(cache, head) for each head of keys and of values, on several threads if that pays.
template <typename Target, typename Body>
void for_heads(const std::array<Target, 2>& targets, int heads, Body body, bool pays) {
  cpu::parallel_for(2 * heads, [&](int64_t i) { body(targets[i / heads], i % heads); }, pays);
}

// Inputs k, v, k_cache, v_cache, slot_mapping; of quantized pools then k_scales, v_scales.
struct WriteKV {
  static constexpr const char* kOp = "write_kv";
  static constexpr const char* kName = "WriteKV";
  static constexpr int kCache = 2;
  static constexpr int kScales = 5;
  static constexpr auto plan = plan_write_kv;

  static auto task(const Arrays& inputs, Arrays& outputs) {
    const auto target = [&](int i) -> WriteTarget {
      const bool is_quantized = outputs.size() > 2;
      return {PoolView(outputs[i]), View(token_rows(inputs[i])),
              is_quantized ? std::optional(PoolView(outputs[2 + i])) : std::nullopt,
              quantize_row(outputs[i])};
    };
    return [targets = std::array{target(0), target(1)}, slots = View(inputs[4]),
            heads = outputs[0].shape(0), bytes = inputs[0].nbytes() + inputs[1].nbytes()] {
      const auto write = [&](const auto& to, int64_t head) { write_head(to, slots, head); };
      for_heads(targets, heads, write, bytes >= kMinParallelBytes);
    };
  }
};

// Inputs k_cache, v_cache, block_pairs.
struct CopyBlocks {
  static constexpr const char* kOp = "copy_blocks";
  static constexpr const char* kName = "CopyBlocks";
  static constexpr int kCache = 0;
  static constexpr int kScales = 3;
  static constexpr auto plan = plan_copy_blocks;

  static auto task(const Arrays& inputs, Arrays& outputs) {
    return
        [pools = std::array{PoolView(outputs[0]), PoolView(outputs[1])}, pairs = View(inputs[2])] {
          const auto copy = [&](const auto& pool, int64_t head) { copy_head(pool, pairs, head); };
          for_heads(pools, pools[0].shape[0], copy, pairs.shape[0] > 0);
        };
  }
};

// The inputs that an op edits: the caches, then the scales of a quantized pool.
template <typename Op>
Arrays edited_inputs(const Arrays& inputs) {
  Arrays edited(inputs.begin() + Op::kCache, inputs.begin() + Op::kCache + 2);
  edited.insert(edited.end(), inputs.begin() + Op::kScales, inputs.end());
  return edited;
}

std::vector<mx::Shape> shapes_of(const Arrays& arrays) {
  std::vector<mx::Shape> shapes;
  for (const mx::array& array : arrays) {
    shapes.push_back(array.shape());
  }
  return shapes;
}

// The primitive of an op that edits a pool in place; the outputs share the buffers of what it
// edits.
template <typename Op>
class PoolEdit : public cpu::TaskPrimitive {
 public:
  using cpu::TaskPrimitive::TaskPrimitive;

  std::function<void()> task(const Arrays& inputs, Arrays& outputs) override {
    share_buffers(inputs, outputs);
    return Op::task(inputs, outputs);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    share_buffers(inputs, outputs);
    encode(Op::plan(inputs), inputs, outputs, stream());
  }

  const char* name() const override { return Op::kName; }

  bool is_equivalent(const mx::Primitive&) const override { return true; }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return shapes_of(edited_inputs<Op>(inputs));
  }

 private:
  static void share_buffers(const Arrays& inputs, Arrays& outputs) {
    const Arrays edited = edited_inputs<Op>(inputs);
    check_pool_memory(Op::kOp, edited[0], edited[1], true);
    for (size_t i = 0; i < edited.size(); ++i) {
      outputs[i].copy_shared_buffer(edited[i]);
    }
  }
};

template <typename Op>
Arrays edited(const Arrays& inputs, mx::StreamOrDevice stream) {
  const Arrays before = edited_inputs<Op>(inputs);
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& array : before) {
    dtypes.push_back(array.dtype());
  }
  return mx::array::make_arrays(shapes_of(before), dtypes,
                                std::make_shared<PoolEdit<Op>>(mx::to_stream(stream)), inputs);
}

}  // namespace

Arrays write_kv(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                const mx::array& v_cache, const mx::array& slot_mapping,
                const OptionalArray& k_scales, const OptionalArray& v_scales,
                mx::StreamOrDevice stream) {
  return edited<WriteKV>(
      write_inputs(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, stream), stream);
}

ArrayPair copy_blocks(const mx::array& k_cache, const mx::array& v_cache,
                      const mx::array& block_pairs, mx::StreamOrDevice stream) {
  check_copy(k_cache, v_cache, block_pairs);
  const Arrays copied = edited<CopyBlocks>({k_cache, v_cache, block_pairs}, stream);
  return {copied[0], copied[1]};
}

// MLX does not export its own flag. An array that is marked as a tracer shows it.
bool is_transforming() {
  static const mx::array* const tracer = [] {
    auto* array = new mx::array(0);  // outlives MLX's own static objects
    array->set_tracer(true);
    return array;
  }();
  return tracer->is_tracer();
}

}  // namespace mlx_paged

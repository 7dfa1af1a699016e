// The ops that write and copy in a layer's pool, and their primitive.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "csrc/cpu/mlx_args.h"
#include "csrc/cpu/quantize.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/metal/plans.h"
#include "csrc/ops.h"
#include "csrc/validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Below this many bytes waking a thread costs more than it saves.
constexpr int64_t kMinParallelBytes = 1 << 18;

// Keys or values [H_kv, N, S, D] of a layer's pool: any layout with dense rows; strides in bytes.
struct PoolView {
  std::byte* data;
  int64_t head_stride;
  int64_t block_stride;
  int64_t token_stride;
  int num_heads;
  int num_blocks;
  int block_size;
  int row_bytes;

  std::byte* at(int64_t head, int64_t slot) const {
    return data + head * head_stride + slot / block_size * block_stride +
           slot % block_size * token_stride;
  }
};

// Rows [T, H_kv, D] to write; strides in bytes.
struct RowsView {
  const std::byte* data;
  int64_t token_stride;
  int64_t head_stride;
  int64_t element_stride;
  int num_tokens;
  int width;
  int itemsize;
  mx::Dtype dtype;
};

// A vector or matrix of int32; strides in elements.
struct IndexView {
  const int32_t* data;
  int64_t row_stride;
  int64_t column_stride;

  int32_t operator()(int64_t row, int64_t column = 0) const {
    return data[row * row_stride + column * column_stride];
  }
};

PoolView pool_view(mx::array& cache) {
  const auto itemsize = static_cast<int64_t>(cache.itemsize());
  return {cache.data<std::byte>(),
          cache.strides(0) * itemsize,
          cache.strides(1) * itemsize,
          cache.strides(2) * itemsize,
          cache.shape(0),
          cache.shape(1),
          cache.shape(2),
          static_cast<int>(cache.shape(3) * itemsize)};
}

RowsView rows_view(const mx::array& rows) {
  const auto itemsize = static_cast<int64_t>(rows.itemsize());
  return {rows.data<std::byte>(),
          rows.strides(0) * itemsize,
          rows.strides(1) * itemsize,
          rows.strides(2) * itemsize,
          rows.shape(0),
          rows.shape(2),
          static_cast<int>(itemsize),
          rows.dtype()};
}

IndexView index_view(const mx::array& indices) {
  return {indices.data<int32_t>(), indices.strides(0), indices.ndim() > 1 ? indices.strides(1) : 0};
}

void copy_row(std::byte* to, const std::byte* from, const RowsView& rows, int row_bytes) {
  if (rows.element_stride == rows.itemsize) {
    std::memcpy(to, from, row_bytes);
    return;
  }
  for (int offset = 0; offset < row_bytes; offset += rows.itemsize) {
    std::memcpy(to + offset, from, rows.itemsize);
    from += rows.element_stride;
  }
}

using QuantizeRow = void(const float* x, int width, std::byte* to, std::byte* scales);

QuantizeRow* quantize_row(const mx::array& cache) {
  return is_packed(cache) ? cpu::quantize_int4 : cpu::quantize_int8;
}

void load_row(const std::byte* from, const RowsView& rows, std::vector<float>& x) {
  for (float& element : x) {
    element = rows.dtype == mx::float32 ? *reinterpret_cast<const float*>(from)
              : rows.dtype == mx::float16
                  ? static_cast<float>(*reinterpret_cast<const mx::float16_t*>(from))
                  : static_cast<float>(*reinterpret_cast<const mx::bfloat16_t*>(from));
    from += rows.element_stride;
  }
}

// Where rows go: keys or values, and their scales if they are quantized.
struct WriteTarget {
  PoolView pool;
  RowsView rows;
  std::optional<PoolView> scales;
  QuantizeRow* quantize;
};

// Writes one head's rows to their slots, in order.
void write_head(const WriteTarget& target, const IndexView& slots, int64_t head) {
  const auto& [pool, rows, scales, quantize] = target;
  const int64_t num_slots = int64_t{pool.num_blocks} * pool.block_size;
  const std::byte* from = rows.data + head * rows.head_stride;
  std::vector<float> x(scales ? rows.width : 0);
  for (int token = 0; token < rows.num_tokens; ++token, from += rows.token_stride) {
    const int64_t slot = slots(token);
    if (slot < 0 || slot >= num_slots) {
      continue;
    }
    if (!scales) {
      copy_row(pool.at(head, slot), from, rows, pool.row_bytes);
      continue;
    }
    load_row(from, rows, x);
    quantize(x.data(), rows.width, pool.at(head, slot), scales->at(head, slot));
  }
}

// Copies one head's part of each (source, destination) pair, in order.
void copy_head(const PoolView& pool, const IndexView& pairs, int num_pairs, int64_t head) {
  std::byte* blocks = pool.data + head * pool.head_stride;
  const bool dense = pool.token_stride == pool.row_bytes;
  const auto inside = [&](int32_t block) { return block >= 0 && block < pool.num_blocks; };
  for (int i = 0; i < num_pairs; ++i) {
    const int32_t source = pairs(i, 0);
    const int32_t destination = pairs(i, 1);
    if (!inside(source) || !inside(destination) || source == destination) {
      continue;
    }
    const std::byte* from = blocks + source * pool.block_stride;
    std::byte* to = blocks + destination * pool.block_stride;
    if (dense) {
      std::memcpy(to, from, size_t(pool.row_bytes) * pool.block_size);
      continue;
    }
    for (int token = 0; token < pool.block_size; ++token) {
      std::memcpy(to + token * pool.token_stride, from + token * pool.token_stride, pool.row_bytes);
    }
  }
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
      return {pool_view(outputs[i]), rows_view(inputs[i]),
              is_quantized ? std::optional(pool_view(outputs[2 + i])) : std::nullopt,
              quantize_row(outputs[i])};
    };
    return [k = target(0), v = target(1), slots = index_view(inputs[4])] {
      const int heads = k.pool.num_heads;
      const int64_t width = k.rows.width + v.rows.width;
      const int64_t bytes = k.rows.num_tokens * heads * width * k.rows.itemsize;
      const auto write = [&](int64_t i) {
        i < heads ? write_head(k, slots, i) : write_head(v, slots, i - heads);
      };
      cpu::parallel_for(2 * heads, write, bytes >= kMinParallelBytes);
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
    return [k_pool = pool_view(outputs[0]), v_pool = pool_view(outputs[1]),
            pairs = index_view(inputs[2]), num_pairs = inputs[2].shape(0)] {
      const int heads = k_pool.num_heads;
      const auto copy = [&](int64_t i) {
        i < heads ? copy_head(k_pool, pairs, num_pairs, i)
                  : copy_head(v_pool, pairs, num_pairs, i - heads);
      };
      cpu::parallel_for(2 * heads, copy, num_pairs > 0);
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
class PoolEdit : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    share_buffers(inputs, outputs);
    cpu::encoder_for(stream(), inputs, outputs).dispatch(Op::task(inputs, outputs));
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
  check_write(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales);
  Arrays inputs = {k, v, k_cache, v_cache, slot_mapping};
  if (k_scales) {
    inputs.insert(inputs.end(), {*k_scales, *v_scales});
  }
  return edited<WriteKV>(inputs, stream);
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

std::optional<std::array<mx::array, 4>> append_kv(const mx::array& k, const mx::array& v,
                                                  const mx::array& k_cache,
                                                  const mx::array& v_cache,
                                                  const mx::array& slot_mapping,
                                                  const mx::array& block_tables, int num_tokens,
                                                  const OptionalArray& held) {
  const auto fits = [](const mx::array& x, const mx::array& cache) {
    return x.ndim() == 4 && x.dtype() == cache.dtype() && x.shape(1) == cache.shape(0) &&
           x.shape(3) == cache.shape(3);
  };
  const bool is_native = mx::default_device() == mx::Device::cpu ||
                         (has_metal() && unsupported_on_metal(k.shape(-1), v.shape(-1)).empty());
  if (!is_native || is_transforming() || !fits(k, k_cache) || !fits(v, v_cache)) {
    return std::nullopt;
  }
  const auto rows = [](const mx::array& x) {
    return x.shape(2) == 1 ? mx::squeeze(x, 2) : mx::flatten(mx::transpose(x, {0, 2, 1, 3}), 0, 1);
  };
  const auto gathered = [&](const mx::array& cache) {
    const mx::array found = gather_blocks(cache, block_tables, num_tokens);
    return held ? mx::where(*held, found, mx::array(0, found.dtype())) : found;
  };
  const Arrays written = write_kv(rows(k), rows(v), k_cache, v_cache, slot_mapping, {}, {}, {});
  return std::array{written[0], written[1], gathered(written[0]), gathered(written[1])};
}

}  // namespace mlx_paged

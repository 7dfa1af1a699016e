// The ops that write, copy and read a layer's pool, and their primitives.
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "csrc/cpu/mlx_args.h"
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
};

// Rows [T, H_kv, D] to write; strides in bytes.
struct RowsView {
  const std::byte* data;
  int64_t token_stride;
  int64_t head_stride;
  int64_t element_stride;
  int num_tokens;
  int itemsize;
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
          static_cast<int>(itemsize)};
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

// Writes one head's rows to their slots, in order.
void write_head(const PoolView& pool, const RowsView& rows, const IndexView& slots, int64_t head) {
  const int64_t num_slots = int64_t{pool.num_blocks} * pool.block_size;
  std::byte* to = pool.data + head * pool.head_stride;
  const std::byte* from = rows.data + head * rows.head_stride;
  for (int token = 0; token < rows.num_tokens; ++token) {
    const int64_t slot = slots(token);
    if (slot < 0 || slot >= num_slots) {
      continue;
    }
    copy_row(to + slot / pool.block_size * pool.block_stride +
                 slot % pool.block_size * pool.token_stride,
             from + token * rows.token_stride, rows, pool.row_bytes);
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

// Inputs k, v, k_cache, v_cache, slot_mapping.
struct WriteKV {
  static constexpr const char* kOp = "write_kv";
  static constexpr const char* kName = "WriteKV";
  static constexpr int kCache = 2;
  static constexpr auto plan = plan_write_kv;

  static auto task(const Arrays& inputs, Arrays& outputs) {
    return [k = rows_view(inputs[0]), v = rows_view(inputs[1]), k_pool = pool_view(outputs[0]),
            v_pool = pool_view(outputs[1]), slots = index_view(inputs[4])] {
      const int heads = k_pool.num_heads;
      const int64_t bytes = int64_t{k.num_tokens} * heads * (k_pool.row_bytes + v_pool.row_bytes);
      const auto write = [&](int64_t i) {
        i < heads ? write_head(k_pool, k, slots, i) : write_head(v_pool, v, slots, i - heads);
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

// The primitive of an op that edits a pool in place. Inputs [Op::kCache] and [Op::kCache + 1] are
// k_cache and v_cache; the outputs are the two caches and share their buffers.
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
    return {inputs[Op::kCache].shape(), inputs[Op::kCache + 1].shape()};
  }

 private:
  static void share_buffers(const Arrays& inputs, Arrays& outputs) {
    check_pool_memory(Op::kOp, inputs[Op::kCache], inputs[Op::kCache + 1], true);
    outputs[0].copy_shared_buffer(inputs[Op::kCache]);
    outputs[1].copy_shared_buffer(inputs[Op::kCache + 1]);
  }
};

template <typename Op>
ArrayPair edited(const Arrays& inputs, mx::StreamOrDevice stream) {
  const mx::array &k_cache = inputs[Op::kCache], &v_cache = inputs[Op::kCache + 1];
  auto outputs =
      mx::array::make_arrays({k_cache.shape(), v_cache.shape()}, {k_cache.dtype(), v_cache.dtype()},
                             std::make_shared<PoolEdit<Op>>(mx::to_stream(stream)), inputs);
  return {outputs[0], outputs[1]};
}

// A primitive of MLX that reads a pool, which is its first input. MLX orders such a read before
// later writes only if it knows that the memory is written in place.
class PoolRead : public mx::Primitive {
 public:
  explicit PoolRead(std::shared_ptr<mx::Primitive> read)
      : mx::Primitive(read->stream()), read_(std::move(read)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    read_->eval_cpu(inputs, outputs);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    if (inputs[0].size() > 0) {
      register_pool_read(inputs[0], stream());
    }
    read_->eval_gpu(inputs, outputs);
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    return read_->vjp(primals, cotangents, argnums, outputs);
  }

  const char* name() const override { return "PoolRead"; }

 private:
  std::shared_ptr<mx::Primitive> read_;
};

// The blocks of each head side by side, by MLX's gather, and a view of their first tokens. One node
// of the graph: most arrays of this kind are made for attention over the pool, which never
// evaluates them. Inputs cache, heads [H_kv], block_tables.
class GatherBlocks : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    gather(inputs, outputs[0], &mx::Primitive::eval_cpu);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    register_pool_read(inputs[0], stream());
    gather(inputs, outputs[0], &mx::Primitive::eval_gpu);
  }

  const char* name() const override { return "PoolRead"; }

 private:
  void gather(const Arrays& inputs, mx::array& out,
              void (mx::Primitive::*eval)(const Arrays&, Arrays&)) {
    const mx::array &cache = inputs[0], &heads = inputs[1], &tables = inputs[2];
    const mx::Shape shape = {tables.shape(0), cache.shape(0), tables.shape(1)};
    const mx::Shape one_block = {1, 1, cache.shape(2), cache.shape(3)};
    const auto index = [&](const mx::array& a, const mx::Strides& strides) {
      mx::array broadcast(shape, a.dtype(), nullptr, {});
      broadcast.copy_shared_buffer(a, strides, {}, a.data_size());
      return broadcast;
    };
    const mx::array head = index(heads, {0, 1, 0});
    const mx::array block = index(tables, {tables.strides(0), 0, tables.strides(1)});
    const mx::array gathered = mx::gather(cache, {head, block}, {0, 1}, one_block, stream());
    Arrays blocks = {mx::array(gathered.shape(), gathered.dtype(), nullptr, {})};
    (gathered.primitive_ptr().get()->*eval)({cache, head, block}, blocks);
    const mx::Strides& strides = blocks[0].strides();
    const bool is_whole = out.size() == blocks[0].size();
    out.copy_shared_buffer(blocks[0], {strides[0], strides[1], cache.shape(3), 1},
                           {is_whole, is_whole, false}, blocks[0].data_size());
  }
};

// An array that MLX's op reads from a pool, with its primitive wrapped.
mx::array pool_read(const mx::array& read) {
  return mx::array(read.shape(), read.dtype(), std::make_shared<PoolRead>(read.primitive_ptr()),
                   read.inputs());
}

}  // namespace

ArrayPair write_kv(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                   const mx::array& v_cache, const mx::array& slot_mapping,
                   mx::StreamOrDevice stream) {
  check_write(k, v, k_cache, v_cache, slot_mapping);
  return edited<WriteKV>({k, v, k_cache, v_cache, slot_mapping}, stream);
}

ArrayPair copy_blocks(const mx::array& k_cache, const mx::array& v_cache,
                      const mx::array& block_pairs, mx::StreamOrDevice stream) {
  check_copy(k_cache, v_cache, block_pairs);
  return edited<CopyBlocks>({k_cache, v_cache, block_pairs}, stream);
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
  const auto [keys, values] = write_kv(rows(k), rows(v), k_cache, v_cache, slot_mapping, {});
  return std::array{keys, values, gathered(keys), gathered(values)};
}

mx::array take_from_pool(const mx::array& rows, const mx::array& indices) {
  mx::Shape one_row = rows.shape();
  one_row[0] = 1;
  const mx::array read = pool_read(mx::gather(rows, indices, 0, one_row));
  return mx::squeeze(read, static_cast<int>(indices.ndim()));
}

mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens) {
  require(cache.ndim() == 4 && block_tables.ndim() == 2, "gather_blocks",
          "cache and block_tables have ", cache.ndim(), " and ", block_tables.ndim(),
          " axes: expected 4 and 2");
  const int heads = cache.shape(0), block_size = cache.shape(2), head_dim = cache.shape(3);
  const int batch = block_tables.shape(0), columns = block_tables.shape(1);
  const int64_t max_tokens = int64_t{columns} * block_size;
  require(num_tokens >= 0 && num_tokens <= max_tokens, "gather_blocks", "num_tokens is ",
          num_tokens, ": expected 0 to ", max_tokens, ", what the tables hold");
  // One index for each head, so that the blocks of a head are neighbours in the result.
  if (!is_transforming() && num_tokens > 0 && cache.size() > 0 && batch > 0) {
    std::vector<int> every_head(heads);
    std::iota(every_head.begin(), every_head.end(), 0);
    const mx::array head(every_head.begin(), {heads}, mx::int32);
    return mx::array({batch, heads, num_tokens, head_dim}, cache.dtype(),
                     std::make_shared<GatherBlocks>(mx::to_stream({})),
                     {cache, head, mx::astype(block_tables, mx::int32)});
  }
  const mx::array head = mx::reshape(mx::arange(heads), {1, heads, 1});
  const mx::array block = mx::expand_dims(block_tables, 1);
  const mx::array blocks =
      pool_read(mx::gather(cache, {head, block}, {0, 1}, {1, 1, block_size, head_dim}));
  const mx::array rows = mx::reshape(blocks, {batch, heads, columns * block_size, head_dim});
  return mx::slice(rows, {0, 0, 0, 0}, {batch, heads, num_tokens, head_dim});
}

}  // namespace mlx_paged

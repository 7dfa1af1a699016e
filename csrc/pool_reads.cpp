// The ops that gather from a layer's pool, and their primitives.
#include <memory>
#include <numeric>
#include <utility>

#include "csrc/metal/plans.h"
#include "csrc/ops.h"
#include "csrc/validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

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

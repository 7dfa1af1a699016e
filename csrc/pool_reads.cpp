// The op that gathers from a layer's pool, and its primitive.
#include <memory>
#include <numeric>

#include "csrc/metal/plans.h"
#include "csrc/ops.h"
#include "csrc/validate.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mlx_paged {

namespace {

// By MLX's own ops, which have derivatives.
mx::array gathered(const mx::array& cache, const mx::array& block_tables, int num_tokens) {
  const int heads = cache.shape(0), batch = block_tables.shape(0);
  const mx::array head = mx::reshape(mx::arange(heads), {1, heads, 1});
  const mx::array blocks = mx::gather(cache, {head, mx::expand_dims(block_tables, 1)}, {0, 1},
                                      {1, 1, cache.shape(2), cache.shape(3)});
  const int longest = block_tables.shape(1) * cache.shape(2);
  const mx::array rows = mx::reshape(blocks, {batch, heads, longest, cache.shape(3)});
  return mx::slice(rows, {0, 0, 0, 0}, {batch, heads, num_tokens, cache.shape(3)});
}

// The blocks of each head side by side, by MLX's gather, and a view of their first tokens. One node
// of the graph: most arrays of this kind are made for attention over the pool, which never
// evaluates them. MLX orders such a read before later writes only if it knows that the memory is
// written in place. Inputs cache, heads [H_kv], block_tables.
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

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const auto of_cache = [&](const Arrays& cache) {
      return Arrays{gathered(cache[0], primals[2], outputs[0].shape(2))};
    };
    Arrays vjps;
    for (const int argnum : argnums) {
      vjps.push_back(argnum == 0 ? mx::vjp(of_cache, {primals[0]}, cotangents).second[0]
                                 : mx::zeros_like(primals[argnum]));
    }
    return vjps;
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

}  // namespace

mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens) {
  require(cache.ndim() == 4 && block_tables.ndim() == 2, "gather_blocks",
          "cache and block_tables have ", cache.ndim(), " and ", block_tables.ndim(),
          " axes: expected 4 and 2");
  const int heads = cache.shape(0), block_size = cache.shape(2), head_dim = cache.shape(3);
  const int batch = block_tables.shape(0), columns = block_tables.shape(1);
  const int64_t max_tokens = int64_t{columns} * block_size;
  require(num_tokens >= 0 && num_tokens <= max_tokens, "gather_blocks", "num_tokens is ",
          num_tokens, ": expected 0 to ", max_tokens, ", what the tables hold");
  const mx::Shape shape = {batch, heads, num_tokens, head_dim};
  if (num_tokens == 0 || cache.size() == 0 || batch == 0) {
    return mx::zeros(shape, cache.dtype());
  }
  // One index for each head, so that the blocks of a head are neighbours in the result.
  std::vector<int> every_head(heads);
  std::iota(every_head.begin(), every_head.end(), 0);
  const mx::array head(every_head.begin(), {heads}, mx::int32);
  return mx::array(shape, cache.dtype(), std::make_shared<GatherBlocks>(mx::to_stream({})),
                   {cache, head, mx::astype(block_tables, mx::int32)});
}

}  // namespace mlx_paged

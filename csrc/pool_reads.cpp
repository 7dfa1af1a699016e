// The ops that gather from a layer's pool, and their primitives.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

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

// Whether an array has these strides; those of axes of length 1 say nothing.
bool has_strides(const mx::array& a, const mx::Strides& strides) {
  for (int axis = 0; axis < static_cast<int>(a.ndim()); ++axis) {
    if (a.shape(axis) != 1 && a.strides(axis) != strides[axis]) {
      return false;
    }
  }
  return true;
}

// The gather of MLX that takes all blocks of each head side by side, and its inputs. Inputs cache,
// heads [H_kv], block_tables, runs.
std::pair<mx::array, Arrays> gather_call(const Arrays& inputs, mx::Stream stream) {
  const mx::array &cache = inputs[0], &heads = inputs[1], &tables = inputs[2], &runs = inputs[3];
  const auto view = [](const mx::array& a, const mx::Shape& shape, const mx::Strides& strides,
                       mx::array::Flags flags = {}) {
    mx::array result(shape, a.dtype(), nullptr, {});
    result.copy_shared_buffer(a, strides, flags, flags.contiguous ? a.size() : a.data_size());
    return result;
  };
  const int num_heads = cache.shape(0), block_size = cache.shape(2), head_dim = cache.shape(3);
  const int run = block_size * head_dim;
  // A GPU is quick only with the rows of one matrix and one index: as a pool lies in memory.
  if (has_strides(cache, {run, int64_t{num_heads} * run, head_dim, 1})) {
    const mx::array rows =
        view(cache, {cache.shape(1) * num_heads, run}, {run, 1}, {true, true, false});
    return {mx::gather(rows, runs, 0, {1, run}, stream), {rows, runs}};
  }
  // The offsets have 64 bits if the size asks for them: let it be what the strides reach.
  int64_t extent = 1;
  for (int axis = 0; axis < 4; ++axis) {
    extent += (cache.shape(axis) - 1) * std::abs(cache.strides(axis));
  }
  mx::Shape reach = cache.shape();
  const int64_t num_rows = int64_t{num_heads} * cache.shape(1) * block_size;
  reach[3] = static_cast<int>(std::clamp<int64_t>((extent + num_rows - 1) / num_rows, head_dim,
                                                  std::numeric_limits<int>::max()));
  const mx::array source = view(cache, reach, cache.strides());
  const mx::Shape shape = {tables.shape(0), num_heads, tables.shape(1)};
  const mx::array head = view(heads, shape, {0, 1, 0});
  const mx::array block = view(tables, shape, {tables.strides(0), 0, tables.strides(1)});
  return {mx::gather(source, {head, block}, {0, 1}, {1, 1, block_size, head_dim}, stream),
          {source, head, block}};
}

// The blocks of each head side by side, by MLX's gather, and a view of their first tokens. One node
// of the graph: most arrays of this kind are made for attention over the pool, which never
// evaluates them. Inputs as of `gather_call`.
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
    const auto [gathered, read] = gather_call(inputs, stream());
    Arrays blocks = {mx::array(gathered.shape(), gathered.dtype(), nullptr, {})};
    (gathered.primitive_ptr().get()->*eval)(read, blocks);
    const int64_t head_dim = out.shape(3),
                  of_head = blocks[0].size() / (out.shape(0) * out.shape(1));
    const bool is_whole = out.size() == blocks[0].size();
    out.copy_shared_buffer(blocks[0], {out.shape(1) * of_head, of_head, head_dim, 1},
                           {is_whole, is_whole, false}, blocks[0].data_size());
  }
};

// The numbers [0, count), made once for each count: on a GPU an array of the host takes a buffer.
mx::array counted(int count) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<int, mx::array>();  // outlives MLX's objects
  const std::lock_guard lock(mutex);
  const auto found = known->find(count);
  if (found != known->end()) {
    return found->second;
  }
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return known->emplace(count, mx::array(numbers.begin(), {count}, mx::int32)).first->second;
}

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

mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens,
                        const OptionalArray& head_runs, mx::StreamOrDevice stream) {
  require(cache.ndim() == 4 && block_tables.ndim() == 2, "gather_blocks",
          "cache and block_tables have ", cache.ndim(), " and ", block_tables.ndim(),
          " axes: expected 4 and 2");
  const int heads = cache.shape(0), block_size = cache.shape(2), head_dim = cache.shape(3);
  const int batch = block_tables.shape(0), columns = block_tables.shape(1);
  const int64_t max_tokens = int64_t{columns} * block_size;
  require(num_tokens >= 0 && num_tokens <= max_tokens, "gather_blocks", "num_tokens is ",
          num_tokens, ": expected 0 to ", max_tokens, ", what the tables hold");
  const mx::Shape indices = {batch, heads, columns};
  require(!head_runs || head_runs->shape() == indices, "gather_blocks", "head_runs has shape ",
          head_runs ? head_runs->shape() : indices, ": expected ", indices);
  // One index for each head, so that the blocks of a head are neighbours in the result.
  const mx::array tables = mx::astype(block_tables, mx::int32);
  const mx::array head = counted(heads);
  if (!is_transforming() && num_tokens > 0 && cache.size() > 0 && batch > 0) {
    const auto own_runs = [&] {
      const mx::array first = mx::multiply(mx::expand_dims(tables, 1), mx::array(heads));
      return mx::add(first, mx::expand_dims(head, 1));
    };
    const mx::array runs = head_runs ? *head_runs : own_runs();
    return mx::array({batch, heads, num_tokens, head_dim}, cache.dtype(),
                     std::make_shared<GatherBlocks>(mx::to_stream(stream)),
                     {cache, head, tables, runs});
  }
  const int run = block_size * head_dim;
  const auto in_memory = [&] {
    return mx::reshape(mx::transpose(cache, {1, 0, 2, 3}), {cache.shape(1) * heads, run});
  };
  const mx::array blocks = pool_read(
      head_runs ? mx::gather(in_memory(), *head_runs, 0, {1, run})
                : mx::gather(cache, {mx::expand_dims(head, 1), mx::expand_dims(tables, 1)}, {0, 1},
                             {1, 1, block_size, head_dim}));
  const mx::array rows = mx::reshape(blocks, {batch, heads, columns * block_size, head_dim});
  return mx::slice(rows, {0, 0, 0, 0}, {batch, heads, num_tokens, head_dim});
}

}  // namespace mlx_paged

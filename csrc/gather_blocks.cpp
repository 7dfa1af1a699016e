#include <cstdint>
#include <sstream>
#include <stdexcept>

#include "csrc/ops.h"
#include "mlx/ops.h"

namespace mlx_paged {

mx::array gather_blocks(const mx::array& cache, const mx::array& block_tables, int num_tokens) {
  if (cache.ndim() != 4 || block_tables.ndim() != 2) {
    std::ostringstream message;
    message << "[gather_blocks] cache and block_tables have " << cache.ndim() << " and "
            << block_tables.ndim() << " axes: expected 4 and 2";
    throw std::invalid_argument(message.str());
  }
  const int heads = cache.shape(0), block_size = cache.shape(2), head_dim = cache.shape(3);
  const int batch = block_tables.shape(0), columns = block_tables.shape(1);
  if (num_tokens < 0 || num_tokens > static_cast<int64_t>(columns) * block_size) {
    std::ostringstream message;
    message << "[gather_blocks] num_tokens is " << num_tokens << ": expected 0 to "
            << static_cast<int64_t>(columns) * block_size << ", what the tables hold";
    throw std::invalid_argument(message.str());
  }
  mx::array blocks = take_from_pool(mx::transpose(cache, {1, 0, 2, 3}), block_tables);
  mx::array rows = mx::reshape(mx::transpose(blocks, {0, 2, 1, 3, 4}),
                               {batch, heads, columns * block_size, head_dim});
  return mx::slice(rows, {0, 0, 0, 0}, {batch, heads, num_tokens, head_dim});
}

}  // namespace mlx_paged

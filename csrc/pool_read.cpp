#include "csrc/pool_read.h"

#include "csrc/metal/encode.h"
#include "mlx/ops.h"

namespace mlx_paged {

mx::array take_from_pool(const mx::array& rows, const mx::array& indices) {
  mx::Shape one_row = rows.shape();
  one_row[0] = 1;
  const mx::array gathered = mx::gather(rows, indices, 0, one_row);
  const mx::array read(gathered.shape(), gathered.dtype(),
                       std::make_shared<PoolRead>(gathered.primitive_ptr()), gathered.inputs());
  return mx::squeeze(read, static_cast<int>(indices.ndim()));
}

void PoolRead::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  read_->eval_cpu(inputs, outputs);
}

void PoolRead::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  if (inputs[0].size() > 0) {
    register_pool_read(inputs[0], stream());
  }
  read_->eval_gpu(inputs, outputs);
}

}  // namespace mlx_paged

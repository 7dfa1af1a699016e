#include "csrc/copy_blocks.h"

#include <memory>

#include "csrc/cpu/pool_args.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/metal/encode.h"
#include "csrc/metal/plans.h"
#include "csrc/validate.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

ArrayPair copy_blocks(const mx::array& k_cache, const mx::array& v_cache,
                      const mx::array& block_pairs, mx::StreamOrDevice stream) {
  check_copy(k_cache, v_cache, block_pairs);
  auto outputs = mx::array::make_arrays(
      {k_cache.shape(), v_cache.shape()}, {k_cache.dtype(), v_cache.dtype()},
      std::make_shared<CopyBlocks>(mx::to_stream(stream)), {k_cache, v_cache, block_pairs});
  return {outputs[0], outputs[1]};
}

std::vector<mx::Shape> CopyBlocks::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[0].shape(), inputs[1].shape()};
}

void CopyBlocks::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  check_pool_memory("copy_blocks", inputs[0], inputs[1], true);
  outputs[0].copy_shared_buffer(inputs[0]);
  outputs[1].copy_shared_buffer(inputs[1]);

  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  encoder.dispatch([k_pool = cpu::pool_view(outputs[0]), v_pool = cpu::pool_view(outputs[1]),
                    pairs = cpu::index_view(inputs[2]), num_pairs = inputs[2].shape(0)] {
    if (num_pairs == 0) {
      return;
    }
    const int heads = k_pool.num_heads;
    cpu::parallel_for(2 * heads, [&](int64_t i) {
      i < heads ? cpu::copy_head(k_pool, pairs, num_pairs, static_cast<int>(i))
                : cpu::copy_head(v_pool, pairs, num_pairs, static_cast<int>(i - heads));
    });
  });
}

void CopyBlocks::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  check_pool_memory("copy_blocks", inputs[0], inputs[1], true);
  outputs[0].copy_shared_buffer(inputs[0]);
  outputs[1].copy_shared_buffer(inputs[1]);
  encode(plan_copy_blocks(inputs), inputs, outputs, stream());
}

}  // namespace mlx_paged

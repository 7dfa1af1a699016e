#include "csrc/kv_write.h"

#include <memory>

#include "csrc/cpu/pool_args.h"
#include "csrc/cpu/thread_pool.h"
#include "csrc/metal/encode.h"
#include "csrc/metal/plans.h"
#include "csrc/validate.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged {

namespace {

// Below this many bytes waking a thread costs more than it saves.
constexpr int64_t kMinParallelBytes = 1 << 18;

}  // namespace

ArrayPair write_kv(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                   const mx::array& v_cache, const mx::array& slot_mapping,
                   mx::StreamOrDevice stream) {
  check_write(k, v, k_cache, v_cache, slot_mapping);
  auto outputs = mx::array::make_arrays(
      {k_cache.shape(), v_cache.shape()}, {k_cache.dtype(), v_cache.dtype()},
      std::make_shared<WriteKV>(mx::to_stream(stream)), {k, v, k_cache, v_cache, slot_mapping});
  return {outputs[0], outputs[1]};
}

std::vector<mx::Shape> WriteKV::output_shapes(const std::vector<mx::array>& inputs) {
  return {inputs[2].shape(), inputs[3].shape()};
}

void WriteKV::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  check_pool_memory("write_kv", inputs[2], inputs[3], true);
  outputs[0].copy_shared_buffer(inputs[2]);
  outputs[1].copy_shared_buffer(inputs[3]);

  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const mx::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mx::array& output : outputs) {
    encoder.set_output_array(output);
  }
  // MLX holds the inputs' and outputs' buffers until the tasks of this primitive have run.
  encoder.dispatch([k = cpu::rows_view(inputs[0]), v = cpu::rows_view(inputs[1]),
                    k_pool = cpu::pool_view(outputs[0]), v_pool = cpu::pool_view(outputs[1]),
                    slots = cpu::index_view(inputs[4])] {
    const int heads = k_pool.num_heads;
    const auto write = [&](int64_t i) {
      i < heads ? cpu::write_head(k_pool, k, slots, static_cast<int>(i))
                : cpu::write_head(v_pool, v, slots, static_cast<int>(i - heads));
    };
    const int64_t bytes = int64_t{k.num_tokens} * heads * (k_pool.row_bytes + v_pool.row_bytes);
    if (bytes >= kMinParallelBytes) {
      cpu::parallel_for(2 * heads, write);
      return;
    }
    for (int i = 0; i < 2 * heads; ++i) {
      write(i);
    }
  });
}

void WriteKV::eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  check_pool_memory("write_kv", inputs[2], inputs[3], true);
  outputs[0].copy_shared_buffer(inputs[2]);
  outputs[1].copy_shared_buffer(inputs[3]);
  encode(plan_write_kv(inputs), inputs, outputs, stream());
}

}  // namespace mlx_paged

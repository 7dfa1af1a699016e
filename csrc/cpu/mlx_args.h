// MLX's dtypes and arrays for tasks on the CPU.
#pragma once

#include <stdexcept>
#include <vector>

#include "csrc/cpu/attention/attention_args.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"

namespace mlx_paged::cpu {

inline DType dtype_of(const mlx::core::array& a) {
  switch (a.dtype()) {
    case mlx::core::float32:
      return DType::kFloat32;
    case mlx::core::float16:
      return DType::kFloat16;
    case mlx::core::bfloat16:
      return DType::kBFloat16;
    case mlx::core::bool_:
      return DType::kBool;
    case mlx::core::int8:
      return DType::kInt8;
    case mlx::core::uint16:
      return DType::kInt6;
    case mlx::core::uint8:
      return DType::kInt4Pair;
    default:
      throw std::logic_error("[mlx_paged] dtype without a CPU kernel");
  }
}

// The encoder for the task of a primitive. MLX holds the buffers of these arrays until the task has
// run.
inline mlx::core::cpu::CommandEncoder& encoder_for(mlx::core::Stream stream,
                                                   const std::vector<mlx::core::array>& inputs,
                                                   std::vector<mlx::core::array>& outputs) {
  auto& encoder = mlx::core::cpu::get_command_encoder(stream);
  for (const mlx::core::array& input : inputs) {
    encoder.set_input_array(input);
  }
  for (mlx::core::array& output : outputs) {
    encoder.set_output_array(output);
  }
  return encoder;
}

}  // namespace mlx_paged::cpu

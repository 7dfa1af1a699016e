// Instances of MLX's tiled attention (simdgroup_matrix), whose headers come with the mlx wheel.
#include "mlx/backend/metal/kernels/utils.h"

#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"

#define instantiate_steel_attention(type, bk, dim, wn, mask)               \
  instantiate_kernel(                                                      \
      "steel_attention_" #type "_" #dim "_bk" #bk "_wn" #wn "_mask_" #mask, \
      attention, type, 32, bk, dim, dim, 4, wn, mask, float)

instantiate_steel_attention(float, 16, 128, 1, bool)
instantiate_steel_attention(float16_t, 16, 128, 1, bool)
instantiate_steel_attention(bfloat16_t, 16, 128, 1, bool)
instantiate_steel_attention(float16_t, 32, 128, 2, bool)
instantiate_steel_attention(float, 32, 64, 1, float)

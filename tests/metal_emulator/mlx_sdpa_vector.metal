// Instances of MLX's own decode kernels, whose headers come with the mlx wheel: known to be right
// on hardware.
#include "mlx/backend/metal/kernels/utils.h"

#include "mlx/backend/metal/kernels/sdpa_vector.h"

#define instantiate_sdpa_vector(type, dim)                                        \
  instantiate_kernel("sdpa_vector_" #type "_" #dim, sdpa_vector, type, dim, dim)  \
  instantiate_kernel(                                                             \
      "sdpa_vector_2pass_1_" #type "_" #dim, sdpa_vector_2pass_1, type, dim, dim) \
  instantiate_kernel("sdpa_vector_2pass_2_" #type "_" #dim, sdpa_vector_2pass_2, type, dim)

instantiate_sdpa_vector(float, 128)
instantiate_sdpa_vector(float16_t, 128)
instantiate_sdpa_vector(bfloat16_t, 128)
instantiate_sdpa_vector(float, 64)
instantiate_sdpa_vector(float16_t, 64)
instantiate_sdpa_vector(float16_t, 256)

#define instantiate_sdpa_vector_gqa(type, dim, group, heads)           \
  instantiate_kernel(                                                  \
      "sdpa_vector_2pass_1_gqa_" #type "_" #dim "_" #group "_" #heads, \
      sdpa_vector_2pass_1_gqa, type, dim, dim, group, heads)

instantiate_sdpa_vector_gqa(float, 128, 8, 4)
instantiate_sdpa_vector_gqa(float16_t, 64, 8, 8)
instantiate_sdpa_vector_gqa(float16_t, 128, 8, 4)
instantiate_sdpa_vector_gqa(bfloat16_t, 128, 4, 2)

// paged_attention on the CPU.
#pragma once

#include "csrc/cpu/attention/attention_args.h"

namespace mlx_paged::cpu {

void paged_attention(const AttentionArgs& args);

}  // namespace mlx_paged::cpu

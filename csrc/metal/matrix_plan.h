// Launches of paged_attention by products of matrices: metal/matrix_attention.metal.
#pragma once

#include "csrc/attention_call.h"
#include "csrc/metal/launch_plan.h"

namespace mlx_paged {

// Whether the kernel computes this call, and faster than the kernel for few query rows.
bool supports_matrix(const AttentionInputs& in, const AttentionOptions& options);

// Of a ragged batch the launches compute the sequences from num_decodes on.
LaunchPlans plan_matrix(const AttentionInputs& in, const AttentionOptions& options);

}  // namespace mlx_paged

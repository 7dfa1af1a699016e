// Launches of paged_attention by products of matrices: metal/matrix_attention.metal.
#pragma once

#include "csrc/metal/attention_launches.h"

namespace mlx_paged {

// Whether the kernel computes this call, and faster than the kernel for few query rows.
bool supports_matrix(const AttentionInputs& in, const AttentionOptions& options);

// How the call is divided among threadgroups, for these or for its own splits.
AttentionGeometry matrix_geometry(const AttentionInputs& in, const AttentionOptions& options);

// Of a ragged batch the launch computes the sequences from num_decodes on.
LaunchPlan matrix_launch(const AttentionInputs& in, const AttentionOptions& options,
                         const AttentionGeometry& g);

}  // namespace mlx_paged

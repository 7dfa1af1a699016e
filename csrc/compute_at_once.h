// Graphs of MLX's ops that a primitive makes and computes within its own evaluation.
#pragma once

#include "csrc/ops.h"

namespace mlx_paged {

// An array of a primitive's inputs, or a view of one, as a leaf of a graph: it has the memory and
// no primitive.
mx::array leaf_of(const mx::array& input);

// Gives `result` its memory: evaluates the nodes of its graph in order, on the stream of the
// primitive that is being evaluated. All nodes must be of this stream, and all leaves must have
// memory. What the nodes allocate is kept until the stream has computed them. `inputs` are those of
// the primitive.
void compute_at_once(const mx::array& result, const Arrays& inputs, mx::Stream stream);

}  // namespace mlx_paged

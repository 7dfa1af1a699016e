// Graphs of MLX's ops that a primitive makes and computes within its own evaluation.
#pragma once

#include "csrc/ops.h"

namespace mlx_paged {

// An array of a primitive's inputs, or a view of one, as a leaf of a graph: it has the memory and
// no primitive.
mx::array leaf_of(const mx::array& input);

// Keeps an array that is made within the evaluation of a primitive until the stream has computed
// what it was given so far. The array must share no memory with an input or output of the
// primitive: an encoder of Metal forgets what it has to wait for in such memory.
void keep_in_evaluation(const mx::array& array, mx::Stream stream);

// Gives `result` its memory: evaluates the nodes of its graph in order, on the stream of the
// primitive that is being evaluated. All nodes must be of this stream, and all leaves must have
// memory. What the nodes allocate is kept until the stream has computed them. `inputs` are those of
// the primitive.
void compute_at_once(const mx::array& result, const Arrays& inputs, mx::Stream stream);

}  // namespace mlx_paged

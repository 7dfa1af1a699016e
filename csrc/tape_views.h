// Nodes of a tape that make the views of their inputs themselves.
#pragma once

#include "csrc/tape_graph.h"

namespace mlx_paged {

// Lets a node read the array before a view, and make the view when it is evaluated, so that the
// view is no node: where no other node reads the view, or where it is a view of an input that never
// copies. The node launches what it launched, with the same buffers.
void take_views(TapeGraph& graph);

}  // namespace mlx_paged

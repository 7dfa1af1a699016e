// Nodes of a tape that are computed together on a CPU.
#pragma once

#include "csrc/tape_graph.h"

namespace mlx_paged {

// Makes one node of nodes in a row that a CPU's stream computes and on which the first output
// depends. The node computes the same primitives in the same order, so that all bits are the same.
// It saves what MLX spends on a node: its place in the graph, and two hand-overs to the stream's
// thread. What is between the nodes of a group keeps its memory until the group is computed, so a
// group ends before that is much.
void group_nodes(TapeGraph& graph);

}  // namespace mlx_paged

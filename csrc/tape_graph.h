// The graph of a tape, and what is simplified in it when it is recorded.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "csrc/ops.h"

namespace mlx_paged {

struct TapeForm {
  mx::Shape shape;
  mx::Dtype dtype;
};

// All values have numbers: inputs, then constants, then the outputs of each node.
struct TapeNode {
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<size_t> inputs;
  std::vector<TapeForm> outputs;
  size_t first_output;
};

// Each node comes after those that it reads.
struct TapeGraph {
  std::vector<TapeForm> inputs;
  Arrays constants;
  std::vector<TapeNode> nodes;
  std::vector<size_t> outputs;
  size_t num_values = 0;
};

// Nodes that MLX computes without a kernel, since their output shares the memory of their input:
// always, or if that has its elements in order.
enum class TapeView { kNone, kAlways, kOfDenseInput };

TapeView view_of(const TapeNode& node);

// The forms of inputs, constants and outputs of nodes, by number.
std::vector<TapeForm> forms_of(const TapeGraph& graph);

// Lets nodes that treat each row [..., W] alike, such as norms and sums, read and give [R, W] where
// the nodes before and after them do, so that no reshapes are between them.
void flatten_rows(TapeGraph& graph);

// Lets a node that reshapes what another node has reshaped read the array before both. Where that
// has the node's shape already, whoever reads the node reads the array.
void join_reshapes(TapeGraph& graph);

// Leaves out nodes of which nothing is read, and numbers the values again.
void drop_unused(TapeGraph& graph);

}  // namespace mlx_paged

// A graph of MLX's arrays that was built once and is built again for other inputs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "csrc/ops.h"
#include "csrc/tape_graph.h"

namespace mlx_paged {

// The nodes between some arrays and what was computed of them, in an order in which each node comes
// after its inputs. Nodes that only give an array another shape, one after another, are one node.
// Views of inputs that have been computed are made at once and are no nodes. A tape holds the
// primitives of the nodes, which belong to their streams, and the arrays that depend on no input.
// It holds no input and no array between.
class Tape {
 public:
  // Raises std::invalid_argument if two inputs are one array, for an array stands for one input, or
  // if the outputs depend on an array of `elsewhere`, which would be the same for all inputs. With
  // `groups`, see group_nodes, whoever reads any output must read the first one too.
  Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere, bool groups);

  // The outputs for other inputs, not evaluated. None if an input has another shape or dtype.
  std::optional<Arrays> operator()(const Arrays& inputs) const;

  size_t num_nodes() const { return graph_.nodes.size(); }

  // The names of the nodes' primitives, in order.
  std::vector<std::string> names() const;

 private:
  std::optional<mx::array> view_at_once(size_t node, const Arrays& values) const;

  TapeGraph graph_;
  std::vector<TapeView> views_;  // of each node
};

// Arrays of the same shapes and dtypes that have no values and cannot be evaluated.
Arrays without_values(const Arrays& arrays);

}  // namespace mlx_paged

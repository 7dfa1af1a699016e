// A graph of MLX's arrays that was built once and is built again for other inputs.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/ops.h"

namespace mlx_paged {

// The nodes between some arrays and what was computed of them, in an order in which each node comes
// after its inputs. Nodes that only give an array another shape, one after another, are one node.
// A tape holds the primitives of the nodes, which belong to their streams, and the
// arrays that depend on no input. It holds no input and no array between.
class Tape {
 public:
  // Raises std::invalid_argument if two inputs are one array, for an array stands for one input, or
  // if the outputs depend on an array of `elsewhere`, which would be the same for all inputs.
  Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere);

  // The outputs for other inputs, not evaluated. None if an input has another shape or dtype.
  std::optional<Arrays> operator()(const Arrays& inputs) const;

  size_t num_nodes() const { return nodes_.size(); }

 private:
  struct Form {
    mx::Shape shape;
    mx::Dtype dtype;
  };
  // All values have numbers: inputs, then constants, then the outputs of each node.
  struct Node {
    std::shared_ptr<mx::Primitive> primitive;
    std::vector<size_t> inputs;
    std::vector<Form> outputs;
    size_t first_output;
  };

  void join_reshapes();
  void drop_unused();

  std::vector<Form> inputs_;
  Arrays constants_;
  std::vector<Node> nodes_;
  std::vector<size_t> outputs_;
  size_t num_values_ = 0;
};

// Arrays of the same shapes and dtypes that have no values and cannot be evaluated.
Arrays without_values(const Arrays& arrays);

}  // namespace mlx_paged

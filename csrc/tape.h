// A graph of MLX's arrays that was built once and is built again for other inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/ops.h"
#include "csrc/tape_graph.h"

namespace mlx_paged {

// The nodes between some arrays and what was computed of them, in an order in which each node comes
// after its inputs. Nodes that only give an array another shape, one after another, are one node.
// A view that one node reads is made by this node. A tape holds the primitives of the nodes, which
// belong to their streams, and the arrays that depend on no input. It holds no input and no array
// between.
class Tape {
 public:
  // Raises std::invalid_argument if two inputs are one array, for an array stands for one input, or
  // if the outputs depend on an array of `elsewhere`, which would be the same for all inputs. With
  // `groups`, see group_nodes, whoever reads any output must read the first one too.
  Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere, bool groups);

  // The outputs for other inputs, not evaluated. None if an input has another shape or dtype.
  std::optional<Arrays> operator()(Arrays inputs) const;

  size_t num_nodes() const { return steps_.size(); }

  // The names of the nodes' primitives, in order.
  std::vector<std::string> names() const;

 private:
  // A node. What it reads and the forms of what it gives come after those of the step before.
  struct Step {
    std::shared_ptr<mx::Primitive> primitive;
    uint32_t num_inputs;
    uint32_t num_outputs;
  };

  struct Read {
    uint32_t value;
    bool is_last;  // of the value
  };

  void lay_out(const TapeGraph& graph);
  uint32_t form(const TapeForm& form);
  bool fits(const Arrays& inputs) const;

  // All in the order of use and small, since little of it is in the processor's caches when a step
  // begins.
  std::vector<TapeForm> forms_;      // each one once
  std::vector<uint32_t> of_inputs_;  // numbers of forms
  Arrays constants_;
  std::vector<Step> steps_;
  std::vector<Read> reads_;
  std::vector<uint32_t> of_outputs_;  // numbers of forms
  std::vector<size_t> results_;       // numbers of values
  size_t num_values_ = 0;
};

// Arrays of the same shapes and dtypes that have no values and cannot be evaluated.
Arrays without_values(const Arrays& arrays);

}  // namespace mlx_paged

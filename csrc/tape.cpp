#include "csrc/tape.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "csrc/validate.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Whether an array is the same for all inputs. What is read from a file is read once.
bool is_constant(const mx::array& array) {
  return !array.has_primitive() || std::string_view(array.primitive().name()) == "Load";
}

// What the outputs depend on, each array after its inputs; of a primitive with several outputs only
// one of them. Ends at the arrays of `known`.
Arrays in_order(const Arrays& outputs, const std::unordered_map<uintptr_t, size_t>& known) {
  struct Visit {
    mx::array array;
    size_t next_input = 0;
  };
  Arrays order;
  std::unordered_set<uintptr_t> seen;
  std::vector<Visit> stack;
  const auto visit = [&](const mx::array& array) {
    if (known.count(array.id()) == 0 && seen.insert(array.id()).second) {
      for (const mx::array& sibling : array.siblings()) {
        seen.insert(sibling.id());
      }
      stack.push_back({array});
    }
  };
  for (const mx::array& output : outputs) {
    visit(output);
    while (!stack.empty()) {
      Visit& top = stack.back();
      const Arrays& inputs = top.array.inputs();
      if (is_constant(top.array) || top.next_input == inputs.size()) {
        order.push_back(top.array);
        stack.pop_back();
      } else {
        visit(inputs[top.next_input++]);
      }
    }
  }
  return order;
}

}  // namespace

Tape::Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere) {
  std::unordered_map<uintptr_t, size_t> numbers;
  for (const mx::array& input : inputs) {
    require(numbers.emplace(input.id(), inputs_.size()).second, "Tape", "two inputs are one array");
    inputs_.push_back({input.shape(), input.dtype()});
  }
  std::unordered_set<uintptr_t> unexpected;
  for (const mx::array& array : elsewhere) {
    unexpected.insert(array.id());
  }
  const Arrays order = in_order(outputs, numbers);
  for (const mx::array& array : order) {
    require(unexpected.count(array.id()) == 0, "Tape",
            "an output depends on an array of elsewhere");
    if (is_constant(array)) {
      numbers.emplace(array.id(), inputs_.size() + constants_.size());
      constants_.push_back(array);
    }
  }
  num_values_ = inputs_.size() + constants_.size();
  for (const mx::array& array : order) {
    if (is_constant(array)) {
      continue;
    }
    Node node{array.primitive_ptr(), {}, {}};
    for (const mx::array& input : array.inputs()) {
      node.inputs.push_back(numbers.at(input.id()));
    }
    for (const mx::array& output : array.outputs()) {
      numbers.emplace(output.id(), num_values_++);
      node.outputs.push_back({output.shape(), output.dtype()});
    }
    nodes_.push_back(std::move(node));
  }
  for (const mx::array& output : outputs) {
    outputs_.push_back(numbers.at(output.id()));
  }
}

std::optional<Arrays> Tape::operator()(const Arrays& inputs) const {
  if (inputs.size() != inputs_.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].shape() != inputs_[i].shape || inputs[i].dtype() != inputs_[i].dtype) {
      return std::nullopt;
    }
  }
  Arrays values;
  values.reserve(num_values_);
  values.insert(values.end(), inputs.begin(), inputs.end());
  values.insert(values.end(), constants_.begin(), constants_.end());
  for (const Node& node : nodes_) {
    Arrays given;
    given.reserve(node.inputs.size());
    for (const size_t number : node.inputs) {
      given.push_back(values[number]);
    }
    if (node.outputs.size() == 1) {
      const Form& form = node.outputs[0];
      values.emplace_back(form.shape, form.dtype, node.primitive, std::move(given));
      continue;
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const Form& form : node.outputs) {
      shapes.push_back(form.shape);
      dtypes.push_back(form.dtype);
    }
    for (mx::array& output :
         mx::array::make_arrays(std::move(shapes), dtypes, node.primitive, given)) {
      values.push_back(std::move(output));
    }
  }
  Arrays outputs;
  outputs.reserve(outputs_.size());
  for (const size_t number : outputs_) {
    outputs.push_back(values[number]);
  }
  return outputs;
}

Arrays without_values(const Arrays& arrays) {
  Arrays found;
  found.reserve(arrays.size());
  for (const mx::array& array : arrays) {
    found.emplace_back(array.shape(), array.dtype(), nullptr, Arrays{});
  }
  return found;
}

}  // namespace mlx_paged

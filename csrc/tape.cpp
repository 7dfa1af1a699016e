#include "csrc/tape.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "csrc/validate.h"
#include "mlx/ops.h"
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

// Whether a transpose moves only axes of length 1, so that the elements keep their order.
bool keeps_order(const mx::Transpose& transpose, const mx::Shape& from) {
  int last = -1;
  for (const int axis : transpose.state()) {
    if (from[axis] != 1) {
      if (axis < last) {
        return false;
      }
      last = axis;
    }
  }
  return true;
}

// Whether a primitive gives its input `from` another shape and keeps the order of the elements. MLX
// exports no class of these, so that names tell them apart.
bool is_reshape(const mx::Primitive& primitive, const mx::Shape& from) {
  const std::string_view name = primitive.name();
  if (name == "Transpose") {
    return keeps_order(static_cast<const mx::Transpose&>(primitive), from);
  }
  return name == "Reshape" || name == "Flatten" || name == "Unflatten" || name == "Squeeze" ||
         name == "ExpandDims";
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
    Node node{array.primitive_ptr(), {}, {}, num_values_};
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
  join_reshapes();
  drop_unused();
}

// Lets a node that reshapes what another node has reshaped read the array before both. Where that
// has the node's shape already, whoever reads the node reads the array.
void Tape::join_reshapes() {
  std::vector<Form> forms = inputs_;
  for (const mx::array& constant : constants_) {
    forms.push_back({constant.shape(), constant.dtype()});
  }
  std::unordered_map<size_t, size_t> before, same;
  for (Node& node : nodes_) {
    for (size_t& input : node.inputs) {
      const auto found = same.find(input);
      input = found == same.end() ? input : found->second;
    }
    forms.insert(forms.end(), node.outputs.begin(), node.outputs.end());
    if (node.inputs.size() != 1 || !is_reshape(*node.primitive, forms[node.inputs[0]].shape)) {
      continue;
    }
    const size_t input = node.inputs[0], output = node.first_output;
    const auto found = before.find(input);
    const size_t source = found == before.end() ? input : found->second;
    before.emplace(output, source);
    if (forms[source].shape == forms[output].shape) {
      same.emplace(output, source);
    } else if (source != input) {
      const mx::array given(forms[source].shape, forms[source].dtype, nullptr, Arrays{});
      const mx::array joined = mx::reshape(given, forms[output].shape, node.primitive->stream());
      node.primitive = joined.primitive_ptr();
      node.inputs = {source};
    }
  }
  for (size_t& output : outputs_) {
    const auto found = same.find(output);
    output = found == same.end() ? output : found->second;
  }
}

// Leaves out nodes of which nothing is read.
void Tape::drop_unused() {
  std::vector<bool> is_read(num_values_, false);
  for (const size_t output : outputs_) {
    is_read[output] = true;
  }
  std::vector<Node> kept;
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    const auto first = is_read.begin() + static_cast<std::ptrdiff_t>(node->first_output);
    const auto last = first + static_cast<std::ptrdiff_t>(node->outputs.size());
    if (std::find(first, last, true) == last) {
      continue;
    }
    for (const size_t input : node->inputs) {
      is_read[input] = true;
    }
    kept.push_back(std::move(*node));
  }
  std::unordered_map<size_t, size_t> numbers;
  num_values_ = inputs_.size() + constants_.size();
  for (size_t value = 0; value < num_values_; ++value) {
    numbers.emplace(value, value);
  }
  nodes_.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  for (Node& node : nodes_) {
    for (size_t& input : node.inputs) {
      input = numbers.at(input);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      numbers.emplace(node.first_output + i, num_values_++);
    }
    node.first_output = num_values_ - node.outputs.size();
  }
  for (size_t& output : outputs_) {
    output = numbers.at(output);
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

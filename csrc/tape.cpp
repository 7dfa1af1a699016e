#include "csrc/tape.h"

#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "csrc/tape_groups.h"
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

// Whether an array has its values, or will have them before whatever its stream computes later.
bool is_computed(const mx::array& array) {
  const auto status = array.status();
  return status == mx::array::Status::available ||
         (status == mx::array::Status::evaluated && !array.event().valid());
}

}  // namespace

Tape::Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere, bool groups) {
  std::unordered_map<uintptr_t, size_t> numbers;
  for (const mx::array& input : inputs) {
    require(numbers.emplace(input.id(), graph_.inputs.size()).second, "Tape",
            "two inputs are one array");
    graph_.inputs.push_back({input.shape(), input.dtype()});
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
      numbers.emplace(array.id(), graph_.inputs.size() + graph_.constants.size());
      graph_.constants.push_back(array);
    }
  }
  graph_.num_values = graph_.inputs.size() + graph_.constants.size();
  for (const mx::array& array : order) {
    if (is_constant(array)) {
      continue;
    }
    TapeNode node{array.primitive_ptr(), {}, {}, graph_.num_values};
    for (const mx::array& input : array.inputs()) {
      node.inputs.push_back(numbers.at(input.id()));
    }
    for (const mx::array& output : array.outputs()) {
      numbers.emplace(output.id(), graph_.num_values++);
      node.outputs.push_back({output.shape(), output.dtype()});
    }
    graph_.nodes.push_back(std::move(node));
  }
  for (const mx::array& output : outputs) {
    graph_.outputs.push_back(numbers.at(output.id()));
  }
  join_reshapes(graph_);
  drop_unused(graph_);
  flatten_rows(graph_);
  if (groups) {
    group_nodes(graph_);
  }
  for (const TapeNode& node : graph_.nodes) {
    views_.push_back(view_of(node));
  }
}

// The output of a node that is a view of a value that has been computed. MLX's own code for CPUs
// gives it its strides; on all devices that computes nothing and asks for no memory.
std::optional<mx::array> Tape::view_at_once(size_t node, const Arrays& values) const {
  const TapeView view = views_[node];
  if (view == TapeView::kNone) {
    return std::nullopt;
  }
  const mx::array& input = values[graph_.nodes[node].inputs[0]];
  if (!is_computed(input) || input.size() == 0 ||
      (view == TapeView::kOfDenseInput && !input.flags().row_contiguous)) {
    return std::nullopt;
  }
  const TapeForm& form = graph_.nodes[node].outputs[0];
  Arrays made = {mx::array(form.shape, form.dtype, nullptr, Arrays{})};
  graph_.nodes[node].primitive->eval_cpu({input}, made);
  made[0].set_status(mx::array::Status::available);
  return made[0];
}

std::optional<Arrays> Tape::operator()(const Arrays& inputs) const {
  if (inputs.size() != graph_.inputs.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].shape() != graph_.inputs[i].shape ||
        inputs[i].dtype() != graph_.inputs[i].dtype) {
      return std::nullopt;
    }
  }
  Arrays values;
  values.reserve(graph_.num_values);
  values.insert(values.end(), inputs.begin(), inputs.end());
  values.insert(values.end(), graph_.constants.begin(), graph_.constants.end());
  for (size_t at = 0; at < graph_.nodes.size(); ++at) {
    const TapeNode& node = graph_.nodes[at];
    if (auto view = view_at_once(at, values)) {
      values.push_back(*std::move(view));
      continue;
    }
    Arrays given;
    given.reserve(node.inputs.size());
    for (const size_t number : node.inputs) {
      given.push_back(values[number]);
    }
    if (node.outputs.size() == 1) {
      const TapeForm& form = node.outputs[0];
      values.emplace_back(form.shape, form.dtype, node.primitive, std::move(given));
      continue;
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const TapeForm& form : node.outputs) {
      shapes.push_back(form.shape);
      dtypes.push_back(form.dtype);
    }
    for (mx::array& output :
         mx::array::make_arrays(std::move(shapes), dtypes, node.primitive, given)) {
      values.push_back(std::move(output));
    }
  }
  Arrays outputs;
  outputs.reserve(graph_.outputs.size());
  for (const size_t number : graph_.outputs) {
    outputs.push_back(values[number]);
  }
  return outputs;
}

std::vector<std::string> Tape::names() const {
  std::vector<std::string> found;
  for (const TapeNode& node : graph_.nodes) {
    found.emplace_back(node.primitive->name());
  }
  return found;
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

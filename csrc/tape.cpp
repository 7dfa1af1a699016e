#include "csrc/tape.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "csrc/tape_groups.h"
#include "csrc/tape_views.h"
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

// Tells each array of the others, which are outputs of its primitive, too.
void make_siblings(Arrays::iterator begin, Arrays::iterator end) {
  for (auto array = begin; array != end; ++array) {
    Arrays others(begin, array);
    others.insert(others.end(), array + 1, end);
    array->set_siblings(std::move(others), static_cast<uint16_t>(array - begin));
  }
}

}  // namespace

Tape::Tape(const Arrays& inputs, const Arrays& outputs, const Arrays& elsewhere, bool groups) {
  TapeGraph graph;
  std::unordered_map<uintptr_t, size_t> numbers;
  for (const mx::array& input : inputs) {
    require(numbers.emplace(input.id(), graph.inputs.size()).second, "Tape",
            "two inputs are one array");
    graph.inputs.push_back({input.shape(), input.dtype()});
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
      numbers.emplace(array.id(), graph.inputs.size() + graph.constants.size());
      graph.constants.push_back(array);
    }
  }
  graph.num_values = graph.inputs.size() + graph.constants.size();
  for (const mx::array& array : order) {
    if (is_constant(array)) {
      continue;
    }
    TapeNode node{array.primitive_ptr(), {}, {}, graph.num_values};
    for (const mx::array& input : array.inputs()) {
      node.inputs.push_back(numbers.at(input.id()));
    }
    for (const mx::array& output : array.outputs()) {
      numbers.emplace(output.id(), graph.num_values++);
      node.outputs.push_back({output.shape(), output.dtype()});
    }
    graph.nodes.push_back(std::move(node));
  }
  for (const mx::array& output : outputs) {
    graph.outputs.push_back(numbers.at(output.id()));
  }
  join_reshapes(graph);
  drop_unused(graph);
  flatten_rows(graph);
  if (groups) {
    group_nodes(graph);
  } else {
    take_views(graph);
  }
  lay_out(graph);
}

// The number of a form.
uint32_t Tape::form(const TapeForm& form) {
  const auto found = std::find_if(forms_.begin(), forms_.end(), [&](const TapeForm& each) {
    return each.dtype == form.dtype && each.shape == form.shape;
  });
  if (found == forms_.end()) {
    forms_.push_back(form);
    return static_cast<uint32_t>(forms_.size() - 1);
  }
  return static_cast<uint32_t>(found - forms_.begin());
}

void Tape::lay_out(const TapeGraph& graph) {
  for (const TapeForm& input : graph.inputs) {
    of_inputs_.push_back(form(input));
  }
  constants_ = graph.constants;
  results_ = graph.outputs;
  num_values_ = graph.num_values;
  // The arrays of all steps count their references to primitives in one place.
  const auto primitives = std::make_shared<std::vector<std::shared_ptr<mx::Primitive>>>();
  for (const TapeNode& node : graph.nodes) {
    primitives->push_back(node.primitive);
    steps_.push_back({std::shared_ptr<mx::Primitive>(primitives, node.primitive.get()),
                      static_cast<uint32_t>(node.inputs.size()),
                      static_cast<uint32_t>(node.outputs.size())});
    for (const size_t input : node.inputs) {
      reads_.push_back({static_cast<uint32_t>(input), false});
    }
    for (const TapeForm& output : node.outputs) {
      of_outputs_.push_back(form(output));
    }
  }
  std::vector<bool> is_read(num_values_, false);
  for (const size_t result : results_) {
    is_read[result] = true;
  }
  for (auto read = reads_.rbegin(); read != reads_.rend(); ++read) {
    read->is_last = !is_read[read->value];
    is_read[read->value] = true;
  }
}

bool Tape::fits(const Arrays& inputs) const {
  if (inputs.size() != of_inputs_.size()) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TapeForm& expected = forms_[of_inputs_[i]];
    if (inputs[i].shape() != expected.shape || inputs[i].dtype() != expected.dtype) {
      return false;
    }
  }
  return true;
}

std::optional<Arrays> Tape::operator()(Arrays inputs) const {
  if (!fits(inputs)) {
    return std::nullopt;
  }
  Arrays values = std::move(inputs);
  values.reserve(num_values_);
  values.insert(values.end(), constants_.begin(), constants_.end());
  auto read = reads_.begin();
  auto output = of_outputs_.begin();
  for (const Step& step : steps_) {
    Arrays given;
    given.reserve(step.num_inputs);
    for (uint32_t i = 0; i < step.num_inputs; ++i, ++read) {
      mx::array& value = values[read->value];
      given.push_back(read->is_last ? std::move(value) : value);
    }
    for (uint32_t left = step.num_outputs; left > 0; --left, ++output) {
      const TapeForm& form = forms_[*output];
      values.emplace_back(form.shape, form.dtype, step.primitive,
                          left > 1 ? given : std::move(given));
    }
    if (step.num_outputs > 1) {
      make_siblings(values.end() - step.num_outputs, values.end());
    }
  }
  Arrays outputs;
  outputs.reserve(results_.size());
  for (const size_t number : results_) {
    outputs.push_back(values[number]);
  }
  return outputs;
}

std::vector<std::string> Tape::names() const {
  std::vector<std::string> found;
  for (const Step& step : steps_) {
    found.emplace_back(step.primitive->name());
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

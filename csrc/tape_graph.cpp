#include "csrc/tape_graph.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "mlx/ops.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// MLX exports no class of most primitives, so that names tell them apart.
template <size_t kCount>
bool is_any(std::string_view name, const std::array<std::string_view, kCount>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::array<std::string_view, 5> kReshapes = {"Reshape", "Flatten", "Unflatten", "Squeeze",
                                                       "ExpandDims"};
constexpr std::array<std::string_view, 3> kNorms = {"RMSNorm", "LayerNorm", "PagedRmsNorm"};
constexpr std::array<std::string_view, 12> kElementwise = {
    "Add",     "Subtract", "Multiply", "Divide", "Maximum", "Minimum",
    "Sigmoid", "Tanh",     "Exp",      "Square", "AsType",  "PagedActivate"};
constexpr std::array<std::string_view, 4> kDense = {"Matmul", "AddMM", "QuantizedMatmul", "Gather"};

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

// Whether a primitive gives its input `from` another shape and keeps the order of the elements.
bool is_reshape(const mx::Primitive& primitive, const mx::Shape& from) {
  const std::string_view name = primitive.name();
  if (name == "Transpose") {
    return keeps_order(static_cast<const mx::Transpose&>(primitive), from);
  }
  return is_any(name, kReshapes);
}

std::shared_ptr<mx::Primitive> reshape_primitive(const TapeForm& from, const mx::Shape& to,
                                                 mx::Stream stream) {
  const mx::array given(from.shape, from.dtype, nullptr, Arrays{});
  return mx::reshape(given, to, stream).primitive_ptr();
}

// Rewrites a graph node by node for flatten_rows.
class RowFlattener {
 public:
  explicit RowFlattener(TapeGraph& graph) : graph_(graph), forms_(forms_of(graph)) {}

  void run() {
    std::vector<TapeNode> nodes;
    std::swap(nodes, graph_.nodes);
    for (TapeNode& node : nodes) {
      if (is_reshape_node(node)) {
        note_reshape(node);
      } else if (treats_rows_alike(node)) {
        if (reads_flattened(node)) {
          flatten(node);
          continue;
        }
        is_dense_[node.first_output] = all_are_dense(node);
      } else {
        is_dense_[node.first_output] = is_any(node.primitive->name(), kDense);
      }
      graph_.nodes.push_back(std::move(node));
    }
  }

 private:
  const mx::Shape& shape(size_t value) const { return forms_[value].shape; }

  bool is_reshape_node(const TapeNode& node) const {
    return node.inputs.size() == 1 && is_reshape(*node.primitive, shape(node.inputs[0]));
  }

  void note_reshape(const TapeNode& node) {
    const size_t from = node.inputs[0], to = node.first_output;
    is_dense_[to] = is_dense_[from];
    const bool flattened = shape(from).size() == 2 && shape(to).size() > 2;
    if (flattened && shape(from).back() == shape(to).back()) {
      rows_.emplace(to, from);
    }
  }

  // Whether the outputs and each input that is not one row have one shape, of more than two axes.
  bool treats_rows_alike(const TapeNode& node) const {
    const std::string_view name = node.primitive->name();
    const bool is_norm = is_any(name, kNorms);
    if (!is_norm && !is_any(name, kElementwise) && !name.starts_with("Compiled")) {
      return false;
    }
    const mx::Shape& full = node.outputs[0].shape;
    const auto fits = [&](const mx::Shape& each) { return each == full || each.size() <= 1; };
    const auto same = [&](const TapeForm& form) { return form.shape == full; };
    return full.size() > 2 && (!is_norm || shape(node.inputs[0]) == full) &&
           std::all_of(node.outputs.begin(), node.outputs.end(), same) &&
           std::all_of(node.inputs.begin(), node.inputs.end(),
                       [&](size_t input) { return fits(shape(input)); });
  }

  // Whether one of the inputs was [R, W], and the others can be without a copy.
  bool reads_flattened(const TapeNode& node) {
    bool any = false;
    for (const size_t input : node.inputs) {
      if (shape(input).size() > 1) {
        any = any || rows_.count(input) > 0;
        if (rows_.count(input) == 0 && !is_dense_[input]) {
          return false;
        }
      }
    }
    return any;
  }

  bool all_are_dense(const TapeNode& node) {
    return std::all_of(node.inputs.begin(), node.inputs.end(),
                       [&](size_t input) { return shape(input).size() <= 1 || is_dense_[input]; });
  }

  // A node that gives `from` the shape of `to`.
  void add_reshape(size_t from, size_t to, mx::Stream stream) {
    const TapeForm& form = forms_[to];
    graph_.nodes.push_back(
        {reshape_primitive(forms_[from], form.shape, stream), {from}, {form}, to});
  }

  size_t new_value(TapeForm form) {
    forms_.push_back(std::move(form));
    return graph_.num_values++;
  }

  void flatten(TapeNode& node) {
    const mx::Stream stream = node.primitive->stream();
    const TapeForm& given = node.outputs[0];
    const int width = given.shape.back();
    size_t size = 1;
    for (const int length : given.shape) {
      size *= length;
    }
    const mx::Shape rows = {width == 0 ? 0 : static_cast<int>(size / width), width};
    TapeNode flat{node.primitive, node.inputs, node.outputs, 0};
    for (size_t& input : flat.inputs) {
      if (shape(input).size() <= 1) {
        continue;
      }
      if (rows_.count(input) == 0) {
        const size_t value = new_value({rows, forms_[input].dtype});
        add_reshape(input, value, stream);
        rows_.emplace(input, value);
      }
      input = rows_.at(input);
    }
    flat.first_output = graph_.num_values;
    for (TapeForm& form : flat.outputs) {
      form.shape = rows;
      new_value(form);
    }
    const size_t first = flat.first_output, count = flat.outputs.size();
    graph_.nodes.push_back(std::move(flat));
    for (size_t i = 0; i < count; ++i) {
      const size_t output = node.first_output + i;
      add_reshape(first + i, output, stream);
      rows_.emplace(output, first + i);
      is_dense_[output] = true;
    }
  }

  TapeGraph& graph_;
  std::vector<TapeForm> forms_;
  std::unordered_map<size_t, size_t> rows_;    // values that are [R, W] by another number
  std::unordered_map<size_t, bool> is_dense_;  // whether their memory has the elements in order
};

}  // namespace

TapeView view_of(const TapeNode& node) {
  const std::string_view name = node.primitive->name();
  if (node.inputs.size() != 1) {
    return TapeView::kNone;
  }
  if (name == "Reshape" || name == "Flatten" || name == "Unflatten") {
    return TapeView::kOfDenseInput;
  }
  const bool is_view = name == "Transpose" || name == "ExpandDims" || name == "Squeeze";
  return is_view ? TapeView::kAlways : TapeView::kNone;
}

std::vector<TapeForm> forms_of(const TapeGraph& graph) {
  std::vector<TapeForm> forms = graph.inputs;
  for (const mx::array& constant : graph.constants) {
    forms.push_back({constant.shape(), constant.dtype()});
  }
  for (const TapeNode& node : graph.nodes) {
    forms.insert(forms.end(), node.outputs.begin(), node.outputs.end());
  }
  return forms;
}

void flatten_rows(TapeGraph& graph) {
  TapeGraph flat = graph;
  RowFlattener(flat).run();
  drop_unused(flat);
  join_reshapes(flat);
  drop_unused(flat);
  if (flat.nodes.size() < graph.nodes.size()) {
    graph = std::move(flat);
  }
}

void join_reshapes(TapeGraph& graph) {
  const std::vector<TapeForm> forms = forms_of(graph);
  std::unordered_map<size_t, size_t> before, same;
  for (TapeNode& node : graph.nodes) {
    for (size_t& input : node.inputs) {
      const auto found = same.find(input);
      input = found == same.end() ? input : found->second;
    }
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
      node.primitive =
          reshape_primitive(forms[source], forms[output].shape, node.primitive->stream());
      node.inputs = {source};
    }
  }
  for (size_t& output : graph.outputs) {
    const auto found = same.find(output);
    output = found == same.end() ? output : found->second;
  }
}

void drop_unused(TapeGraph& graph) {
  std::vector<bool> is_read(graph.num_values, false);
  for (const size_t output : graph.outputs) {
    is_read[output] = true;
  }
  std::vector<TapeNode> kept;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
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
  graph.num_values = graph.inputs.size() + graph.constants.size();
  for (size_t value = 0; value < graph.num_values; ++value) {
    numbers.emplace(value, value);
  }
  graph.nodes.assign(std::make_move_iterator(kept.rbegin()), std::make_move_iterator(kept.rend()));
  for (TapeNode& node : graph.nodes) {
    for (size_t& input : node.inputs) {
      input = numbers.at(input);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      numbers.emplace(node.first_output + i, graph.num_values++);
    }
    node.first_output = graph.num_values - node.outputs.size();
  }
  for (size_t& output : graph.outputs) {
    output = numbers.at(output);
  }
}

}  // namespace mlx_paged

#include "csrc/tape_groups.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "csrc/cpu/task.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Of one group. More nodes would let the stream's thread wait longer for its first task.
constexpr size_t kMostNodes = 32;

// Of what is between the nodes of a group.
constexpr size_t kMostBytes = 1 << 20;

size_t bytes_of(const TapeForm& form) {
  size_t bytes = mx::size_of(form.dtype);
  for (const int length : form.shape) {
    bytes *= length;
  }
  return bytes;
}

// A node of a group. Values have numbers: inputs of the group, then the outputs of each step.
struct GroupStep {
  TapeNode node;
  cpu::TaskPrimitive* task;  // null: MLX's primitive
  TapeView view;
  std::vector<int> places;  // of each output among those of the group, or -1
};

class NodeGroup : public mx::Primitive {
 public:
  NodeGroup(mx::Stream stream, std::vector<GroupStep> steps)
      : mx::Primitive(stream), steps_(std::move(steps)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<std::function<void()>> tasks;
    const auto dispatch = [&] {
      if (!tasks.empty()) {
        encoder.dispatch([tasks = std::exchange(tasks, {})] {
          for (const auto& task : tasks) {
            task();
          }
        });
      }
    };
    Arrays values = inputs;
    for (const GroupStep& step : steps_) {
      Arrays given, made;
      for (const size_t input : step.node.inputs) {
        given.push_back(values[input]);
      }
      for (size_t i = 0; i < step.places.size(); ++i) {
        const TapeForm& form = step.node.outputs[i];
        // Some of MLX's primitives ask their output for its primitive's stream.
        made.push_back(step.places[i] < 0
                           ? mx::array(form.shape, form.dtype, step.node.primitive, Arrays{})
                           : outputs[step.places[i]]);
      }
      if (step.task != nullptr) {
        tasks.push_back(step.task->task(given, made));
      } else {
        const bool is_dense = given.size() == 1 && given[0].flags().row_contiguous;
        if (step.view == TapeView::kNone || (step.view == TapeView::kOfDenseInput && !is_dense)) {
          dispatch();
        }
        step.node.primitive->eval_cpu(given, made);
      }
      for (size_t i = 0; i < made.size(); ++i) {
        if (step.places[i] < 0) {
          encoder.add_temporary(made[i]);  // until the stream has computed the group
        }
        values.push_back(made[i]);
      }
    }
    dispatch();
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[mlx_paged.Tape] groups of nodes are computed on CPUs only");
  }

  const char* name() const override { return "PagedGroup"; }

 private:
  std::vector<GroupStep> steps_;
};

// Whether the first output of the graph depends on each node.
std::vector<bool> needed_for_first(const TapeGraph& graph) {
  std::vector<bool> is_read(graph.num_values, false), is_needed(graph.nodes.size(), false);
  if (!graph.outputs.empty()) {
    is_read[graph.outputs[0]] = true;
  }
  for (size_t at = graph.nodes.size(); at-- > 0;) {
    const TapeNode& node = graph.nodes[at];
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      is_needed[at] = is_needed[at] || is_read[node.first_output + i];
    }
    for (const size_t input : node.inputs) {
      is_read[input] = is_read[input] || is_needed[at];
    }
  }
  return is_needed;
}

// The number of the last node that reads each value; of outputs the number of nodes.
std::vector<size_t> last_reads(const TapeGraph& graph) {
  std::vector<size_t> last(graph.num_values, 0);
  for (size_t at = 0; at < graph.nodes.size(); ++at) {
    for (const size_t input : graph.nodes[at].inputs) {
      last[input] = at;
    }
  }
  for (const size_t output : graph.outputs) {
    last[output] = graph.nodes.size();
  }
  return last;
}

// One node of nodes [begin, end). Appends the numbers that its outputs have in the graph.
TapeNode grouped(const TapeGraph& graph, size_t begin, size_t end, const std::vector<size_t>& last,
                 std::vector<size_t>& outputs) {
  TapeNode group{nullptr, {}, {}, 0};
  std::unordered_map<size_t, size_t> numbers;
  const size_t first = graph.nodes[begin].first_output;
  for (size_t at = begin; at < end; ++at) {
    for (const size_t input : graph.nodes[at].inputs) {
      if (input < first && numbers.emplace(input, group.inputs.size()).second) {
        group.inputs.push_back(input);
      }
    }
  }
  std::vector<GroupStep> steps;
  size_t num_values = group.inputs.size();
  for (size_t at = begin; at < end; ++at) {
    const TapeNode& node = graph.nodes[at];
    GroupStep step{
        node, dynamic_cast<cpu::TaskPrimitive*>(node.primitive.get()), view_of(node), {}};
    for (size_t& input : step.node.inputs) {
      input = numbers.at(input);
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const size_t value = node.first_output + i;
      numbers.emplace(value, num_values++);
      const bool leaves = last[value] >= end;
      step.places.push_back(leaves ? static_cast<int>(group.outputs.size()) : -1);
      if (leaves) {
        group.outputs.push_back(node.outputs[i]);
        outputs.push_back(value);
      }
    }
    steps.push_back(std::move(step));
  }
  group.primitive =
      std::make_shared<NodeGroup>(graph.nodes[begin].primitive->stream(), std::move(steps));
  return group;
}

}  // namespace

void group_nodes(TapeGraph& graph) {
  const std::vector<bool> is_needed = needed_for_first(graph);
  const std::vector<size_t> last = last_reads(graph);
  std::vector<TapeNode> nodes;
  std::vector<size_t> numbers(graph.num_values);  // of each value in the new graph
  size_t num_values = graph.inputs.size() + graph.constants.size();
  for (size_t value = 0; value < num_values; ++value) {
    numbers[value] = value;
  }
  const auto add = [&](TapeNode node, const std::vector<size_t>& outputs) {
    for (size_t& input : node.inputs) {
      input = numbers[input];
    }
    node.first_output = num_values;
    for (const size_t output : outputs) {
      numbers[output] = num_values++;
    }
    nodes.push_back(std::move(node));
  };
  for (size_t at = 0; at < graph.nodes.size();) {
    const mx::Stream stream = graph.nodes[at].primitive->stream();
    size_t end = at, bytes = 0;
    for (; end < graph.nodes.size() && end - at < kMostNodes && is_needed[end]; ++end) {
      const TapeNode& node = graph.nodes[end];
      for (const TapeForm& form : node.outputs) {
        bytes += std::string_view(node.primitive->name()) == "WriteKV" ? 0 : bytes_of(form);
      }
      const mx::Stream own = node.primitive->stream();
      if (own.device != mx::Device::cpu || own != stream || bytes > kMostBytes) {
        break;
      }
    }
    std::vector<size_t> outputs;
    if (end - at > 1) {
      add(grouped(graph, at, end, last, outputs), outputs);
      at = end;
      continue;
    }
    for (size_t i = 0; i < graph.nodes[at].outputs.size(); ++i) {
      outputs.push_back(graph.nodes[at].first_output + i);
    }
    add(std::move(graph.nodes[at]), outputs);
    ++at;
  }
  graph.nodes = std::move(nodes);
  for (size_t& output : graph.outputs) {
    output = numbers[output];
  }
  graph.num_values = num_values;
}

}  // namespace mlx_paged

#include "csrc/tape_views.h"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/compute_at_once.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Which input of a node is seen through which view.
struct InputView {
  size_t input;
  std::shared_ptr<mx::Primitive> primitive;
  TapeForm form;
};

// A primitive some of whose inputs are views of those that it is given. It has its name.
class OfViews : public mx::Primitive {
 public:
  OfViews(std::shared_ptr<mx::Primitive> primitive, std::vector<InputView> views)
      : mx::Primitive(primitive->stream()),
        primitive_(std::move(primitive)),
        views_(std::move(views)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    primitive_->eval_cpu(seen(inputs, &mx::Primitive::eval_cpu), outputs);
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    primitive_->eval_gpu(seen(inputs, &mx::Primitive::eval_gpu), outputs);
  }

  const char* name() const override { return primitive_->name(); }

 private:
  // MLX keeps the memory of the inputs that this primitive is given, which their views share.
  Arrays seen(const Arrays& inputs, void (mx::Primitive::*eval)(const Arrays&, Arrays&)) {
    Arrays found = inputs;
    for (const InputView& view : views_) {
      const Arrays from = {inputs[view.input]};
      // Some of MLX's primitives ask their output for its primitive's stream.
      Arrays made = {mx::array(view.form.shape, view.form.dtype, view.primitive, Arrays{})};
      (*view.primitive.*eval)(from, made);
      if (made[0].data_shared_ptr() != from[0].data_shared_ptr()) {  // a reshape that copies
        keep_in_evaluation(made[0], stream());
      }
      found[view.input] = std::move(made[0]);
    }
    return found;
  }

  std::shared_ptr<mx::Primitive> primitive_;
  std::vector<InputView> views_;
};

// How many nodes read each value. A result of the graph has one reader more.
std::vector<size_t> numbers_of_readers(const TapeGraph& graph) {
  std::vector<size_t> readers(graph.num_values, 0);
  for (const TapeNode& node : graph.nodes) {
    for (const size_t input : node.inputs) {
      ++readers[input];
    }
  }
  for (const size_t output : graph.outputs) {
    ++readers[output];
  }
  return readers;
}

}  // namespace

void take_views(TapeGraph& graph) {
  const std::vector<size_t> readers = numbers_of_readers(graph);
  const size_t num_given = graph.inputs.size() + graph.constants.size();
  std::vector<const TapeNode*> views(graph.num_values, nullptr);  // that their readers make
  for (TapeNode& node : graph.nodes) {
    std::vector<InputView> of_inputs;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const TapeNode* view = views[node.inputs[i]];
      if (view != nullptr && view->primitive->stream() == node.primitive->stream()) {
        of_inputs.push_back({i, view->primitive, view->outputs[0]});
        node.inputs[i] = view->inputs[0];
      }
    }
    if (!of_inputs.empty()) {
      node.primitive = std::make_shared<OfViews>(node.primitive, std::move(of_inputs));
    }
    const TapeView kind = view_of(node);
    const bool is_of_input = kind == TapeView::kAlways && node.inputs[0] < num_given;
    if (kind != TapeView::kNone && (is_of_input || readers[node.first_output] == 1)) {
      views[node.first_output] = &node;
    }
  }
  drop_unused(graph);
}

}  // namespace mlx_paged

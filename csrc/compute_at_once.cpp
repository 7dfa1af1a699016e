#include "csrc/compute_at_once.h"

#include <cstdint>
#include <unordered_set>

#include "csrc/metal/plans.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mlx_paged {

namespace {

// Adds the nodes that `array` is computed from, and then itself.
void add_nodes(const mx::array& array, std::unordered_set<uintptr_t>& known, Arrays& nodes) {
  if (!array.has_primitive() || !known.insert(array.id()).second) {
    return;
  }
  for (const mx::array& sibling : array.siblings()) {
    known.insert(sibling.id());
  }
  for (const mx::array& input : array.inputs()) {
    add_nodes(input, known, nodes);
  }
  nodes.push_back(array);
}

}  // namespace

mx::array leaf_of(const mx::array& input) {
  mx::array leaf(input.shape(), input.dtype(), nullptr, {});
  leaf.copy_shared_buffer(input);
  return leaf;
}

void keep_in_evaluation(const mx::array& array, mx::Stream stream) {
  stream.device == mx::Device::cpu ? mx::cpu::get_command_encoder(stream).add_temporary(array)
                                   : keep_until_computed(array, stream);
}

void compute_at_once(const mx::array& result, const Arrays& inputs, mx::Stream stream) {
  const bool on_cpu = stream.device == mx::Device::cpu;
  std::unordered_set<uintptr_t> known;
  Arrays nodes;
  add_nodes(result, known, nodes);
  for (mx::array& node : nodes) {
    Arrays outputs = node.outputs();
    mx::Primitive& primitive = node.primitive();
    on_cpu ? primitive.eval_cpu(node.inputs(), outputs)
           : primitive.eval_gpu(node.inputs(), outputs);
  }
  // MLX keeps the memory of the primitive's inputs and output itself.
  std::unordered_set<const void*> kept = {result.buffer().ptr()};
  for (const mx::array& input : inputs) {
    kept.insert(input.buffer().ptr());
  }
  for (const mx::array& node : nodes) {
    for (const mx::array& each : node.inputs()) {
      if (kept.insert(each.buffer().ptr()).second) {
        keep_in_evaluation(each, stream);
      }
    }
  }
}

}  // namespace mlx_paged

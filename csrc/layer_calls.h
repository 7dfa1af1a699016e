// What a layer does with its pool in one forward: it writes keys and values, and attends to them.
#pragma once

#include <utility>
#include <vector>

#include "csrc/ops.h"

namespace mlx_paged {

// What the layers that share their block tables read in one forward. The fields are those of
// mlx_paged.attention.forward.Forward.
class ForwardArrays {
 public:
  ForwardArrays(OptionalArray slot_mapping, mx::array block_tables, mx::array context_lens,
                OptionalArray shared_prefixes, mx::array row_tables, int max_context,
                OptionalArray held);

  // The index of each head's part of each block of `row_tables`, made once for each number of
  // heads.
  const mx::array& runs(int heads);

  const OptionalArray slot_mapping;
  const mx::array block_tables;
  const mx::array context_lens;
  const OptionalArray shared_prefixes;
  const mx::array row_tables;
  const int max_context;
  const OptionalArray held;

 private:
  std::vector<std::pair<int, mx::array>> runs_;
};

// A kind of write of which is known that the device has a kernel for it.
struct KnownWrite {
  mx::Dtype dtype;  // of the model's keys and values
  bool rotates;     // whether the pool stores the Hadamard transforms of rows
  mx::Device device = mx::default_device();
};

// A kind of attention of which is known that the device has a kernel for it.
struct KnownAttention {
  KnownAttention(const mx::array& q, std::optional<int> window, bool shares, bool rotates);

  mx::Dtype dtype;  // of the queries
  int heads;
  int columns;
  std::optional<int> window;
  bool shares;   // whether the kernel reads shared keys once
  bool rotates;  // whether the pool stores the Hadamard transforms of rows
  mx::Device device;
};

// The new handles of one layer's arrays, in the order of write_kv; then the gathered keys and
// values. `stored` are the arrays before. None, and nothing is written, where one call cannot do
// both.
std::optional<Arrays> append_kv(const mx::array& k, const mx::array& v, const Arrays& stored,
                                ForwardArrays& forward, const KnownWrite& known);

// Attention of a call without sinks by which each query sees what the layer's queries see; none
// where the call is not of the known kind.
OptionalArray attend_known(const mx::array& q, const Arrays& stored, const ForwardArrays& forward,
                           const KnownAttention& known, float scale);

}  // namespace mlx_paged

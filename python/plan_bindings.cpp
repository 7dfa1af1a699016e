// Launch plans as Python data, so that tests can execute them without a GPU.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "csrc/metal/plans.h"
#include "csrc/metal/refused_pipelines.h"
#include "csrc/validate.h"
#include "mlx/transforms.h"
#include "python/bindings.h"

namespace mlx_paged {

namespace {

// In the order of BufferBinding::Role.
constexpr const char* kRoles[] = {"input", "output", "pool_read", "pool_write", "scratch"};

nb::dict describe(const LaunchPlan& plan) {
  nb::dict constants;
  for (const FunctionConstant& constant : plan.constants) {
    constants[nb::int_(constant.index)] = constant.type == FunctionConstant::Type::kBool
                                              ? nb::object(nb::bool_(constant.value != 0))
                                              : nb::object(nb::int_(constant.value));
  }
  nb::list buffers;
  for (const auto& [index, role, which] : plan.buffers) {
    buffers.append(nb::make_tuple(index, kRoles[static_cast<int>(role)], which));
  }
  nb::dict launch;
  launch["kernel"] = plan.kernel;
  launch["instantiation"] = plan.instantiation;
  launch["source"] = library_source(plan);
  launch["library"] = library_name(plan);
  launch["pipeline"] = plan.pipeline_name();
  launch["constants"] = constants;
  launch["grid"] = nb::tuple(nb::cast(plan.grid));
  launch["grid_in_threads"] = plan.grid_in_threads;
  launch["threadgroup"] = nb::tuple(nb::cast(plan.threadgroup));
  launch["buffers"] = buffers;
  launch["params"] =
      nb::make_tuple(plan.params_index, nb::bytes(plan.params.data(), plan.params.size()));
  return launch;
}

// See `end_of_work`, of the default stream; None if there is nothing to wait for.
nb::object end_of_default_stream() {
  const mx::Device device = mx::default_device();
  if (device == mx::Device::cpu) {
    return nb::none();
  }
  const std::function<void()> wait = end_of_work(mx::default_stream(device));
  return wait ? nb::cpp_function([wait] {
    nb::gil_scoped_release released;
    wait();
  })
              : nb::none();
}

// Of a launch that `describe` returned.
std::string refusal_of(const nb::dict& launch) {
  LaunchPlan plan;
  plan.kernel = nb::cast<std::string>(launch["kernel"]);
  plan.instantiation = nb::cast<std::string>(launch["instantiation"]);
  plan.threadgroup = nb::cast<std::array<uint32_t, 3>>(launch["threadgroup"]);
  for (const auto& [index, value] : nb::cast<nb::dict>(launch["constants"])) {
    using Type = FunctionConstant::Type;
    plan.constants.push_back({nb::cast<int>(index),
                              nb::isinstance<nb::bool_>(value) ? Type::kBool : Type::kInt,
                              nb::cast<int>(value)});
  }
  return refusal(plan);
}

nb::dict describe(const LaunchPlans& plans, const Arrays& inputs, nb::list outputs) {
  nb::list launches;
  for (const LaunchPlan& plan : plans.launches) {
    launches.append(describe(plan));
  }
  nb::dict call;
  call["inputs"] = inputs;
  call["outputs"] = outputs;
  call["launches"] = launches;
  call["scratch_bytes"] = plans.scratch_bytes;
  return call;
}

nb::dict describe_attention(AttentionInputs in, const AttentionOptions& options) {
  check_attention(in, options, false);
  AttentionCall call =
      attention_call(std::move(in), options, mx::default_stream(mx::Device::cpu), true);
  mx::eval(call.inputs);
  nb::list outputs;
  for (size_t i = 0; i < call.shapes.size(); ++i) {
    outputs.append(nb::make_tuple(std::vector<int>(call.shapes[i].begin(), call.shapes[i].end()),
                                  call.dtypes[i]));
  }
  return describe(plan_attention(call.inputs, call.config), call.inputs, outputs);
}

// A call that writes to the pool which is inputs[first_output] and the input after it, and to the
// scales from inputs[first_scales] on.
nb::dict describe_edit(LaunchPlans (*plan)(const Arrays&), Arrays inputs, int first_output,
                       int first_scales) {
  mx::eval(inputs);
  nb::list outputs;
  outputs.append(first_output);
  outputs.append(first_output + 1);
  for (int i = first_scales; i < static_cast<int>(inputs.size()); ++i) {
    outputs.append(i);
  }
  return describe(plan(inputs), inputs, outputs);
}

nb::dict describe_write(const mx::array& k, const mx::array& v, const mx::array& k_cache,
                        const mx::array& v_cache, const mx::array& slot_mapping,
                        const OptionalArray& k_scales, const OptionalArray& v_scales) {
  const Arrays inputs = write_inputs(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales);
  return describe_edit(plan_write_kv, inputs, 2, 5);
}

nb::dict describe_copy(const mx::array& k_cache, const mx::array& v_cache,
                       const mx::array& block_pairs) {
  check_copy(k_cache, v_cache, block_pairs);
  return describe_edit(plan_copy_blocks, {k_cache, v_cache, block_pairs}, 0, 3);
}

}  // namespace

void bind_plans(nb::module_& m) {
  nb::module_ metal = m.def_submodule(
      "metal",
      "Launch plans of the Metal kernels, for tests and pre-warming. A call is a dict: inputs "
      "(arrays), outputs ((shape, dtype), or the index of the input that is written in place), "
      "scratch_bytes, launches (dicts).");
  metal.def("has_metal", &has_metal, "Whether this build can encode launches.");
  metal.def("unsupported", &unsupported_on_metal, "head_dim"_a, "value_dim"_a,
            "Why the Metal kernels do not support these head dimensions; empty if they do.");
  metal.def("serves_chunks", &has_matrix_kernel, "dtype"_a, "head_dim"_a, "value_dim"_a,
            "Whether the kernel for chunks computes pools of this dtype with these dimensions.");
  metal.def("end_of_work", &end_of_default_stream,
            "Mark the end of what the default stream was given. Returns a function that waits for "
            "it, on the same thread, and raises RuntimeError if the GPU failed meanwhile; None on "
            "devices whose arrays raise by themselves.");
  metal.def("num_command_buffers", &num_command_buffers,
            "Command buffers with work of this package since the process began.");
  metal.def("refusal", &refusal_of, "launch"_a,
            "Compile a launch's pipeline; the compiler's message if it refuses, else nothing.");
  metal.def("note_refused", &note_refused_pipeline, "pipeline"_a,
            "Plan calls with this pipeline in their simplest form from now on.");
  metal.def("forget_refused", &forget_refused_pipelines,
            "Plan all calls as if no pipeline had been refused.");
  metal.def("use_simplest_forms", &use_simplest_forms, "is_wanted"_a,
            "Plan all calls in their simplest form, or no longer.");
  metal.attr("MOST_ROWS") = kMaxSharedRows;
  def_attention(metal, "plan_attention", &describe_attention,
                "The launches of paged_attention; with cu_seqlens, q is [T, H, 1, D].");
  metal.def("plan_write_kv", &describe_write, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a,
            "slot_mapping"_a, "k_scales"_a = nb::none(), "v_scales"_a = nb::none(),
            "The launches of write_kv.");
  metal.def("plan_copy_blocks", &describe_copy, "k_cache"_a, "v_cache"_a, "block_pairs"_a,
            "The launches of copy_blocks.");
}

}  // namespace mlx_paged

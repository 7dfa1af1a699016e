#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "csrc/metal/plans.h"
#include "mlx/allocator.h"
#include "mlx/backend/metal/device.h"

namespace mlx_paged {

namespace {

std::atomic<size_t> command_buffers = 0;

// The number of this thread. The system gives the id of a thread that has ended to a later one.
size_t thread_number() {
  static std::atomic<size_t> last = 0;
  static thread_local const size_t number = ++last;
  return number;
}

// Counts the command buffer that is open, unless it is the one that this thread has counted last.
void count_buffer(const mx::metal::CommandEncoder& encoder) {
  static thread_local const void* last = nullptr;
  const void* current = encoder.get_command_buffer();
  command_buffers += current != std::exchange(last, current);
}

// The specialised pipeline. It is compiled at its first use, and later found by name.
MTL::ComputePipelineState* pipeline(mx::metal::Device& device, const LaunchPlan& plan) {
  MTL::Library* library =
      device.get_library(library_name(plan), [&plan] { return library_source(plan); });
  mx::metal::MTLFCList constants;
  std::vector<uint8_t> flags(plan.constants.size());
  for (size_t i = 0; i < plan.constants.size(); ++i) {
    const FunctionConstant& constant = plan.constants[i];
    flags[i] = constant.value != 0;
    constant.type == FunctionConstant::Type::kBool
        ? constants.emplace_back(&flags[i], MTL::DataTypeBool, constant.index)
        : constants.emplace_back(&constant.value, MTL::DataTypeInt, constant.index);
  }
  auto* state = device.get_kernel(plan.kernel, library, plan.pipeline_name(), constants);
  const size_t threads =
      size_t{1} * plan.threadgroup[0] * plan.threadgroup[1] * plan.threadgroup[2];
  if (threads > state->maxTotalThreadsPerThreadgroup()) {
    throw std::runtime_error("[mlx_paged] " + plan.kernel + " needs threadgroups of " +
                             std::to_string(threads) + " threads: the pipeline allows " +
                             std::to_string(state->maxTotalThreadsPerThreadgroup()));
  }
  return state;
}

// The error of an earlier command buffer of this thread, for who waits next: MLX tells of it once.
thread_local std::exception_ptr noted;

// Opens an encoder, unless MLX tells of an error instead.
void open_encoder(mx::metal::CommandEncoder& encoder) {
  try {
    encoder.barrier();
  } catch (...) {
    noted = noted ? noted : std::current_exception();
  }
}

MTL::Size size(const std::array<uint32_t, 3>& xyz) { return MTL::Size(xyz[0], xyz[1], xyz[2]); }

// Registers a pool as an input and an output of MLX's current Metal encoder. An encoder waits only
// for the outputs of earlier encoders: otherwise a write could run before a read that was encoded
// earlier. Call this before set_input_array, which counts the elements of buffers that the encoder
// does not know yet: MLX ends a command buffer at 40 M elements, and a pool may have more.
void register_pool(mx::metal::CommandEncoder& encoder, const mx::array& pool, int index) {
  encoder.set_buffer(static_cast<const MTL::Buffer*>(pool.buffer().ptr()), index, pool.offset());
}

void bind(mx::metal::CommandEncoder& encoder, const BufferBinding& binding, const Arrays& inputs,
          Arrays& outputs, Arrays& scratch, bool writes_scratch) {
  const auto& [index, role, which] = binding;
  switch (role) {
    case BufferBinding::Role::kPoolRead:
      register_pool(encoder, inputs[which], index);
      [[fallthrough]];
    case BufferBinding::Role::kInput:
      encoder.set_input_array(inputs[which], index);
      break;
    case BufferBinding::Role::kPoolWrite:
      register_pool(encoder, outputs[which], index);
      [[fallthrough]];
    case BufferBinding::Role::kOutput:
      encoder.set_output_array(outputs[which], index);
      break;
    case BufferBinding::Role::kScratch:
      writes_scratch ? encoder.set_output_array(scratch[which], index)
                     : encoder.set_input_array(scratch[which], index);
      break;
  }
}

}  // namespace

bool has_metal() { return true; }

size_t num_command_buffers() { return command_buffers; }

void register_pool_read(const mx::array& pool, mx::Stream stream) {
  register_pool(mx::metal::get_command_encoder(stream), pool, 0);
}

void keep_until_computed(const mx::array& array, mx::Stream stream) {
  mx::metal::get_command_encoder(stream).add_temporary(array);
}

std::string refusal(const LaunchPlan& plan) {
  try {
    pipeline(mx::metal::device(mx::Device::gpu), plan);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// As MLX's synchronize, in two halves. A thread has its own encoders, and only they know of errors.
// The handlers of earlier command buffers have noted theirs when the handler of this one runs.
std::function<void()> end_of_work(mx::Stream stream) {
  const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto& encoder = mx::metal::get_command_encoder(stream);
  const auto buffer = NS::RetainPtr(encoder.get_command_buffer());
  encoder.end_encoding();
  // Metal says in which order command buffers start, not in which order they complete.
  open_encoder(encoder);
  encoder.end_encoding(true);  // it waits for the fences of all earlier encoders
  const auto handler = std::make_shared<std::promise<void>>();
  encoder.commit([handler] { handler->set_value(); });
  return [stream, buffer, thread = thread_number(), handled = handler->get_future().share()] {
    const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    buffer->waitUntilCompleted();
    handled.wait();
    if (thread != thread_number()) {
      throw std::runtime_error("[METAL] Command buffer of another thread: its status is unknown.");
    }
    auto& encoder = mx::metal::get_command_encoder(stream);
    encoder.end_encoding();
    open_encoder(encoder);
    encoder.end_encoding();
    if (noted) {
      std::rethrow_exception(std::exchange(noted, nullptr));
    }
  };
}

void encode(const LaunchPlans& plans, const Arrays& inputs, Arrays& outputs, mx::Stream stream) {
  auto& device = mx::metal::device(stream.device);
  auto& encoder = mx::metal::get_command_encoder(stream);
  count_buffer(encoder);
  Arrays scratch;
  for (const size_t bytes : plans.scratch_bytes) {
    scratch.emplace_back(mx::Shape{static_cast<int>(bytes / sizeof(float))}, mx::float32, nullptr,
                         Arrays{});
    scratch.back().set_data(mx::allocator::malloc(bytes));
    encoder.add_temporary(scratch.back());  // scratch only: inputs and outputs must stay fenced
  }
  const auto launch = [&](const LaunchPlan& plan, bool writes_scratch) {
    encoder.set_compute_pipeline_state(pipeline(device, plan));
    for (const BufferBinding& binding : plan.buffers) {
      bind(encoder, binding, inputs, outputs, scratch, writes_scratch);
    }
    encoder.set_bytes(plan.params.data(), static_cast<int>(plan.params.size()), plan.params_index);
    plan.grid_in_threads ? encoder.dispatch_threads(size(plan.grid), size(plan.threadgroup))
                         : encoder.dispatch_threadgroups(size(plan.grid), size(plan.threadgroup));
  };
  const auto merge = plans.launches.end() - (scratch.empty() ? 0 : 1);
  {
    // Barriers do not know what a concurrent context writes until it ends. Only attention has
    // several launches, and its outputs have new memory, which nothing before them reads.
    std::optional<mx::metal::CommandEncoder::ConcurrentContext> concurrent;
    if (merge - plans.launches.begin() > 1) {
      concurrent.emplace(encoder);
    }
    for (auto plan = plans.launches.begin(); plan != merge; ++plan) {
      launch(*plan, true);
    }
  }
  if (merge != plans.launches.end()) {
    launch(*merge, false);
  }
}

}  // namespace mlx_paged

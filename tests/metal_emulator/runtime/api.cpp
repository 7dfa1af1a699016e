// The C interface that runtime.py binds. Structures here and there have the same fields.
#include <cstring>
#include <exception>
#include <string>

#include "export.h"
#include "function_constants.h"
#include "launch.h"

namespace emulator {
namespace {

struct BufferBinding {
  int32_t index;
  int32_t alias_of;  // -1: none
  void* data;
  uint64_t size;
  int32_t is_writable;
};

struct Request {
  const Kernel* kernel;
  uint32_t grid[3];
  uint32_t threadgroup[3];
  int32_t grid_in_threads;
  int32_t buffer_count;
  const BufferBinding* buffers;
  const uint64_t* threadgroup_bytes;  // kMaxThreadgroupBuffers entries
  uint64_t seed;
  int32_t has_seed;
  int32_t watch_accesses;
  uint32_t threadgroup_limit;
  double cpu_seconds;
};

struct Counts {
  LaunchCounts launch;
  uint64_t threadgroup_bytes;
  TrafficCounts traffic[kMaxBuffers];
  LineCounts lines[kMaxBuffers];
  OperationCounts operations[kOperations];
};

struct FindingView {
  const char* kind;
  const char* detail;
  uint64_t code_offset;  // of the site in the kernel's library; 0: unknown
  uint64_t count;
};

std::unique_ptr<Launch> latest;
std::string error;

LaunchShape shape_of(const Request& request) {
  LaunchShape shape;
  for (int i = 0; i < 3; i++) {
    const uint32_t group = request.threadgroup[i], grid = request.grid[i];
    shape.threadgroup[i] = group;
    shape.threadgroups_per_grid[i] = request.grid_in_threads ? (grid + group - 1) / group : grid;
    shape.threads_per_grid[i] = request.grid_in_threads ? grid : grid * group;
  }
  return shape;
}

void launch(const Request& request) {
  static StackPool stacks;
  std::vector<size_t> threadgroup_bytes(request.threadgroup_bytes,
                                        request.threadgroup_bytes + kMaxThreadgroupBuffers);
  std::optional<uint64_t> seed;
  if (request.has_seed) seed = request.seed;
  latest.reset();
  latest =
      std::make_unique<Launch>(request.kernel, shape_of(request), threadgroup_bytes, seed, &stacks);
  for (int i = 0; i < request.buffer_count; i++) {
    const BufferBinding& binding = request.buffers[i];
    if (binding.alias_of >= 0) {
      latest->buffers.bind_alias(binding.index, binding.alias_of, binding.data, binding.size);
    } else {
      latest->buffers.bind(binding.index, binding.data, binding.size, binding.is_writable);
    }
  }
  latest->run(request.watch_accesses, request.threadgroup_limit, request.cpu_seconds);
  latest->buffers.copy_back();
}

}  // namespace

extern "C" {

// Function constants for the library that is loaded next.
EMULATOR_EXPORT void emulator_clear_constants() { function_constants::clear(); }
EMULATOR_EXPORT void emulator_set_constant(int id, int64_t integer, double real) {
  function_constants::set(id, integer, real);
}

// Null, or why the launch could not be made. Findings are not errors.
EMULATOR_EXPORT const char* emulator_launch(const Request* request) {
  try {
    launch(*request);
    return nullptr;
  } catch (const std::exception& exception) {
    current_launch = nullptr;
    error = exception.what();
    return error.c_str();
  }
}

EMULATOR_EXPORT void emulator_counts(Counts* counts) {
  counts->launch = latest->counts;
  counts->threadgroup_bytes = latest->arena.peak_bytes();
  for (int i = 0; i < kMaxBuffers; i++) {
    counts->traffic[i] = latest->monitor ? latest->monitor->traffic(i) : TrafficCounts();
    counts->lines[i] = latest->monitor ? latest->monitor->lines(i) : LineCounts();
  }
  for (int i = 0; i < kOperations; i++) {
    counts->operations[i] =
        latest->monitor ? latest->monitor->operations.counts(i) : OperationCounts();
  }
}

EMULATOR_EXPORT int emulator_finding_count() { return latest->findings.entries().size(); }

EMULATOR_EXPORT void emulator_finding(int index, FindingView* view) {
  auto entry = latest->findings.entries().begin();
  std::advance(entry, index);
  const Finding& finding = entry->second;
  const char* site = static_cast<const char*>(finding.site);
  view->kind = finding.kind;
  view->detail = finding.detail.c_str();
  view->code_offset = latest->image.contains(site) ? site - latest->image.begin() : 0;
  view->count = finding.count;
}

// Frees the copies of the arrays.
EMULATOR_EXPORT void emulator_forget() { latest.reset(); }

}  // extern "C"
}  // namespace emulator

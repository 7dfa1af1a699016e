#include "launch.h"

#include <algorithm>
#include <numeric>

#include "faults.h"

namespace emulator {

namespace {
enum Escape { kStarted = 0, kFault = 1, kAbandoned = 2 };
}

Launch* current_launch = nullptr;

ThreadPosition LaunchShape::first_thread(unsigned threadgroup_index) const {
  ThreadPosition position{};
  const unsigned* groups = threadgroups_per_grid;
  position.threadgroup_in_grid[0] = threadgroup_index % groups[0];
  position.threadgroup_in_grid[1] = threadgroup_index / groups[0] % groups[1];
  position.threadgroup_in_grid[2] = threadgroup_index / groups[0] / groups[1];
  for (int i = 0; i < 3; i++) {
    const unsigned before = position.threadgroup_in_grid[i] * threadgroup[i];
    position.threads_per_threadgroup[i] = std::min(threadgroup[i], threads_per_grid[i] - before);
    position.dispatch_threads_per_threadgroup[i] = threadgroup[i];
    position.threadgroups_per_grid[i] = threadgroups_per_grid[i];
    position.threads_per_grid[i] = threads_per_grid[i];
  }
  return position;
}

Launch::Launch(const Kernel* kernel, const LaunchShape& shape,
               std::vector<size_t> threadgroup_bytes, std::optional<uint64_t> seed,
               StackPool* stacks)
    : kernel(kernel),
      shape(shape),
      stacks(stacks),
      image(reinterpret_cast<const void*>(kernel->run)),
      arena(std::move(threadgroup_bytes)),
      order(seed) {}

void Launch::run(bool watch_accesses, unsigned threadgroup_limit, double cpu_seconds) {
  current_launch = this;
  threadgroup = std::make_unique<Threadgroup>(this);
  if (watch_accesses) monitor = std::make_unique<AccessMonitor>(this);
  {
    FaultHandlers handlers(cpu_seconds);
    const int reason = sigsetjmp(escape, 1);
    if (reason == kStarted) run_threadgroups();
    if (reason == kFault) report_fault();
  }
  running = nullptr;
  report_overruns();
  if (arena.peak_bytes() > threadgroup_limit) {
    findings.report(kind::threadgroup_limit, nullptr, [&] {
      return std::to_string(arena.peak_bytes()) + " bytes, the limit is " +
             std::to_string(threadgroup_limit);
    });
  }
  current_launch = nullptr;
}

void Launch::abandon() { siglongjmp(escape, kAbandoned); }

void Launch::abandon_overdue(const void* site) {
  findings.report(kind::endless, site, [&] { return "gave up in " + running->name(); });
  abandon();
}

void Launch::run_threadgroups() {
  turns_.resize(shape.threadgroups());
  std::iota(turns_.begin(), turns_.end(), 0u);
  order.shuffle(turns_);
  for (unsigned index : turns_) threadgroup->run(index);
}

void Launch::report_overruns() {
  for (int i = 0; i < kMaxBuffers; i++) {
    if (buffers[i].alias_of >= 0 || !buffers.is_overrun(i)) continue;
    findings.report(kind::out_of_bounds, nullptr, [&] {
      return "stores just past the end of buffer " + std::to_string(i) + ", which has " +
             std::to_string(buffers[i].size) + " bytes; Mode.RACE tells where";
    });
  }
}

}  // namespace emulator

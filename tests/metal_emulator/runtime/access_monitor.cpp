#include "access_monitor.h"

#include <string>

#include "launch.h"

namespace emulator {
namespace {

const char* kind_of(const Conflict& conflict) {
  if (conflict.scope == Conflict::in_simdgroup) return kind::race_in_simdgroup;
  if (conflict.scope == Conflict::in_threadgroup) return kind::race_in_threadgroup;
  return kind::race_in_grid;
}

}  // namespace

AccessMonitor::AccessMonitor(Launch* launch)
    : launch_(launch), threadgroup_memory_(Arena::kCapacity), buffers_(kMaxBuffers) {
  for (int i = 0; i < kMaxBuffers; i++) {
    const Buffer& buffer = launch->buffers[i];
    if (buffer.is_bound && buffer.alias_of < 0) buffers_[i].emplace(buffer.size);
  }
}

void AccessMonitor::check(const Access& access) {
  if (launch_->arena.contains(access.address)) {
    check_threadgroup_memory(access);
  } else if (std::optional<int> index = launch_->buffers.find(access.address)) {
    check_buffer(access, *index);
  } else {
    check_elsewhere(access);
  }
}

bool AccessMonitor::has_reported(const char* address) const {
  return address >= reported_.address && address < reported_.address + reported_.size;
}

TrafficCounts AccessMonitor::traffic(int buffer) const {
  const auto& shadow = buffers_[owner(buffer)];
  return shadow ? shadow->traffic : TrafficCounts();
}

LineCounts AccessMonitor::lines(int buffer) const { return lines_.counts(owner(buffer)); }

int AccessMonitor::owner(int buffer) const {
  const int alias = launch_->buffers[buffer].alias_of;
  return alias < 0 ? buffer : alias;
}

void AccessMonitor::check_threadgroup_memory(const Access& access) {
  const Arena& arena = launch_->arena;
  const size_t first = arena.offset(access.address);
  const size_t end = first + access.size;
  if (end > Arena::kCapacity || !arena.is_allocated(first) || !arena.is_allocated(end - 1)) {
    report(kind::threadgroup_bounds, access, [] { return std::string(); });
    return;
  }
  const Moment moment = now(/*is_device_memory=*/false);
  Conflict conflict;
  for (RaceCell& cell : threadgroup_memory_.cells(first, access.size)) {
    cell.forget_other_threadgroups(moment.threadgroup);
    if (access.is_atomic) {
      cell.assume_stored(moment);
      continue;
    }
    if (!access.is_store && !cell.is_stored()) {
      report(kind::uninitialised, access, [] { return std::string(); });
      cell.assume_stored(moment);
    }
    conflict.keep_first(access.is_store ? cell.store(moment) : cell.load(moment));
  }
  report_race(conflict, access, [&] { return "byte " + std::to_string(first); });
}

void AccessMonitor::check_buffer(const Access& access, int index) {
  const Buffer& buffer = launch_->buffers[index];
  const ptrdiff_t first = access.address - buffer.begin;
  const ptrdiff_t end = first + static_cast<ptrdiff_t>(access.size);
  auto place = [&] {
    return "byte " + std::to_string(first) + " of buffer " + std::to_string(index);
  };
  if (first < 0 || end > static_cast<ptrdiff_t>(buffer.size)) {
    reported_ = access;
    report(kind::out_of_bounds, access,
           [&] { return place() + ", which has " + std::to_string(buffer.size) + " bytes; "; });
    return;
  }
  const Moment moment = now(/*is_device_memory=*/true);
  BufferShadow& shadow = *buffers_[index];
  (access.is_store ? shadow.traffic.stored : shadow.traffic.loaded) += access.size;
  lines_.touch(access.site, launch_->running->position.lane, index, access.is_store, first, end);
  Conflict conflict;
  for (BufferCell& cell : shadow.cells.cells(first, access.size)) {
    if (!access.is_store) {
      cell.readers.count(shadow.cells.cell_bytes(), moment.threadgroup, moment.simdgroup,
                         shadow.traffic);
    }
    if (access.is_atomic) continue;
    conflict.keep_first(access.is_store ? cell.race.store(moment) : cell.race.load(moment));
  }
  report_race(conflict, access, place);
}

void AccessMonitor::check_elsewhere(const Access& access) {
  const char* address = access.address;
  if (launch_->stacks->contains(address) || launch_->threadgroup->owns(address) ||
      launch_->image.contains(address) || launch_->buffers.is_unbound(address)) {
    return;  // private memory, the emulator's own, or about to fault with its own report
  }
  reported_ = access;
  report(kind::wild, access, [] { return std::string(); });
}

template <class Place>
void AccessMonitor::report_race(const Conflict& conflict, const Access& access, Place place) {
  if (conflict.scope == Conflict::none) return;
  report(kind_of(conflict), access, [&] {
    return place() + ", not ordered with the " + (conflict.with_load ? "load" : "store") +
           " by thread index " + std::to_string(conflict.other.thread) + " of threadgroup index " +
           std::to_string(conflict.other.threadgroup) + "; ";
  });
}

template <class Detail>
void AccessMonitor::report(const char* kind, const Access& access, Detail detail) {
  launch_->findings.report(kind, access.site, [&] {
    return detail() + (access.is_store ? "store by " : "load by ") + launch_->running->name();
  });
}

Moment AccessMonitor::now(bool is_device_memory) const {
  const Thread& thread = *launch_->running;
  const BarrierCounts& barriers = launch_->threadgroup->barriers;
  const BarrierCounts& simd_barriers = thread.simdgroup->barriers;
  return {launch_->threadgroup->index,
          is_device_memory ? barriers.device_memory : barriers.threadgroup_memory,
          is_device_memory ? simd_barriers.device_memory : simd_barriers.threadgroup_memory,
          static_cast<uint16_t>(thread.position.index_in_threadgroup),
          static_cast<uint16_t>(thread.position.simdgroup)};
}

}  // namespace emulator

#include "threadgroup.h"

#include <algorithm>
#include <cstdlib>

#include "launch.h"

namespace emulator {
namespace {

void run_kernel() {
  current_launch->kernel->run(current_launch->kernel->parameters);
  Thread* thread = current_launch->running;
  thread->state = ThreadState::returned;
  thread->fiber.suspend();
  abort();
}

template <class T>
bool holds(const std::vector<T>& items, const char* address) {
  const char* first = reinterpret_cast<const char*>(items.data());
  return address >= first && address < first + items.size() * sizeof(T);
}

}  // namespace

std::string Thread::name() const {
  auto triple = [](const unsigned* v) {
    return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) +
           ")";
  };
  return "thread " + triple(position.thread_in_threadgroup) + " of threadgroup " +
         triple(position.threadgroup_in_grid);
}

Threadgroup::Threadgroup(Launch* launch)
    : launch_(launch),
      threads_(launch->shape.threads_per_threadgroup()),
      simdgroups_((threads_.size() + kSimdWidth - 1) / kSimdWidth) {
  for (size_t i = 0; i < threads_.size(); i++) {
    threads_[i].fiber.place(launch->stacks->top(i));
    threads_[i].simdgroup = &simdgroups_[i / kSimdWidth];
  }
}

bool Threadgroup::owns(const char* address) const {
  return holds(threads_, address) || holds(simdgroups_, address);
}

void Threadgroup::run(unsigned threadgroup) {
  index = threadgroup;
  start();
  do {
    launch_->order.shuffle(turns_);
    for (Simdgroup* simdgroup : turns_) simdgroup->run();
  } while (complete_barrier());
}

void Threadgroup::start() {
  barriers = {};
  launch_->arena.reset();
  const ThreadPosition first = launch_->shape.first_thread(index);
  const unsigned* extent = first.threads_per_threadgroup;
  size_ = size_t{extent[0]} * extent[1] * extent[2];
  for (unsigned i = 0; i < size_; i++) {
    Thread& thread = threads_[i];
    thread.position = first;
    thread.position.thread_in_threadgroup[0] = i % extent[0];
    thread.position.thread_in_threadgroup[1] = i / extent[0] % extent[1];
    thread.position.thread_in_threadgroup[2] = i / extent[0] / extent[1];
    thread.position.index_in_threadgroup = i;
    thread.position.lane = i % kSimdWidth;
    thread.position.simdgroup = i / kSimdWidth;
    thread.position.simdgroups_per_threadgroup = (size_ + kSimdWidth - 1) / kSimdWidth;
    thread.state = ThreadState::ready;
    thread.fiber.start(run_kernel);
  }
  turns_.clear();
  for (size_t i = 0; i < size_; i += kSimdWidth) {
    Simdgroup& simdgroup = simdgroups_[i / kSimdWidth];
    simdgroup.start(launch_, &threads_[i], std::min<size_t>(kSimdWidth, size_ - i));
    turns_.push_back(&simdgroup);
  }
  launch_->counts.threadgroups++;
  launch_->counts.threads += size_;
}

bool Threadgroup::complete_barrier() {
  const auto end = threads_.begin() + size_;
  auto waits = [](const Thread& thread) {
    return thread.state == ThreadState::at_threadgroup_barrier;
  };
  const auto first = std::find_if(threads_.begin(), end, waits);
  if (first == end) return false;
  auto is_here = [&](const Thread& thread) { return waits(thread) && thread.site == first->site; };
  const size_t here = std::count_if(threads_.begin(), end, is_here);
  if (here != size_) {
    const size_t waiting = std::count_if(threads_.begin(), end, waits);
    launch_->findings.report(kind::divergent_barrier, first->site, [&] {
      return "threadgroup_barrier reached by " + std::to_string(here) + " of " +
             std::to_string(size_) + " threads, " + std::to_string(waiting - here) +
             " wait at another barrier, " + std::to_string(size_ - waiting) + " have returned; " +
             first->name();
    });
  }
  barriers.pass(first->barrier_memory);
  launch_->counts.barriers++;
  for (auto thread = threads_.begin(); thread != end; ++thread) {
    if (waits(*thread)) thread->state = ThreadState::ready;
  }
  return true;
}

}  // namespace emulator

// Who last touched some bytes, and whether a barrier lies between that and the present access.
#pragma once

#include <cstdint>

namespace emulator {

// When an access happened: by whom, and after how many barriers. Threadgroups are never ordered;
// within one, two accesses are ordered if a threadgroup_barrier lies between them, if they are of
// the same thread, or if they are of the same simdgroup with a simdgroup_barrier between them.
struct Moment {
  uint32_t threadgroup;
  uint32_t barriers;       // of the threadgroup, for this kind of memory
  uint32_t simd_barriers;  // of the simdgroup, for this kind of memory
  uint16_t thread;         // in the threadgroup
  uint16_t simdgroup;
};

// Two accesses that nothing orders; `none` if something does.
struct Conflict {
  enum Scope { none, in_simdgroup, in_threadgroup, in_grid };

  void keep_first(const Conflict& conflict) {
    if (scope == none) *this = conflict;
  }

  Scope scope = none;
  bool with_load = false;  // else with a store
  Moment other = {};       // the earlier access
};

// The latest store to some bytes and the loads since then.
class RaceCell {
 public:
  Conflict load(const Moment& now);
  Conflict store(const Moment& now);

  bool is_stored() const { return has_store_; }
  // Says nothing about these bytes before the next store: after an atomic access, and after the
  // report of an uninitialised load.
  void assume_stored(const Moment& now) {
    store_ = now;
    has_store_ = was_assumed_ = true;
  }
  // Threadgroup memory is reused by threadgroup after threadgroup.
  void forget_other_threadgroups(uint32_t threadgroup) {
    if ((has_store_ && store_.threadgroup != threadgroup) ||
        (has_load_ && load_.threadgroup != threadgroup)) {
      *this = RaceCell();
    }
  }

 private:
  Conflict::Scope conflict_with_loads(const Moment& now) const;
  void remember_load(const Moment& now);

  Moment store_;
  Moment load_;  // the latest; the flags tell of others that no barrier separates from it
  bool has_store_ = false;
  bool was_assumed_ = false;
  bool has_load_ = false;
  bool by_several_lanes_ = false;
  bool by_several_simdgroups_ = false;
  bool by_several_threadgroups_ = false;
};

}  // namespace emulator

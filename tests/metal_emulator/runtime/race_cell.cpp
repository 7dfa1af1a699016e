#include "race_cell.h"

namespace emulator {
namespace {

Conflict::Scope conflict(const Moment& earlier, const Moment& now) {
  if (earlier.threadgroup != now.threadgroup) return Conflict::in_grid;
  if (earlier.barriers != now.barriers || earlier.thread == now.thread) return Conflict::none;
  if (earlier.simdgroup != now.simdgroup) return Conflict::in_threadgroup;
  return earlier.simd_barriers != now.simd_barriers ? Conflict::none : Conflict::in_simdgroup;
}

}  // namespace

Conflict RaceCell::load(const Moment& now) {
  remember_load(now);
  if (!has_store_ || was_assumed_) return {};
  const Conflict::Scope scope = conflict(store_, now);
  return scope == Conflict::none ? Conflict() : Conflict{scope, /*with_load=*/false, store_};
}

Conflict RaceCell::store(const Moment& now) {
  Conflict found;
  if (has_load_) found = {conflict_with_loads(now), /*with_load=*/true, load_};
  if (found.scope == Conflict::none && has_store_ && !was_assumed_) {
    found = {conflict(store_, now), /*with_load=*/false, store_};
  }
  store_ = now;
  has_store_ = true;
  was_assumed_ = has_load_ = by_several_threadgroups_ = false;
  return found;
}

void RaceCell::remember_load(const Moment& now) {
  const bool is_first = !has_load_;
  has_load_ = true;
  if (!is_first && load_.threadgroup != now.threadgroup) by_several_threadgroups_ = true;
  if (is_first || load_.threadgroup != now.threadgroup || load_.barriers != now.barriers) {
    by_several_simdgroups_ = by_several_lanes_ = false;
  } else if (load_.simdgroup != now.simdgroup) {
    by_several_simdgroups_ = true;
  } else if (load_.simd_barriers != now.simd_barriers) {
    by_several_lanes_ = false;
  } else if (load_.thread != now.thread) {
    by_several_lanes_ = true;
  }
  load_ = now;
}

Conflict::Scope RaceCell::conflict_with_loads(const Moment& now) const {
  if (by_several_threadgroups_ || load_.threadgroup != now.threadgroup) return Conflict::in_grid;
  if (load_.barriers != now.barriers) return Conflict::none;
  if (by_several_simdgroups_ || load_.simdgroup != now.simdgroup) return Conflict::in_threadgroup;
  if (load_.simd_barriers != now.simd_barriers) return Conflict::none;
  return by_several_lanes_ || load_.thread != now.thread ? Conflict::in_simdgroup : Conflict::none;
}

}  // namespace emulator

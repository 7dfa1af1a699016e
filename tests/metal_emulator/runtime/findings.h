// What went wrong in a launch, one entry per kind and place in the kernel.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace emulator {

// The kinds; findings.py lists the same strings.
namespace kind {
inline constexpr const char* out_of_bounds = "device buffer out of bounds";
inline constexpr const char* read_only = "store to read-only buffer";
inline constexpr const char* unbound = "unbound buffer";
inline constexpr const char* wild = "access outside every buffer";
inline constexpr const char* threadgroup_bounds = "threadgroup memory out of bounds";
inline constexpr const char* threadgroup_limit = "too much threadgroup memory";
inline constexpr const char* uninitialised = "uninitialised threadgroup memory";
inline constexpr const char* race_in_simdgroup = "race in simdgroup";
inline constexpr const char* race_in_threadgroup = "race in threadgroup";
inline constexpr const char* race_in_grid = "race between threadgroups";
inline constexpr const char* divergent_operation = "divergent simdgroup operation";
inline constexpr const char* divergent_barrier = "divergent barrier";
inline constexpr const char* inactive_lane = "read from inactive lane";
inline constexpr const char* undefined = "undefined behaviour";
inline constexpr const char* assertion = "assertion failed";
inline constexpr const char* stack_overflow = "thread stack overflow";
inline constexpr const char* endless = "kernel does not end";
}  // namespace kind

struct Finding {
  const char* kind;
  const void* site;  // an address in the kernel's code
  std::string detail;
  uint64_t count;
};

class Findings {
 public:
  // `detail` is a callable that makes the text, called for the first of its kind and site only.
  template <class Detail>
  void report(const char* kind, const void* site, Detail detail) {
    Finding& finding = entries_[{kind, site}];
    if (finding.count == 0) finding = {kind, site, detail(), 0};
    finding.count++;
  }
  void clear() { entries_.clear(); }
  const std::map<std::pair<const char*, const void*>, Finding>& entries() const { return entries_; }

 private:
  std::map<std::pair<const char*, const void*>, Finding> entries_;
};

}  // namespace emulator

// Sees every load and store of a kernel that was compiled for Mode.RACE.
#pragma once

#include <optional>
#include <vector>

#include "line_counter.h"
#include "operations.h"
#include "race_cell.h"
#include "shadow.h"
#include "traffic.h"

namespace emulator {

struct Launch;

struct Access {
  const char* address;
  size_t size;
  bool is_store;
  bool is_atomic;
  const void* site;  // in the kernel's code
};

class AccessMonitor {
 public:
  explicit AccessMonitor(Launch* launch);
  void check(const Access& access);
  // Whether a fault at this address would be news.
  bool has_reported(const char* address) const;
  // The lanes of a simdgroup have met, or ended.
  void meet() {
    lines_.meet();
    operations.meet();
  }
  TrafficCounts traffic(int buffer) const;
  LineCounts lines(int buffer) const;

  OperationCounter operations;

 private:
  struct BufferCell {
    RaceCell race;
    Readers readers;
  };
  struct BufferShadow {
    explicit BufferShadow(size_t size) : cells(size) {}
    Shadow<BufferCell> cells;
    TrafficCounts traffic;
  };

  void check_threadgroup_memory(const Access& access);
  void check_buffer(const Access& access, int index);
  void check_elsewhere(const Access& access);
  // Both report with a callable that makes the beginning of the text.
  template <class Place>
  void report_race(const Conflict& conflict, const Access& access, Place place);
  template <class Detail>
  void report(const char* kind, const Access& access, Detail detail);
  Moment now(bool is_device_memory) const;
  // The index of the buffer that has the memory of this one.
  int owner(int buffer) const;

  Launch* launch_;
  Shadow<RaceCell> threadgroup_memory_;
  std::vector<std::optional<BufferShadow>> buffers_;
  LineCounter lines_;
  Access reported_{};  // the latest that was out of bounds
};

}  // namespace emulator

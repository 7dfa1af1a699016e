#include "image.h"

#include <link.h>

#include <algorithm>

namespace emulator {
namespace {

struct Search {
  const char* address;
  const char* begin;
  const char* end;
};

int visit(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<Search*>(data);
  const char* base = reinterpret_cast<const char*>(info->dlpi_addr);
  const char* end = base;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type == PT_LOAD) end = std::max(end, base + segment.p_vaddr + segment.p_memsz);
  }
  if (search->address < base || search->address >= end) return 0;
  search->begin = base;
  search->end = end;
  return 1;
}

}  // namespace

Image::Image(const void* address) {
  Search search{static_cast<const char*>(address), nullptr, nullptr};
  dl_iterate_phdr(visit, &search);
  begin_ = search.begin;
  end_ = search.end;
}

}  // namespace emulator

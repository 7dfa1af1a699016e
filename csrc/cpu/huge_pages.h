// Memory whose addresses the processor translates two megabytes at a time.
#pragma once

#include <cstddef>

namespace mlx_paged::cpu {

// Asks the kernel to back the huge pages that lie wholly within [data, data + size), so that none
// holds memory of others. Does nothing for a range without one, where the kernel refuses, and on
// systems other than Linux. Memory that was touched before stays as it is.
void use_huge_pages(void* data, size_t size);

}  // namespace mlx_paged::cpu

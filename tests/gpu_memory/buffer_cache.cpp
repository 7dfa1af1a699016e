// MLX's own class of cached buffers, driven from stdin.
#include "mlx/backend/common/buffer_cache.h"

#include <cstddef>
#include <iostream>
#include <string>

int main() {
  size_t page;
  std::cin >> page;
  mlx::core::BufferCache<size_t> cache(
      page, [](size_t* buffer) { return *buffer; }, [](size_t* buffer) { delete buffer; });
  std::string verb;
  for (size_t size; std::cin >> verb >> size;) {
    long long answer = 0;
    if (verb == "recycle") {
      cache.recycle_to_cache(new size_t(size));
    } else if (verb == "release") {
      cache.release_cached_buffers(size);
    } else if (size_t* found = cache.reuse_from_cache(size)) {
      answer = *found;
      delete found;
    }
    std::cout << answer << " " << cache.cache_size() << "\n";
  }
}

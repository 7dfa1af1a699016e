// Threads shared by all CPU kernels of this module.
#pragma once

#include <cstdint>
#include <functional>

namespace mlx_paged::cpu {

// Number of threads that parallel_for uses, including the caller: MLX_PAGED_NUM_THREADS if set,
// else the number of hardware threads. Throws std::invalid_argument if the variable is not an
// integer from 1 to 1024.
int num_threads();

// Calls body(i) once for each i in [0, count), in any order, and returns when all are done. A
// thread that finishes an index takes the next one: uneven items balance, and a thread without a
// CPU delays only its own item. Idle threads soon sleep. `body` must not throw. If the work is less
// than what waking a thread costs, `pays` is false and the caller does it alone.
void parallel_for(int64_t count, const std::function<void(int64_t)>& body, bool pays = true);

}  // namespace mlx_paged::cpu

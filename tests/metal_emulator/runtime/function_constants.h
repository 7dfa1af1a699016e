// The values that [[function_constant(id)]] variables take when a library is loaded.
#pragma once

#include <cstdint>

namespace emulator::function_constants {

void clear();
void set(int id, int64_t integer, double real);
// `type` is 'f' for floating point; anything else is an integer. Unset constants read as zero.
void read(int id, char type, unsigned size, void* value);

}  // namespace emulator::function_constants

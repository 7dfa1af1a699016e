#include "function_constants.h"

#include <cstring>
#include <map>

namespace emulator::function_constants {
namespace {

struct Value {
  int64_t integer = 0;
  double real = 0;
};

std::map<int, Value> values;

}  // namespace

void clear() { values.clear(); }

void set(int id, int64_t integer, double real) { values[id] = {integer, real}; }

void read(int id, char type, unsigned size, void* value) {
  const Value& constant = values[id];
  if (type != 'f') {
    memcpy(value, &constant.integer, size);
  } else if (size == sizeof(float)) {
    const float real = static_cast<float>(constant.real);
    memcpy(value, &real, size);
  } else {
    const _Float16 real = static_cast<_Float16>(constant.real);
    memcpy(value, &real, size);
  }
}

}  // namespace emulator::function_constants

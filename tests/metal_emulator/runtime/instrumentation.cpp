// The hooks that clang's sanitizer passes call in kernels. No sanitizer runtime is linked: this is
// the runtime.
#include <cstring>

#include "export.h"
#include "launch.h"

namespace emulator {
namespace {

void check(const void* address, size_t size, bool is_store, const void* site) {
  if (size == 0 || !current_launch || !current_launch->monitor || !current_launch->running) return;
  current_launch->check_time(site);
  current_launch->monitor->check(
      {static_cast<const char*>(address), size, is_store, /*is_atomic=*/false, site});
}

void undefined(const char* what, const void* site) {
  current_launch->findings.report(kind::undefined, site, [&] {
    return std::string(what) + "; " + current_launch->running->name();
  });
}

}  // namespace

extern "C" {

// -fsanitize=thread (Mode.RACE)
#define SITE __builtin_return_address(0)
#define ACCESS_HOOKS(prefix, size)                                                           \
  EMULATOR_EXPORT void __tsan_##prefix##read##size(void* p) { check(p, size, false, SITE); } \
  EMULATOR_EXPORT void __tsan_##prefix##write##size(void* p) { check(p, size, true, SITE); }
#define ACCESS_HOOKS_OF_SIZE(size) \
  ACCESS_HOOKS(, size)             \
  ACCESS_HOOKS(unaligned_, size)   \
  ACCESS_HOOKS(volatile_, size)    \
  ACCESS_HOOKS(unaligned_volatile_, size)
ACCESS_HOOKS_OF_SIZE(1)
ACCESS_HOOKS_OF_SIZE(2)
ACCESS_HOOKS_OF_SIZE(4)
ACCESS_HOOKS_OF_SIZE(8)
ACCESS_HOOKS_OF_SIZE(16)

EMULATOR_EXPORT void* __tsan_memcpy(void* to, const void* from, size_t size) {
  check(from, size, false, SITE);
  check(to, size, true, SITE);
  return memcpy(to, from, size);
}
EMULATOR_EXPORT void* __tsan_memmove(void* to, const void* from, size_t size) {
  check(from, size, false, SITE);
  check(to, size, true, SITE);
  return memmove(to, from, size);
}
EMULATOR_EXPORT void* __tsan_memset(void* to, int value, size_t size) {
  check(to, size, true, SITE);
  return memset(to, value, size);
}
EMULATOR_EXPORT void __tsan_init() {}

// Inserted by instrument.py (Mode.RACE)
EMULATOR_EXPORT void emulator_read(void* p, size_t size) { check(p, size, false, SITE); }
EMULATOR_EXPORT void emulator_write(void* p, size_t size) { check(p, size, true, SITE); }
EMULATOR_EXPORT void emulator_operation(int operation) {
  if (!current_launch || !current_launch->monitor || !current_launch->running) return;
  const unsigned lane = current_launch->running->position.lane;
  current_launch->monitor->operations.execute(SITE, lane, static_cast<Operation>(operation));
}

// -fsanitize=undefined -fsanitize-minimal-runtime (Mode.UBSAN)
#define UNDEFINED_HOOK(name, what) \
  EMULATOR_EXPORT void __ubsan_handle_##name##_minimal() { undefined(what, SITE); }
UNDEFINED_HOOK(add_overflow, "signed overflow in an addition")
UNDEFINED_HOOK(sub_overflow, "signed overflow in a subtraction")
UNDEFINED_HOOK(mul_overflow, "signed overflow in a multiplication")
UNDEFINED_HOOK(negate_overflow, "signed overflow in a negation")
UNDEFINED_HOOK(divrem_overflow, "integer division by zero or overflow")
UNDEFINED_HOOK(shift_out_of_bounds, "shift by a negative amount or by the width or more")
UNDEFINED_HOOK(out_of_bounds, "array index out of bounds")
UNDEFINED_HOOK(float_cast_overflow, "float does not fit the integer type")
UNDEFINED_HOOK(type_mismatch, "misaligned address")
UNDEFINED_HOOK(load_invalid_value, "load of a value that its type does not have")
UNDEFINED_HOOK(vla_bound_not_positive, "array size not positive")
UNDEFINED_HOOK(invalid_builtin, "clz or ctz of zero")
UNDEFINED_HOOK(alignment_assumption, "misaligned address")

}  // extern "C"
}  // namespace emulator

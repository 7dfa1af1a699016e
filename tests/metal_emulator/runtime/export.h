#pragma once

// Visible to kernels and to Python, and keeps its own return address.
#define EMULATOR_EXPORT __attribute__((visibility("default"), noinline))

// The Metal standard library for code of a GPU with simdgroups of 32 lanes (AMD's RDNA), to look
// at. What lanes tell each other and what a matrix unit does are opaque instructions with the
// registers that they take: the code does not run.
#pragma once
#pragma clang system_header

// Made of what a GPU has instructions for.
#define __builtin_powf(x, y) __builtin_exp2f((y) * __builtin_log2f(x))
#define __builtin_tanhf(x) (1.0f - 2.0f / (1.0f + __builtin_exp2f(2.88539008f * (x))))

#define EMULATOR_REPORTS_NOTHING
#include "../device/abi.h"
#include "../device/array.h"
#include "../device/bfloat.h"
#include "../device/integer.h"
#include "../device/limits.h"
#include "../device/math.h"
#include "../device/traits.h"
#include "../device/vector.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
// After the functions that they call.
#include "../device/mlx_builtins.h"
#include "kernel_entry.h"

#define device
#define thread
#define threadgroup
#define constant const

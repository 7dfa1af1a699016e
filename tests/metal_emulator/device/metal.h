// The Metal standard library on the CPU. It includes no system header, so that the global
// namespace of a kernel is as empty as Apple's compiler leaves it.
#pragma once
#pragma clang system_header

#include "abi.h"
#include "array.h"
#include "atomic.h"
#include "bfloat.h"
#include "integer.h"
#include "kernel_entry.h"
#include "limits.h"
#include "math.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
#include "traits.h"
#include "vector.h"
// After the functions that it calls.
#include "mlx_builtins.h"

// Address spaces are erased; `constant` keeps what it says about writing.
#define device
#define thread
#define threadgroup
#define constant const

// The Metal standard library as declarations in C++ for OpenCL, whose address spaces are checked by
// the compiler. Nothing of it runs: device/ is the library that does.
#pragma once
#pragma clang system_header

#include "compute.h"
#include "math.h"
#include "mlx_builtins.h"
#include "types.h"

#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant

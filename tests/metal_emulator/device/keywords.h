// Macros that hold before a kernel is translated. The preprocessor sees this file first; the
// keywords of Metal itself stay in the text.
#pragma once

#define __METAL__ 1
#define __METAL_MACOS__ 1
#define __METAL_VERSION__ 310
#define __HAVE_BFLOAT__ 1
#define __HAVE_SIMDGROUP_MATRIX__ 1
#define METAL_FUNC inline __attribute__((always_inline))

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-5f)
#define HALF_EPSILON ((half)0.0009765625f)
#define CHAR_BIT 8
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

// Arguments of the private builtins that MLX's bf16_math.h calls.
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

#define assert(...) ((__VA_ARGS__) ? (void)0 : emulator::emulator_report_assertion(#__VA_ARGS__))
// Metal has no double: the name of the type becomes an error that says so.
#define double metal_has_no_double

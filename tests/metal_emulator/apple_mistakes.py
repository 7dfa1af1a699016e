"""Small kernels that Apple's compiler or MLX's encoder refuses, by the rule that finds them."""

PROLOGUE = "#include <metal_stdlib>\nusing namespace metal;\n"
"""Two lines that begin each source."""

OUT = "device float* out [[buffer(0)]]"
LANES = "#include <metal_simdgroup>\n"

SOURCES: dict[str, list[tuple[str, str]]] = {
    "ascii": [("kernel void f() {}  // caf\u00e9\n", "holds '\\xe9'")],
    "includes": [
        ('#include "ours.h"\nkernel void f() {}\n', "'ours.h' file not found"),
        ("#include <metal_tensor>\nkernel void f() {}\n", "'metal_tensor' file not found"),
        (f"kernel void f({OUT}) {{\n  out[0] = simd_sum(1.0f);\n}}\n", "<metal_simdgroup> is not"),
        (
            f"kernel void f({OUT}) {{\n  simdgroup_matrix<float, 8, 8> m;\n}}\n",
            "<metal_simdgroup_matrix> is not",
        ),
        (
            "kernel void f(device atomic_uint* n [[buffer(0)]]) {}\n",
            "<metal_atomic> is not",
        ),
    ],
    "bare-pointer": [
        ("inline float first(float* p) {\n  return p[0];\n}\n", "without an address space"),
        (f"kernel void f({OUT}) {{\n  float& x = out[0];\n}}\n", "without an address space"),
    ],
    "generic-this": [
        (
            "struct Row {\n  float v[4];\n  thread float& at(short i) {\n"
            "    return v[i];\n  }\n};\n",
            "`this` of at is generic",
        ),
        (
            "struct Row {\n  float v[4];\n  float sum() const {\n    const thread float* p = v;\n"
            "    return p[0] + p[1];\n  }\n};\n",
            "`this` of sum is generic",
        ),
    ],
    "bfloat-name": [
        ("typedef bfloat bfloat16;\nkernel void f() {}\n", "bfloat16 is a reserved name"),
        ("struct bfloat16 {\n  ushort bits;\n};\n", "bfloat16 is a reserved name"),
    ],
    "program-scope": [
        ("constexpr int SIZE = 3;\nkernel void f() {}\n", "address space constant"),
        ("int counter;\nkernel void f() {}\n", "address space constant"),
        ("template <typename T>\nconstexpr int SIZE = sizeof(T);\n", "address space constant"),
        ("struct S {\n  static constexpr int size = 3;\n};\n", "address space constant"),
        ("namespace a {\nconst float x = 1.0f;\n}\n", "address space constant"),
    ],
    "static-local": [
        (f"kernel void f({OUT}) {{\n  static float x;\n  out[0] = x;\n}}\n", "no static variables"),
        (
            "inline int f() {\n  static constexpr int x = 3;\n  return x;\n}\n",
            "no static variables",
        ),
    ],
    "goto": [(f"kernel void f({OUT}) {{\n  goto end;\nend:\n  out[0] = 1.0f;\n}}\n", "no goto")],
    "long-double": [("inline float f(float x) {\n  return (long double)x;\n}\n", "no long double")],
    "cxx17": [
        (
            "template <int N>\ninline int f() {\n  if constexpr (N > 1) { return 1; }\n"
            "  return 2;\n}\nkernel void k(device int* out [[buffer(0)]]) { out[0] = f<2>(); }\n",
            "constexpr if",
        ),
        ("static_assert(sizeof(int) == 4);\n", "no message"),
        (
            "struct P { int a, b; };\n"
            "inline int f(P p) {\n  auto [a, b] = p;\n  return a + b;\n}\n",
            "decomposition",
        ),
        (
            "inline int f(int a) {\n  if (int b = a; b > 1) { return b; }\n  return a;\n}\n",
            "if init",
        ),
        ("template <class... T>\ninline int f(T... t) {\n  return (t + ...);\n}\n", "fold"),
        ("inline constant constexpr int SIZE = 3;\n", "inline variables"),
        ("namespace a::b {\n}\n", "nested namespace"),
        ("template <auto N>\ninline int f() {\n  return N;\n}\n", "with 'auto'"),
        ("inline int f([[maybe_unused]] int a) { return 1; }\n", "maybe_unused"),
    ],
    "kernel-before-template": [
        (
            f"[[kernel]] template <typename T>\nvoid f({OUT}) {{}}\n"
            'template [[host_name("g")]] [[kernel]] decltype(f<int>) f<int>;\n',
            "stands before",
        ),
    ],
    "inner-threadgroup": [
        (
            f"kernel void f({OUT}) {{\n  if (out[0] > 0.0f) {{\n    threadgroup float s[4];\n"
            "    s[0] = 1.0f;\n  }\n}\n",
            "s is in an inner block",
        ),
    ],
    "constant-index": [
        (
            "constant int SIZE [[function_constant(0)]];\n"
            "constant bool WHOLE [[function_constant(0)]];\n",
            "WHOLE has index 0 of SIZE",
        ),
    ],
    "constant-condition": [
        (
            "constant int MODE [[function_constant(0)]];\n"
            "kernel void f(device float* out [[buffer(0), function_constant(MODE)]]) {}\n",
            "MODE is int",
        ),
        (
            "kernel void f(device float* out [[buffer(0), function_constant(NOTHING)]]) {}\n",
            "NOTHING is no function constant",
        ),
        (
            "constant int MODE [[function_constant(0)]];\nconstant int LESS = MODE - 1;\n"
            "kernel void f(device float* out [[buffer(0), function_constant(LESS)]]) {}\n",
            "LESS is int",
        ),
    ],
    "buffer-index": [
        (f"kernel void f({OUT},\n  device float* more [[buffer(0)]]) {{}}\n", "both buffer 0"),
        ("kernel void f(device float* out [[buffer(31)]]) {}\n", "is buffer 31"),
    ],
    "thread-position": [
        ("kernel void f(int i [[thread_position_in_grid]]) {}\n", "i is int"),
        ("kernel void f(int3 i [[threadgroup_position_in_grid]]) {}\n", "i is int3"),
        ("kernel void f(ulong i [[thread_position_in_grid]]) {}\n", "i is ulong"),
        ("kernel void f(int lane [[thread_index_in_simdgroup]]) {}\n", "lane is int"),
        ("kernel void f(uint2 lane [[thread_index_in_simdgroup]]) {}\n", "lane is uint2"),
        (
            "kernel void f(uint3 group [[threadgroup_position_in_grid]],\n"
            "  uint thread_id [[thread_position_in_threadgroup]]) {}\n",
            "thread_id and group have different",
        ),
    ],
    "max-threads": [
        (
            "constant int SIZE [[function_constant(0)]];\n"
            "[[kernel, max_total_threads_per_threadgroup(SIZE)]] void f() {}\n",
            "SIZE is not constant",
        ),
        (
            "constant int SIZE [[function_constant(0)]];\nconstant int MORE = 2 * SIZE;\n"
            "[[kernel, max_total_threads_per_threadgroup(MORE)]] void f() {}\n",
            "MORE is not constant",
        ),
    ],
    "pointer-to-pointer": [
        ("kernel void f(device float* device* out [[buffer(0)]]) {}\n", "out is a pointer to"),
        ("kernel void f(constant float*& out [[buffer(0)]]) {}\n", "out is a pointer to"),
    ],
    "pointer-member": [
        (
            "struct Params {\n  int size;\n  device float* out;\n};\n"
            "kernel void f(constant Params& p [[buffer(0)]]) {}\n",
            "p holds a pointer",
        ),
        (
            "struct Inner {\n  constant int* sizes;\n};\nstruct Params {\n  Inner inner;\n};\n"
            "kernel void f(constant Params* p [[buffer(0)]]) {}\n",
            "p holds a pointer",
        ),
    ],
    "host-name": [
        (
            f"template <typename T>\nkernel void f({OUT}) {{}}\n"
            'template [[host_name("f:int")]] [[kernel]] decltype(f<int>) f<int>;\n',
            "f:int is not of letters",
        ),
    ],
    "recursion": [
        ("inline int f(int n) {\n  return n < 2 ? n : f(n - 1);\n}\n", "f calls itself"),
        (
            "inline int odd(int n);\ninline int even(int n) { return n == 0 || odd(n - 1); }\n"
            "inline int odd(int n) { return n != 0 && even(n - 1); }\n",
            "even calls itself",
        ),
        (
            "template <typename T>\ninline T f(T n) {\n  return n < 2 ? n : f(n - 1);\n}\n"
            "inline int g() { return f(3); }\n",
            "f calls itself",
        ),
    ],
    "fast-precise": [
        ("inline half f(half x) {\n  return fast::exp2(x);\n}\n", "fast::exp2 of half"),
        ("inline half4 f(half4 x) {\n  return precise::cos(x);\n}\n", "precise::cos of half4"),
        ("inline int f(int x) {\n  return fast::max(x, 3);\n}\n", "fast::max of int"),
        (
            "template <typename T>\ninline T f(T x) { return precise::tanh(x); }\n"
            "inline half g(half x) { return f(x); }\n",
            "precise::tanh of half",
        ),
    ],
    "shuffle-delta": [
        (LANES + "inline float f(float x) {\n  return simd_shuffle_up(x, -1);\n}\n", "negative"),
        (
            LANES + "inline float f(float x, short d) { return simd_shuffle_down(x, d); }\n",
            "negative",
        ),
        (
            LANES + "inline float f(float x) { return simd_shuffle_xor(x, ushort(-2)); }\n",
            "negative",
        ),
    ],
    "address-spaces": [
        (
            "constant constexpr float LEAST = 1.0f;\n"
            "inline float f(float x) {\n  return x < LEAST ? LEAST : x;\n}\n",
            "two address spaces",
        ),
        (
            "kernel void f(device float* out [[buffer(0)]], constant float& c [[buffer(1)]]) {\n"
            "  out[0] = c > 1.0f ? (c) : out[1];\n}\n",
            "two address spaces",
        ),
    ],
}
"""What follows PROLOGUE, and what the finding says."""

OPTIONAL = (
    "constant bool HAS [[function_constant(0)]];\nconstant bool SPLIT [[function_constant(1)]];\n"
    "constant bool WHOLE = !SPLIT;\n"
    "inline float first(device float* p, bool b) { return HAS && b ? p[0] : 0.0f; }\n"
    "inline float any(device float* p) { return p[0]; }\n"
    "kernel void f(device float* x [[buffer(0), function_constant(HAS)]],\n"
    "  device float* out [[buffer(1), function_constant(WHOLE)]]) {\n"
)
"""A kernel with optional arguments, up to its body."""

ABSENT = [
    "x[0] = 1.0f;",
    "if (SPLIT) { out[0] = 1.0f; }",
    "if (!HAS) { x[0] = 1.0f; }",
    "if (HAS || WHOLE) { x[0] = 1.0f; }",
    "if (HAS) { x[0] = 1.0f; } else { x[1] = 1.0f; }",
    "if (HAS) { return; }\n  x[0] = 1.0f;",
    "if (WHOLE) { out[0] = HAS ? 1.0f : x[0]; }",
    "if (WHOLE) { out[0] = any(x + 1); }",
    "for (int i = 0; i < int(x[0]); i++) {}",
]
"""Bodies that read an argument which is not there."""

PRESENT = [
    "if (HAS) { x[0] = 1.0f; }",
    "if (!HAS) { return; }\n  x[0] = 1.0f;",
    "if (HAS && WHOLE) { out[0] = x[0]; }",
    "if (SPLIT) { return; } else { out[0] = 1.0f; }",
    "if (!SPLIT) { out[0] = HAS ? x[0] : 0.0f; }",
    "if (WHOLE) { out[0] = first(x + 1, true); }",
    "if (HAS) { if (WHOLE) { out[0] = any(x); } }",
    "if (!HAS || SPLIT) { return; }\n  out[0] = x[0];",
]
"""Bodies that do not."""

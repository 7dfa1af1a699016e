// What Metal's language and library mean, one subject per kernel.
#include <metal_stdlib>
using namespace metal;

constant bool flag [[function_constant(0)]];
constant int count [[function_constant(1)]];
constant uint big_count [[function_constant(2)]];
constant float real [[function_constant(3)]];
constant half small_real [[function_constant(4)]];
constant bool derived = flag && count > 1;

kernel void constants(device float *out [[buffer(0)]],
                      device const float *optional [[buffer(1), function_constant(derived)]]) {
  out[0] = flag;
  out[1] = count;
  out[2] = big_count;
  out[3] = real;
  out[4] = small_real;
  out[5] = derived ? optional[0] : -1.0f;
}

template <typename T>
kernel void copy(device const T *in [[buffer(0)]], device T *out [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  out[i] = in[i];
}
#define instantiate_copy(name, type) \
  template [[host_name("copy_" name)]] kernel void copy<type>(device const type *, device type *, uint);
instantiate_copy("float32", float)
instantiate_copy("float16", half)
instantiate_copy("uint16", bfloat)
instantiate_copy("int32", int)
instantiate_copy("uint32", uint)
instantiate_copy("int64", long)
instantiate_copy("bool", bool)
instantiate_copy("uint8", uchar)

kernel void add(device int *values [[buffer(0)]], device const int *more [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  values[i] += more[i];
}

// a * b + a / b, every operation rounded to T
template <typename T>
[[kernel]] void arithmetic(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]],
                           device T *out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = a[i] * b[i] + a[i] / b[i];
}
template [[host_name("arithmetic_float32")]] [[kernel]] decltype(arithmetic<float>) arithmetic<float>;
template [[host_name("arithmetic_float16")]] [[kernel]] decltype(arithmetic<half>) arithmetic<half>;
template [[host_name("arithmetic_bfloat16")]] [[kernel]] decltype(arithmetic<bfloat>) arithmetic<bfloat>;

kernel void literals(device float *out [[buffer(0)]]) {
  out[0] = 0.1 + 0.2 == 0.1f + 0.2f;  // no double anywhere
  out[1] = sizeof(0.5);
  out[2] = sizeof(0.5h);
  out[3] = 0x1.8p1;
  out[4] = 1e-3 * 1000;
}

kernel void sizes(device int *out [[buffer(0)]]) {
  out[0] = sizeof(float2) * 1000 + alignof(float2);
  out[1] = sizeof(float3) * 1000 + alignof(float3);
  out[2] = sizeof(float4) * 1000 + alignof(float4);
  out[3] = sizeof(half4) * 1000 + alignof(half4);
  out[4] = sizeof(packed_float3) * 1000 + alignof(packed_float3);
  out[5] = sizeof(bool4) * 1000 + alignof(bool4);
  out[6] = sizeof(long) * 1000 + alignof(long);
  out[7] = sizeof(bfloat4) * 1000 + alignof(bfloat4);
}

kernel void vectors(device float4 *out [[buffer(0)]]) {
  float4 v(1, 2, 3, 4);
  out[0] = v.wzyx;
  out[1] = float4(v.xy, v.zz);
  v.yx = float2(8, 9);
  out[2] = v;
  out[3] = float4(v.rgb, 0) * 2 - 1;
  out[4] = float4(half4(v) + half4(0.5h));
  out[5] = select(v, float4(0), v > 3.0f);
  out[6] = float4(dot(v, v), length(float2(3, 4)), all(v > 0), any(v > 8));
  v.hi += v.lo;
  out[7] = clamp(v, 2.0f, 9.0f);
  packed_float3 packed = v.xyz;
  out[8] = float4(packed[0], float3(packed).yz, float(int4(v * 1.5f).w));
}

kernel void numbers(device float *out [[buffer(0)]], device const float *in [[buffer(1)]]) {
  const float x = in[0], nan = in[1];
  out[0] = exp(x);
  out[1] = fast::exp2(x);
  out[2] = precise::log(x);
  out[3] = rsqrt(x);
  out[4] = tanh(x);
  out[5] = precise::max(nan, 1.0f);
  out[6] = pow(x, 2.5f);
  out[7] = fma(x, x, 1.0f);
  out[8] = round(2.5f) + rint(2.5f);
  out[9] = isnan(nan) + 2 * isinf(x / 0.0f) + 4 * isfinite(x);
  out[10] = clz(1u) + popcount(255) + ctz(8);
  out[11] = mulhi(0x80000000u, 6u) + extract_bits(0xabcdu, 4u, 8u);
  out[12] = as_type<float>(as_type<uint>(x) ^ 0x80000000u);
  out[13] = abs(-7) + absdiff(3u, 5u) + clamp(12, 0, 10);
  out[14] = sign(-x) + fract(1.25f) + mix(1.0f, 3.0f, 0.5f);
  out[15] = numeric_limits<half>::max() + float(numeric_limits<bfloat>::epsilon());
  out[16] = ldexp(x, 3) + copysign(2.0f, -x);
  out[17] = fast::exp2(nan);
  out[18] = fast::exp(-INFINITY);
}

kernel void lanes(device const int *in [[buffer(0)]], device int *out [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]], uint i [[thread_position_in_grid]]) {
  const int x = in[i];
  device int *row = out + i * 18;
  row[0] = simd_sum(x);
  row[1] = simd_max(x);
  row[2] = simd_min(x);
  row[3] = simd_prefix_inclusive_sum(x);
  row[4] = simd_prefix_exclusive_sum(x);
  row[5] = simd_shuffle(x, ushort(31 - lane));
  row[6] = simd_shuffle_xor(x, 5);
  row[7] = simd_shuffle_down(x, 3);
  row[8] = simd_shuffle_up(x, 3);
  row[9] = simd_shuffle_rotate_down(x, 3);
  row[10] = simd_broadcast(x, 7);
  row[11] = simd_broadcast_first(x);
  row[12] = int(ulong(simd_ballot(x > 0)));
  row[13] = simd_all(x > -1000) + 2 * simd_any(x > 1000) + 4 * simd_is_first();
  row[14] = simd_xor(x);
  row[15] = simd_shuffle_and_fill_down(x, -x, 2);
  row[16] = simd_shuffle_and_fill_up(x, -x, 2, 8);
  row[17] = quad_sum(x);
}

kernel void matrices(device const float *a [[buffer(0)]], device const float *b [[buffer(1)]],
                     device float *out [[buffer(2)]], threadgroup float *tile [[threadgroup(0)]],
                     uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 left, right, sum(2.0f);
  simdgroup_load(left, a, 10);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, tile);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[lane] = tile[lane];
  out[lane + 32] = tile[lane + 32];
}

kernel void atomics(device const int *in [[buffer(0)]], device atomic_int *out [[buffer(1)]],
                    device atomic_uint *bits [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&out[0], in[i], memory_order_relaxed);
  atomic_fetch_max_explicit(&out[1], in[i], memory_order_relaxed);
  atomic_fetch_min_explicit(&out[2], in[i], memory_order_relaxed);
  atomic_fetch_or_explicit(&bits[0], 1u << (i % 32), memory_order_relaxed);
  int expected = 0;
  if (atomic_compare_exchange_weak_explicit(&out[3], &expected, 7, memory_order_relaxed,
                                            memory_order_relaxed))
    atomic_fetch_add_explicit(&out[4], 1, memory_order_relaxed);
}

kernel void positions(device uint *out [[buffer(0)]], uint3 thread_in_grid [[thread_position_in_grid]],
                      ushort3 thread_in_group [[thread_position_in_threadgroup]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint3 grid [[threads_per_grid]], uint3 groups [[threadgroups_per_grid]],
                      uint3 group_size [[threads_per_threadgroup]],
                      uint3 launched_size [[dispatch_threads_per_threadgroup]],
                      uint index [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint simdgroups [[simdgroups_per_threadgroup]],
                      uint width [[threads_per_simdgroup]]) {
  device uint *row = out + 16 * (thread_in_grid.x + grid.x * (thread_in_grid.y + grid.y * thread_in_grid.z));
  row[0] = thread_in_group.x + 100 * thread_in_group.y + 10000 * thread_in_group.z;
  row[1] = group.x + 100 * group.y + 10000 * group.z;
  row[2] = groups.x + 100 * groups.y + 10000 * groups.z;
  row[3] = group_size.x + 100 * group_size.y + 10000 * group_size.z;
  row[4] = launched_size.x + 100 * launched_size.y + 10000 * launched_size.z;
  row[5] = index;
  row[6] = lane;
  row[7] = simdgroup;
  row[8] = simdgroups;
  row[9] = width;
}

// Overloads that differ only in address spaces and do the same.
struct Pair {
  int first, second;
  int sum() const thread { return first + second; }
  int sum() const device { return first + second; }
  int sum() const threadgroup { return first + second; }
};
inline int total(device const int *values) { return values[0] + values[1]; }
inline int total(threadgroup const int *values) { return values[0] + values[1]; }

kernel void address_spaces(device const Pair *in [[buffer(0)]], device int *out [[buffer(1)]],
                           constant Pair &fixed [[buffer(2)]]) {
  threadgroup int shared[2], unused;
  Pair copy = fixed;
  shared[0] = in->sum();
  shared[1] = copy.sum();
  unused = total(shared);
  out[0] = unused + total((device const int *)in);
}

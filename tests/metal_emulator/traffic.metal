// Kernels that load and store a known number of bytes.
#include <metal_stdlib>
using namespace metal;

// Every thread loads its own element once and stores it once.
template <typename T>
kernel void each_once(device const T *in [[buffer(0)]], device T *out [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
  out[i] = in[i];
}
template [[host_name("each_once_float")]] kernel void each_once<float>(device const float *, device float *, uint);
template [[host_name("each_once_half")]] kernel void each_once<half>(device const half *, device half *, uint);
template [[host_name("each_once_char")]] kernel void each_once<char>(device const char *, device char *, uint);
template [[host_name("each_once_float4")]] kernel void each_once<float4>(device const float4 *, device float4 *, uint);
template [[host_name("each_once_half4")]] kernel void each_once<half4>(device const half4 *, device half4 *, uint);

// Every thread loads all of its threadgroup's 64 elements.
kernel void all_of_the_group(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                             uint i [[thread_position_in_grid]],
                             uint lanes [[threads_per_simdgroup]],
                             uint group [[threadgroup_position_in_grid]]) {
  float sum = 0;
  for (uint j = 0; j < 2 * lanes; j++) sum += in[group * 64 + j];
  out[i] = sum;
}

// Every thread loads its simdgroup's element of every threadgroup.
kernel void one_per_simdgroup(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                              uint i [[thread_position_in_grid]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  out[i] = in[simdgroup];
}

// Adds in place: one load and one store each.
kernel void in_place(device float *values [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  values[i] += 1.0f;
}

// One load and one store per addition.
kernel void atomic_sum(device atomic_uint *sum [[buffer(0)]]) {
  atomic_fetch_add_explicit(sum, 1u, memory_order_relaxed);
}

// Every lane loads an element, STRIDE after its neighbour's, and half of the lanes the one behind it.
constant int STRIDE [[function_constant(0)]];
kernel void strided(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                    uint lane [[thread_index_in_simdgroup]],
                    uint i [[thread_position_in_grid]]) {
  float sum = in[STRIDE * lane];
  if (lane < 16) sum += in[STRIDE * lane + 1];
  out[i] = sum;
}

// A loop of 3 loads with a reduction after each, and shuffles, which are none.
kernel void reduced(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  float sum = 0;
  for (int j = 0; j < 3; j++) sum += simd_sum(in[i]);
  sum += simd_shuffle_xor(sum, 1) + simd_shuffle_xor(sum, 2);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = simd_max(sum);
}

// Every lane loads four neighbours, one by one.
kernel void neighbours(device const half *in [[buffer(0)]], device float *out [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  half values[4];
  for (int j = 0; j < 4; j++) values[j] = in[4 * i + j];
  out[i] = float(values[0]) + float(values[1]) * float(values[2]) - float(values[3]);
}

// Four exponentials of every lane and one more of half of them; a 64-bit multiplication each.
kernel void operations(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                       constant long &stride [[buffer(2)]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint i [[thread_position_in_grid]]) {
  float sum = precise::exp(in[i]);
  for (int j = 0; j < 3; j++) sum += fast::exp2(in[i] + sum);
  if (lane < 16) sum += fast::exp(sum);
  out[long(i) * stride] = sum;
}

// A matrix product. Rows of 9 elements are found by a multiplication.
kernel void product(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                    uint group [[threadgroup_position_in_grid]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  simdgroup_matrix<float, 8, 8> a;
  simdgroup_load(a, in, 9);
  simdgroup_multiply_accumulate(a, a, a, a);
  simdgroup_store(a, out + (group * 2 + simdgroup) * 64, 8);
}

// Every thread moves its own three elements, which are one vector to the compiler.
kernel void each_three(device const ushort *in [[buffer(0)]], device ushort *out [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  for (int j = 0; j < 3; j++) out[3 * i + j] = in[3 * i + j];
}

// Loops over loads whose number and order are known.
#include <metal_stdlib>
using namespace metal;

// Sums up values at places that DEPTH tables tell, one after another.
template <int DEPTH>
kernel void gather(device const float *values [[buffer(0)]], device const int *table [[buffer(1)]],
                   device float *out [[buffer(2)]], constant int &size [[buffer(3)]],
                   uint i [[thread_position_in_grid]]) {
  float sum = 0;
  for (int j = int(i); j < size; j += 32) {
    int place = j;
    for (int k = 0; k < DEPTH; k++) place = simd_shuffle_xor(table[place], 1);
    sum += values[place];
  }
  out[i] = sum;
}
template [[host_name("gather_0")]] kernel void gather<0>(device const float *, device const int *, device float *, constant int &, uint);
template [[host_name("gather_1")]] kernel void gather<1>(device const float *, device const int *, device float *, constant int &, uint);
template [[host_name("gather_2")]] kernel void gather<2>(device const float *, device const int *, device float *, constant int &, uint);

// The entry of the next pass is loaded before the value of this one.
kernel void ahead(device const float *values [[buffer(0)]], device const int *table [[buffer(1)]],
                  device float *out [[buffer(2)]], constant int &size [[buffer(3)]],
                  uint i [[thread_position_in_grid]]) {
  float sum = 0;
  int place = simd_shuffle_xor(table[i], 1);
  for (int j = int(i); j < size; j += 32) {
    const int next = simd_shuffle_xor(table[j + 32], 1);
    sum += values[place];
    place = next;
  }
  out[i] = sum;
}

// Keeps COUNT values of a lane alive over a loop.
constant int MULTIPLES [[function_constant(0)]];
template <int COUNT>
kernel void keep(device const float *values [[buffer(0)]], device float *out [[buffer(1)]],
                 constant int &size [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  threadgroup float shared[32];
  float kept[COUNT];
  for (int k = 0; k < COUNT; k++) kept[k] = values[i * COUNT + k];
  for (int j = 0; j < size; j++) {
    shared[i % 32] = kept[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < COUNT; k++) kept[k] += shared[j % 32] * float(MULTIPLES);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int k = 0; k < COUNT; k++) out[i * COUNT + k] = kept[k];
}
template [[host_name("keep_8")]] kernel void keep<8>(device const float *, device float *, constant int &, uint);
template [[host_name("keep_40")]] kernel void keep<40>(device const float *, device float *, constant int &, uint);

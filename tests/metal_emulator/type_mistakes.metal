// Each line with a comment `MISTAKE: words` must be refused with a message that contains the words;
// all other lines are right.
#include <metal_stdlib>
using namespace metal;

struct Parameters {
  float4 weights;
  int count;
};

inline float first(float *p) { return p[0]; }  // MISTAKE: needs an address space
inline float &second(device float *p) { return p[1]; }  // MISTAKE: needs an address space
inline float of_threadgroup(threadgroup const float *p) { return p[0]; }
inline void store(device float *p, float value) { p[0] = value; }
inline void swap(thread float &a, thread float &b) {
  float old = a;
  a = b;
  b = old;
}
template <typename Pointer>
inline Pointer next(Pointer p) {
  return p + 1;
}
template <typename T, int N>
inline T sum(const device vec<T, N> *p, constant Parameters &parameters) {
  T total = 0;
  for (int i = 0; i < parameters.count; i++) total += p[i].x;
  return total;
}
inline float helper() {
  threadgroup float shared[4];  // MISTAKE: threadgroup variables belong into kernels
  return shared[0];
}
struct Holder {
  float *pointer;  // MISTAKE: needs an address space
  device float *right;
};

kernel void right(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                  constant Parameters &parameters [[buffer(2)]],
                  device const float4 *rows [[buffer(3)]],
                  uint index [[thread_position_in_threadgroup]]) {
  threadgroup float shared[64];
  threadgroup float *p = shared + index;
  Parameters copy = parameters;
  float a = 1, b = copy.weights.x;
  swap(a, b);
  shared[index] = in[index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const device float *q = next(in);
  thread const float4 &weights = copy.weights;
  const uint4 packed = as_type<uint4>(weights);
  store(out, *next(p) + q[0] + a * b + sum(rows, parameters) + float(packed.x));
  out[1] = max(float(index), 3.0f) + float(bfloat(a)) + simd_sum(half(b));
}

kernel void mistakes(device const float *in [[buffer(0)]], device float *out [[buffer(1)]],
                     constant Parameters &parameters [[buffer(2)]],
                     uint index [[thread_position_in_threadgroup]]) {
  threadgroup float shared[64];
  float values[4] = {0};
  device float *d = shared;  // MISTAKE: threadgroup
  thread float *t = shared;  // MISTAKE: threadgroup
  out[0] = of_threadgroup(in);  // MISTAKE: no matching function for call to 'of_threadgroup'
  store(shared, 1.0f);  // MISTAKE: no matching function for call to 'store'
  store(in, 1.0f);  // MISTAKE: no matching function for call to 'store'
  float *u = values;  // MISTAKE: needs an address space
  auto &v = values[1];  // MISTAKE: needs an address space
  out[1] = *(float *)values;  // MISTAKE: needs an address space
  out[2] = *reinterpret_cast<float *>(values);  // MISTAKE: needs an address space
  device float *w = next(p_of(shared));  // MISTAKE: p_of
  constant float *c = (constant float *)in;  // MISTAKE: address spaces
  parameters.count = 3;  // MISTAKE: not assignable
  thread float &r = shared[0];  // MISTAKE: address space
  swap(shared[0], values[0]);  // MISTAKE: no matching function for call to 'swap'
  out[3] = max(index, 3);  // MISTAKE: ambiguous
  bfloat b = 1.0f;  // MISTAKE: bfloat
  auto add = [](float p, float q) { return p + q; };  // MISTAKE: lambda
  float4 x = float4(1, 2, 3);  // MISTAKE: no matching
  out[4] = x.q;  // MISTAKE: q
  ulong big = simd_sum(ulong(index));  // MISTAKE: simd_sum
  bfloat summed = simd_sum(bfloat(index));  // MISTAKE: simd_sum
  double y = 1.0;  // MISTAKE: metal_has_no_double
  for (int i = 0; i < 2; i++) undeclared(i);  // MISTAKE: undeclared
}

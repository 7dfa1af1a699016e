// One mistake per kernel. A comment `BUG(modes): kind` stands on the line that the emulator must
// name, in exactly these modes; kernels without one are right. Launched with 4 threadgroups of 64,
// `in` holds the integers 0..255, `out` has room for 256 words.
#include <metal_stdlib>
using namespace metal;

#define PARAMETERS                                                                 \
  device const int *in [[buffer(0)]], device int *out [[buffer(1)]],               \
      uint thread_id [[thread_position_in_grid]],                                  \
      uint index [[thread_index_in_threadgroup]],                                  \
      uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]

// Races

kernel void right_broadcast(PARAMETERS) {
  threadgroup int shared;
  if (index == 0) shared = in[group];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_id] = shared;
}
kernel void broadcast_without_barrier(PARAMETERS) {
  threadgroup int shared;
  if (index == 0) shared = in[group];
  out[thread_id] = shared;  // BUG(race): race in threadgroup, race in simdgroup
}
kernel void broadcast_with_barrier_for_nothing(PARAMETERS) {
  threadgroup int shared;
  if (index == 0) shared = in[group];
  threadgroup_barrier(mem_flags::mem_none);
  out[thread_id] = shared;  // BUG(race): race in threadgroup, race in simdgroup
}
kernel void right_reuse(PARAMETERS) {
  threadgroup int shared[64];
  int sum = 0;
  for (int i = 0; i < 3; i++) {
    shared[index] = in[thread_id] + i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += shared[63 - index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[thread_id] = sum;
}
kernel void reuse_without_second_barrier(PARAMETERS) {
  threadgroup int shared[64];
  int sum = 0;
  for (int i = 0; i < 3; i++) {
    shared[index] = in[thread_id] + i;  // BUG(race): race in threadgroup
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += shared[63 - index];  // BUG(race): race in threadgroup
  }
  out[thread_id] = sum;
}
kernel void right_simdgroup_exchange(PARAMETERS) {
  threadgroup int shared[64];
  shared[index] = in[thread_id];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_id] = shared[index ^ 1];
}
kernel void simdgroup_exchange_without_barrier(PARAMETERS) {
  threadgroup int shared[64];
  shared[index] = in[thread_id];
  out[thread_id] = shared[index & ~1u];  // BUG(race): race in simdgroup
}
// simd_sum makes the lanes meet, but it does not order memory.
kernel void simdgroup_exchange_over_simd_sum(PARAMETERS) {
  threadgroup int shared[64];
  shared[index] = in[thread_id];
  int sum = simd_sum(in[thread_id]);
  out[thread_id] = shared[index ^ 1] + sum;  // BUG(race): race in simdgroup
}
kernel void vector_store_and_scalar_load_without_barrier(PARAMETERS) {
  threadgroup int4 shared[64];
  shared[index] = int4(in[thread_id]);
  threadgroup int *scalars = (threadgroup int *)shared;
  out[thread_id] = scalars[4 * (index & ~1u) + 1];  // BUG(race): race in simdgroup
}
// Three elements of 2 bytes are an access of 6 bytes, which the sanitizer's pass does not know.
kernel void right_store_of_three(PARAMETERS) {
  device ushort *words = (device ushort *)out + 3 * thread_id;
  for (int i = 0; i < 3 && group < 2; i++) words[i] = ushort(in[thread_id] + i);
}
kernel void two_threads_store_the_same_three(PARAMETERS) {
  device ushort *words = (device ushort *)out + 3 * (thread_id & ~1u);
  for (int i = 0; i < 3 && group < 2; i++) words[i] = ushort(in[thread_id] + i);  // BUG(race): race in simdgroup
}
kernel void load_of_three_without_barrier(PARAMETERS) {
  threadgroup ushort shared[192];
  for (int i = 0; i < 3; i++) shared[3 * index + i] = ushort(in[thread_id]);
  threadgroup const ushort *words = shared + 3 * (index & ~1u);
  out[thread_id] = words[0] * words[1] + words[2];  // BUG(race): race in simdgroup
}
kernel void simdgroup_barrier_between_simdgroups(PARAMETERS) {
  threadgroup int shared[64];
  shared[index] = in[thread_id];  // BUG(race): race in threadgroup
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_id] = shared[index ^ 32];  // BUG(race): race in threadgroup, uninitialised threadgroup memory
}
kernel void right_exchange_through_device_memory(PARAMETERS) {
  out[thread_id] = in[thread_id];
  threadgroup_barrier(mem_flags::mem_device);
  int other = out[group * 64 + 63 - index];
  threadgroup_barrier(mem_flags::mem_device);
  out[thread_id] = other;
}
kernel void exchange_through_device_memory(PARAMETERS) {
  out[thread_id] = in[thread_id];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int other = out[group * 64 + 63 - index];  // BUG(race): race in threadgroup
  threadgroup_barrier(mem_flags::mem_device);
  out[thread_id] = other;
}
kernel void several_threadgroups_store_one_address(PARAMETERS) {
  out[index] = group;  // BUG(race): race between threadgroups
}
kernel void load_of_another_threadgroups_store(PARAMETERS) {
  out[thread_id] = 1;
  if (index == 0 && group == 3) out[thread_id] = out[0];  // BUG(race): race between threadgroups
}
kernel void right_atomic_sum(device const int *in [[buffer(0)]], device atomic_int *out [[buffer(1)]],
                             uint thread_id [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&out[0], in[thread_id], memory_order_relaxed);
}

// Memory that is not there

kernel void load_past_the_end(PARAMETERS) {
  out[thread_id] = in[thread_id + 1];  // BUG(fast race ubsan): device buffer out of bounds
}
kernel void store_past_the_end(PARAMETERS) {
  out[thread_id + 1] = in[thread_id];  // BUG(fast race ubsan): device buffer out of bounds
}
kernel void store_before_the_beginning(PARAMETERS) {
  out[int(thread_id) - 2000] = in[thread_id];  // BUG(fast race ubsan): device buffer out of bounds
}
kernel void load_far_away(PARAMETERS) {
  out[thread_id] = in[0x3fffffff];  // BUG(fast race ubsan): device buffer out of bounds
}
kernel void vector_load_past_the_end(PARAMETERS) {
  int4 four = *(device const int4 *)(in + 256);  // BUG(fast race ubsan): device buffer out of bounds
  out[thread_id] = four.x;
}
kernel void load_nowhere(PARAMETERS) {
  out[thread_id] = in[0x7fffffffffffl];  // BUG(fast race ubsan): access outside every buffer
}
kernel void unbound_buffer(PARAMETERS, device const int *extra [[buffer(2)]]) {
  out[thread_id] = extra[5];  // BUG(fast race ubsan): unbound buffer
}
kernel void right_unused_buffer(PARAMETERS, device const int *extra [[buffer(2)]]) {
  out[thread_id] = in[0] ? extra[5] : 1;
}
kernel void store_through_cast(PARAMETERS, device const int *fixed [[buffer(3)]]) {
  *(device int *)fixed = 1;  // BUG(fast race ubsan): store to read-only buffer
}
kernel void threadgroup_array_overflow(PARAMETERS) {
  threadgroup int shared[60];
  threadgroup int neighbour[64];
  neighbour[index] = 0;
  threadgroup int *first = shared;
  first[index] = in[thread_id];  // BUG(race): threadgroup memory out of bounds
  out[thread_id] = neighbour[index];
}
kernel void threadgroup_argument_overflow(PARAMETERS, threadgroup int *shared [[threadgroup(0)]]) {
  shared[index + 1] = in[thread_id];  // BUG(race): threadgroup memory out of bounds
}
kernel void right_threadgroup_argument(PARAMETERS, threadgroup int *shared [[threadgroup(0)]]) {
  shared[index] = in[thread_id];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_id] = shared[63 - index];
}
kernel void uninitialised_load(PARAMETERS) {
  threadgroup int shared[64];
  if (index < 63) shared[index] = in[thread_id];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_id] = shared[index];  // BUG(race): uninitialised threadgroup memory
}
kernel void too_much_threadgroup_memory(PARAMETERS) {  // BUG(fast race ubsan): too much threadgroup memory
  threadgroup int shared[8 * 1024 + 4];
  shared[index] = in[thread_id];
  out[thread_id] = shared[index];
}
kernel void far_too_much_threadgroup_memory(PARAMETERS) {  // BUG(fast race ubsan): too much threadgroup memory
  threadgroup int shared[1024 * 1024];
  shared[index] = in[thread_id];
  out[thread_id] = shared[index];
}
kernel void too_big_for_a_stack(PARAMETERS) {  // BUG(fast race ubsan): thread stack overflow
  int private_array[64 * 1024];
  for (int i = 0; i < 64 * 1024; i++) private_array[i] = in[i % 256];
  out[thread_id] = private_array[in[thread_id]];
}

// Divergence

kernel void right_uniform_branch(PARAMETERS) {
  int sum = 0;
  if (group < 2) sum = simd_sum(in[thread_id]);
  out[thread_id] = sum;
}
kernel void simd_sum_in_divergent_flow(PARAMETERS) {
  int sum = 0;
  if (lane < 16) sum = simd_sum(in[thread_id]);  // BUG(fast race ubsan): divergent simdgroup operation
  out[thread_id] = sum;
}
kernel void simd_sum_after_return(PARAMETERS) {
  if (lane == 31) return;
  out[thread_id] = simd_sum(in[thread_id]);  // BUG(fast race ubsan): divergent simdgroup operation
}
kernel void shuffle_from_a_lane_that_returned(PARAMETERS) {
  if (lane == 31) return;
  out[thread_id] = simd_shuffle(in[thread_id], ushort(31));  // BUG(fast race ubsan): divergent simdgroup operation, read from inactive lane
}
kernel void barrier_in_divergent_flow(PARAMETERS) {
  if (index < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BUG(fast race ubsan): divergent barrier
  } else {
    out[thread_id] = in[thread_id];
  }
}
kernel void barriers_at_two_places(PARAMETERS) {
  if (index < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BUG(fast race ubsan): divergent barrier
    out[thread_id] = 1;
  } else {
    out[thread_id] = 2;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Undefined operations

kernel void right_arithmetic(PARAMETERS) {
  out[thread_id] = (in[thread_id] << 3) / (in[thread_id] + 1) + int(in[thread_id] * 0.5f);
}
kernel void shift_by_the_width(PARAMETERS) {
  out[thread_id] = 1 << in[thread_id];  // BUG(ubsan): undefined behaviour
}
kernel void signed_overflow(PARAMETERS) {
  out[thread_id] = in[thread_id] * 100000000;  // BUG(ubsan): undefined behaviour
}
kernel void private_array_index(PARAMETERS) {
  int private_array[4] = {1, 2, 3, 4};
  out[thread_id] = private_array[in[thread_id] & 7];  // BUG(ubsan): undefined behaviour
}
kernel void division_by_zero(PARAMETERS) {
  out[thread_id] = 5 / (in[thread_id] - 3);  // BUG(fast race ubsan): undefined behaviour
}
kernel void float_too_large_for_int(PARAMETERS) {
  out[thread_id] = int(in[thread_id] * 1e30f);  // BUG(ubsan): undefined behaviour
}
kernel void misaligned_vector_load(PARAMETERS) {
  int4 four = *(device const int4 *)(in + 1);  // BUG(ubsan): undefined behaviour
  out[thread_id] = four.x + four.y + four.z + four.w;
}

kernel void right_maximum_of_nan(PARAMETERS) {
  const float x = in[thread_id] == 3 ? NAN : 1.0f;
  out[thread_id] = int(precise::max(x, 2.0f) + precise::min(x, 2.0f));
}
kernel void fast_maximum_of_nan(PARAMETERS) {
  const float x = in[thread_id] == 3 ? NAN : 1.0f;
  out[thread_id] = int(as_type<uint>(max(x, 2.0f)));  // BUG(fast race ubsan): undefined behaviour
}
kernel void fast_minimum_of_nan(PARAMETERS) {
  const float x = in[thread_id] == 3 ? NAN : 1.0f;
  out[thread_id] = int(as_type<uint>(fast::min(2.0f, x)));  // BUG(fast race ubsan): undefined behaviour
}
kernel void simd_maximum_of_nan(PARAMETERS) {
  const float x = in[thread_id] == 3 ? NAN : 1.0f;
  out[thread_id] = int(as_type<uint>(simd_max(x)));  // BUG(fast race ubsan): undefined behaviour
}

// The rest

kernel void failed_assertion(PARAMETERS) {
  assert(in[thread_id] < 255);  // BUG(fast race ubsan): assertion failed
  out[thread_id] = 1;
}
kernel void endless_loop(PARAMETERS) {
  while (in[0] == 0) out[thread_id] ^= 1;  // BUG(fast race ubsan): kernel does not end
}

// How both attention kernels read keys and values, and the function constants of both. The other
// constants are beside their kernel.

constant int BLOCK_SIZE [[function_constant(0)]];
constant bool CAUSAL [[function_constant(1)]];
constant bool HAS_WINDOW [[function_constant(2)]];
constant bool HAS_SOFTCAP [[function_constant(3)]];
constant bool HAS_SINKS [[function_constant(7)]];
constant bool SPLIT [[function_constant(10)]];
constant bool VALUES_IN_KEYS [[function_constant(12)]];  // V is the first columns of K
constant bool WHOLE_QUERIES [[function_constant(13)]];   // queries begin at whole vectors
constant bool WHOLE = !SPLIT;

// The place of a key that is not attended.
constant constexpr uint NOWHERE = 0xFFFFFFFF;

// The place of a slot in a head of the pool, in vectors.
inline uint slot_offset(int block, int slot, long block_stride, long slot_stride) {
  return uint(block) * uint(block_stride / VECTOR) + uint(slot) * uint(slot_stride / VECTOR);
}

// Neighbouring elements of a key or value. Every one that a kernel computes with is read here.
template <typename T>
inline vec<T, VECTOR> read_pool(const device T* head, uint vector) {
  return reinterpret_cast<const device vec<T, VECTOR>*>(head)[vector];
}

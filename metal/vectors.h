// Sizes of the GPU that the kernels share, and access to whole vectors.

// Before a loop over arrays of registers: only constant indices keep them in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

// Before a loop whose passes would need too many registers together.
#define NO_UNROLL _Pragma("clang loop unroll(disable)")

constant constexpr int LANES = 32;  // of a simdgroup
constant constexpr int VECTOR = 4;  // neighbouring elements that a lane moves at once
constant constexpr int GROUP = 64;  // values of 4 bits that share a scale: csrc/kv_formats.h

// Neighbouring elements, loaded at once.
template <typename T>
inline vec<T, VECTOR> read_vector(const device T* elements) {
  return *reinterpret_cast<const device vec<T, VECTOR>*>(elements);
}

// The same, if they may lie anywhere.
template <typename T>
inline vec<T, VECTOR> gather_vector(const device T* elements, long stride, bool is_whole) {
  if (is_whole) {
    return read_vector(elements);
  }
  vec<T, VECTOR> result;
  UNROLL
  for (int i = 0; i < VECTOR; i++) {
    result[i] = elements[i * stride];
  }
  return result;
}

// Neighbouring elements, stored at once.
template <typename T>
inline void write_vector(device T* elements, vec<T, VECTOR> values) {
  *reinterpret_cast<device vec<T, VECTOR>*>(elements) = values;
}

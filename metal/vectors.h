// Sizes of the GPU that the kernels share, and access to whole vectors.

constant constexpr int LANES = 32;  // of a simdgroup
constant constexpr int VECTOR = 4;  // neighbouring elements that a lane moves at once

// A vector of the pool, which is stored or copied at once.
template <typename T>
inline device vec<T, VECTOR>& vector_at(device T* elements) {
  return *reinterpret_cast<device vec<T, VECTOR>*>(elements);
}

// The simplest write of new keys and values: no vectors, no function constants. Grid in threads:
// (max(k_vectors, v_vectors), KV heads, rows). A thread moves an element of a key and of a value.
template <typename T>
[[kernel]] void write_elements(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device int* slot_mapping [[buffer(2)]],
    constant WriteParams& p [[buffer(3)]],
    device T* k_cache [[buffer(4)]],
    device T* v_cache [[buffer(5)]],
    uint3 position [[thread_position_in_grid]]) {
  const int column = int(position.x);
  const int head = int(position.y);
  const int row = int(position.z);
  const int slot = slot_mapping[row * long(p.slots_stride)];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) {
    return;
  }
  const long block = slot / p.block_size;
  const long offset = slot % p.block_size;
  if (column < p.k_vectors) {
    const device T* from = k + row * p.k_strides[0] + head * p.k_strides[1];
    device T* to = k_cache + head * p.k_cache_strides[0] + block * p.k_cache_strides[1] +
        offset * p.k_cache_strides[2];
    to[column] = from[column * p.k_strides[2]];
  }
  if (column < p.v_vectors) {
    const device T* from = v + row * p.v_strides[0] + head * p.v_strides[1];
    device T* to = v_cache + head * p.v_cache_strides[0] + block * p.v_cache_strides[1] +
        offset * p.v_cache_strides[2];
    to[column] = from[column * p.v_strides[2]];
  }
}

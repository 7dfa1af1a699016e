// Writes of new keys and values to the pool.

constant bool BY_ELEMENT [[function_constant(24)]];  // a thread moves one element, not four

template <typename T>
inline void write_part(device T* to, const device T* row, int part, long stride) {
  if (BY_ELEMENT) {
    to[part] = row[part * stride];
  } else {
    write_vector(to + VECTOR * part, new_elements(row, part, stride));
  }
}

// Grid in threads: (max(k_vectors, v_vectors), KV heads, rows). A thread moves a part of a key and
// of a value.
template <typename T>
[[kernel]] void write_kv(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device int* slot_mapping [[buffer(2)]],
    constant WriteParams& p [[buffer(3)]],
    device T* k_cache [[buffer(4)]],
    device T* v_cache [[buffer(5)]],
    uint3 position [[thread_position_in_grid]]) {
  const int vector = int(position.x);
  const int head = int(position.y);
  const int row = int(position.z);
  const int slot = slot_mapping[row * long(p.slots_stride)];
  if (slot < 0 || slot >= p.num_blocks * BLOCK_SIZE) {
    return;
  }
  const long block = slot / BLOCK_SIZE;
  const long offset = slot % BLOCK_SIZE;
  if (vector < p.k_vectors) {
    const device T* from = k + row * p.k_strides[0] + head * p.k_strides[1];
    device T* to = k_cache + head * p.k_cache_strides[0] + block * p.k_cache_strides[1] +
        offset * p.k_cache_strides[2];
    write_part(to, from, vector, p.k_strides[2]);
  }
  if (vector < p.v_vectors) {
    const device T* from = v + row * p.v_strides[0] + head * p.v_strides[1];
    device T* to = v_cache + head * p.v_cache_strides[0] + block * p.v_cache_strides[1] +
        offset * p.v_cache_strides[2];
    write_part(to, from, vector, p.v_strides[2]);
  }
}

// Writes to the pool: rows of new keys and values, and copies of whole blocks.

constant int POOL_BLOCK_SIZE [[function_constant(0)]];
constant bool WHOLE_VECTORS [[function_constant(1)]];  // new rows are as dense as the pool's

// Four neighbouring elements of the pool, stored or copied at once.
template <typename T>
inline device vec<T, VECTOR>& vector_at(device T* elements) {
  return *reinterpret_cast<device vec<T, VECTOR>*>(elements);
}

// Four neighbouring elements of a new row.
template <typename T>
inline vec<T, VECTOR> new_elements(const device T* row, int vector, long stride) {
  if (WHOLE_VECTORS) {
    return *reinterpret_cast<const device vec<T, VECTOR>*>(row + VECTOR * vector);
  }
  vec<T, VECTOR> elements;
  for (int i = 0; i < VECTOR; i++) {
    elements[i] = row[(VECTOR * vector + i) * stride];
  }
  return elements;
}

// Grid in threads: (max(k_vectors, v_vectors), KV heads, rows). A thread moves four neighbouring
// elements of a key and of a value.
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
  if (slot < 0 || slot >= p.num_blocks * POOL_BLOCK_SIZE) {
    return;
  }
  const long block = slot / POOL_BLOCK_SIZE;
  const long offset = slot % POOL_BLOCK_SIZE;
  if (vector < p.k_vectors) {
    const device T* from = k + row * p.k_strides[0] + head * p.k_strides[1];
    device T* to = k_cache + head * p.k_cache_strides[0] + block * p.k_cache_strides[1] +
        offset * p.k_cache_strides[2];
    vector_at(to + VECTOR * vector) = new_elements(from, vector, p.k_strides[2]);
  }
  if (vector < p.v_vectors) {
    const device T* from = v + row * p.v_strides[0] + head * p.v_strides[1];
    device T* to = v_cache + head * p.v_cache_strides[0] + block * p.v_cache_strides[1] +
        offset * p.v_cache_strides[2];
    vector_at(to + VECTOR * vector) = new_elements(from, vector, p.v_strides[2]);
  }
}

// Copies of whole blocks (source, destination), in order. Grid in threads: (max(k_vectors,
// v_vectors), KV heads, block_size). A thread moves the same place of every pair, so that a block
// may be the destination of one pair and the source of a later one.
template <typename T>
[[kernel]] void copy_blocks(
    const device int* block_pairs [[buffer(0)]],
    constant CopyParams& p [[buffer(1)]],
    device T* k_cache [[buffer(2)]],
    device T* v_cache [[buffer(3)]],
    uint3 position [[thread_position_in_grid]]) {
  const int vector = int(position.x);
  const long head = long(position.y);
  const long offset = long(position.z);
  device T* k = k_cache + head * p.k_strides[0] + offset * p.k_strides[2] + VECTOR * vector;
  device T* v = v_cache + head * p.v_strides[0] + offset * p.v_strides[2] + VECTOR * vector;
  for (int pair = 0; pair < p.num_pairs; pair++) {
    const int from = block_pairs[pair * p.pairs_strides[0]];
    const int to = block_pairs[pair * p.pairs_strides[0] + p.pairs_strides[1]];
    const bool is_valid = from >= 0 && from < p.num_blocks && to >= 0 && to < p.num_blocks;
    if (is_valid && vector < p.k_vectors) {
      vector_at(k + to * p.k_strides[1]) = vector_at(k + from * p.k_strides[1]);
    }
    if (is_valid && vector < p.v_vectors) {
      vector_at(v + to * p.v_strides[1]) = vector_at(v + from * p.v_strides[1]);
    }
  }
}

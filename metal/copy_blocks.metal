constant bool WHOLE_VECTORS [[function_constant(20)]];  // else a thread moves one element

template <typename T>
inline void copy_part(device T* to, const device T* from) {
  if (WHOLE_VECTORS) {
    write_vector(to, read_vector(from));
  } else {
    *to = *from;
  }
}

// Copies of whole blocks (source, destination), in order. Grid in threads: (max(k_vectors,
// v_vectors), KV heads, block_size * pairs / pairs_each). A thread moves the same place of its
// pairs, so a block may be the destination of one of these and the source of a later one.
template <typename T>
[[kernel]] void copy_blocks(
    const device int* block_pairs [[buffer(0)]],
    constant CopyParams& p [[buffer(1)]],
    device T* k_cache [[buffer(2)]],
    device T* v_cache [[buffer(3)]],
    uint3 position [[thread_position_in_grid]]) {
  const int vector = int(position.x);
  const int first = WHOLE_VECTORS ? VECTOR * vector : vector;
  const long head = long(position.y);
  const int offset = int(position.z) % p.block_size;  // a GPU divides 64 bits by many instructions
  const int begin = int(position.z) / p.block_size * p.pairs_each;
  device T* k = k_cache + head * p.k_strides[0] + offset * p.k_strides[2] + first;
  device T* v = v_cache + head * p.v_strides[0] + offset * p.v_strides[2] + first;
  for (int pair = begin; pair < begin + p.pairs_each; pair++) {
    const int from = block_pairs[pair * p.pairs_strides[0]];
    const int to = block_pairs[pair * p.pairs_strides[0] + p.pairs_strides[1]];
    const bool is_valid = from >= 0 && from < p.num_blocks && to >= 0 && to < p.num_blocks;
    if (is_valid && vector < p.k_vectors) {
      copy_part(k + to * p.k_strides[1], k + from * p.k_strides[1]);
    }
    if (is_valid && vector < p.v_vectors) {
      copy_part(v + to * p.v_strides[1], v + from * p.v_strides[1]);
    }
  }
}

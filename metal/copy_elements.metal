// The simplest copy of whole blocks (source, destination), in order: no vectors, no function
// constants. Grid in threads: (max(k_vectors, v_vectors), KV heads, block_size * pairs /
// pairs_each). A thread moves the same element of its pairs.
template <typename T>
[[kernel]] void copy_elements(
    const device int* block_pairs [[buffer(0)]],
    constant CopyParams& p [[buffer(1)]],
    device T* k_cache [[buffer(2)]],
    device T* v_cache [[buffer(3)]],
    uint3 position [[thread_position_in_grid]]) {
  const int column = int(position.x);
  const long head = long(position.y);
  const int offset = int(position.z) % p.block_size;
  const int begin = int(position.z) / p.block_size * p.pairs_each;
  device T* k = k_cache + head * p.k_strides[0] + offset * p.k_strides[2] + column;
  device T* v = v_cache + head * p.v_strides[0] + offset * p.v_strides[2] + column;
  for (int pair = begin; pair < begin + p.pairs_each; pair++) {
    const int from = block_pairs[pair * p.pairs_strides[0]];
    const int to = block_pairs[pair * p.pairs_strides[0] + p.pairs_strides[1]];
    const bool is_valid = from >= 0 && from < p.num_blocks && to >= 0 && to < p.num_blocks;
    if (is_valid && column < p.k_vectors) {
      k[to * p.k_strides[1]] = k[from * p.k_strides[1]];
    }
    if (is_valid && column < p.v_vectors) {
      v[to * p.v_strides[1]] = v[from * p.v_strides[1]];
    }
  }
}

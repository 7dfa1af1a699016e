// Merge of the splits of each row. Grid: one threadgroup for each of the B * H * L rows. It reads
// only splits with keys that the row sees: no threadgroup stored the others.

constant bool HAS_SINKS [[function_constant(14)]];

constant constexpr int SIMDGROUPS = 8;
constant constexpr int THREADS = SIMDGROUPS * LANES;

// The sequence of a token of a ragged batch.
inline int sequence_of(int token, const device int* cu_seqlens, int num_sequences) {
  int low = 0;
  int high = num_sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename Q, int DV>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void merge_splits(
    const device float* partial_out [[buffer(0)]],
    const device float* partial_sums [[buffer(1)]],
    const device int* context_lens [[buffer(2)]],
    constant MergeParams& p [[buffer(3)]],
    device Q* out [[buffer(4)]],
    const device float* sinks [[buffer(5), function_constant(HAS_SINKS)]],
    const device int* cu_seqlens [[buffer(6)]],
    const device int* prefixes [[buffer(7), function_constant(HAS_PREFIXES)]],
    uint group_position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int VECTORS = (DV / VECTOR + LANES - 1) / LANES;  // of a lane
  threadgroup float shared_out[SIMDGROUPS * DV];
  const int row = int(group_position);
  const int token = row % p.num_tokens;
  const int head = row / p.num_tokens % p.num_heads;
  const int q_row = row / p.num_tokens / p.num_heads;
  int sequence = q_row;
  int num_tokens = p.num_tokens;          // of the same sequence
  int tokens_after = num_tokens - token;  // this token included
  int split_keys = p.keys_per_split;
  if (p.num_sequences > 0) {
    sequence = sequence_of(q_row, cu_seqlens, p.num_sequences);
    num_tokens = cu_seqlens[sequence + 1] - cu_seqlens[sequence];
    tokens_after = cu_seqlens[sequence + 1] - q_row;
    split_keys = sequence < p.first_sequence ? split_keys : int(p.keys_per_chunk_split);
  }
  const int context = clamp(context_lens[sequence * p.context_stride], 0, p.max_keys);
  const int position = tokens_after > 0 ? context - tokens_after : -1;  // -1: of no sequence
  const KeyRange keys = key_range(position, context, p.is_causal != 0, p.window);
  const int base = first_split_key(context, num_tokens, p.window);
  const int begin = max(0, keys.first - base) / split_keys;
  int end = min((keys.stop - base + split_keys - 1) / split_keys, p.num_splits);
  if (HAS_PREFIXES) {
    const int own = first_own_key(sequence, p.keys_per_shared_split, int(lane), prefixes,
                                  context_lens, p.context_stride, p.num_places, p.max_keys);
    end = (own + p.keys_per_shared_split - 1) / p.keys_per_shared_split;
    end += (max(keys.stop - own, 0) + split_keys - 1) / split_keys;
  }
  const device float* sums = partial_sums + 2 * long(row) * p.num_splits;
  const device float* outs = partial_out + long(row) * p.num_splits * DV;

  // Every simdgroup computes the maximum and the sum of all splits: lanes share the splits.
  const float sink = HAS_SINKS ? in_log2(sinks[head]) : LOWEST;
  float own_max = precise::max(LOWEST, sink);
  for (int split = begin + int(lane); split < end; split += LANES) {
    own_max = max(own_max, sums[2 * split]);
  }
  const float total_max = simd_max(own_max);
  float own_sum = 0.0f;
  for (int split = begin + int(lane); split < end; split += LANES) {
    own_sum += sums[2 * split + 1] * rescale(sums[2 * split], total_max);
  }
  const float sum = simd_sum(own_sum);

  // Simdgroups share the outputs of the splits.
  float4 weighted[VECTORS];
  UNROLL
  for (int c = 0; c < VECTORS; c++) {
    weighted[c] = float4(0.0f);
  }
  for (int split = begin + int(simdgroup); split < end; split += SIMDGROUPS) {
    const float scale = rescale(sums[2 * split], total_max);
    UNROLL
    for (int c = 0; c < VECTORS; c++) {
      const int vector = int(lane) + c * LANES;
      if (vector < DV / VECTOR) {
        weighted[c] += read_vector(outs + long(split) * DV + vector * VECTOR) * scale;
      }
    }
  }
  UNROLL
  for (int c = 0; c < VECTORS; c++) {
    const int vector = int(lane) + c * LANES;
    if (vector < DV / VECTOR) {
      UNROLL
      for (int i = 0; i < VECTOR; i++) {
        shared_out[int(simdgroup) * DV + vector * VECTOR + i] = weighted[c][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const float total = HAS_SINKS ? sum + weight_of(sink, total_max) : sum;
  device Q* out_row = out + q_row * p.out_strides[0] + head * p.out_strides[1] +
      token * p.out_strides[2];
  for (int d = int(simdgroup) * LANES + int(lane); d < DV; d += THREADS) {
    float element = 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      element += shared_out[s * DV + d];
    }
    out_row[d] = Q(sum != 0.0f ? element / total : 0.0f);
  }
}

// Merge of the splits of each row. Grid: one threadgroup of LANES for each of the B * H * L rows.

constant bool HAS_SINKS [[function_constant(14)]];

template <typename Q, int DV>
[[kernel, max_total_threads_per_threadgroup(LANES)]] void merge_splits(
    const device float* partial_out [[buffer(0)]],
    const device float* partial_sums [[buffer(1)]],
    constant MergeParams& p [[buffer(2)]],
    device Q* out [[buffer(3)]],
    const device float* sinks [[buffer(4), function_constant(HAS_SINKS)]],
    uint group_position [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const int row = int(group_position);
  const int token = row % p.num_tokens;
  const int head = row / p.num_tokens % p.num_heads;
  const int sequence = row / p.num_tokens / p.num_heads;
  const device float* sums = partial_sums + 2 * long(row) * p.num_splits;
  const device float* outs = partial_out + long(row) * p.num_splits * DV;
  const float sink = HAS_SINKS ? in_log2(sinks[head]) : LOWEST;
  float total_max = max(LOWEST, sink);
  for (int split = 0; split < p.num_splits; split++) {
    total_max = max(total_max, sums[2 * split]);
  }
  constexpr int ELEMENTS = (DV + LANES - 1) / LANES;  // of a lane
  float sum = 0.0f;
  float weighted[ELEMENTS] = {0.0f};
  for (int split = 0; split < p.num_splits; split++) {
    const float scale = rescale(sums[2 * split], total_max);
    sum += sums[2 * split + 1] * scale;
    for (int c = 0; c < ELEMENTS; c++) {
      const int d = int(lane) + c * LANES;
      if (d < DV) {
        weighted[c] += outs[long(split) * DV + d] * scale;
      }
    }
  }
  const float total = HAS_SINKS ? sum + weight_of(sink, total_max) : sum;
  device Q* out_row = out + sequence * p.out_strides[0] + head * p.out_strides[1] +
      token * p.out_strides[2];
  for (int c = 0; c < ELEMENTS; c++) {
    const int d = int(lane) + c * LANES;
    if (d < DV) {
      out_row[d] = Q(sum != 0.0f ? weighted[c] / total : 0.0f);
    }
  }
}

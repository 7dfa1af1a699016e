// Attention of few query rows over a long paged context (decode).
//
// One threadgroup computes ROWS query rows that share a KV head, over one split of the context. It
// uses every loaded key and value for all these rows. A simdgroup is two teams of 16 lanes, or, for
// wide heads, one team of 32. A team takes one key at a time. A lane holds four neighbouring
// dimensions of the key; wide heads need several such vectors, at intervals of the whole team. Each
// team has its own streaming softmax. At the end the teams are merged; a second kernel merges the
// splits.

constant constexpr int SIMDGROUPS = 8;
constant constexpr int THREADS = SIMDGROUPS * LANES;

// Lanes that share a key: no lane holds more than 20 elements of it.
constexpr int team_size(int head_dim, int value_dim) {
  return head_dim > 256 || value_dim > 256 ? LANES : LANES / 2;
}

// Rows whose outputs are in threadgroup memory at once: 8 KiB, for widths up to 256.
constexpr int merged_rows(int rows, int value_dim) {
  return value_dim * rows > 256 ? (value_dim > 128 ? 1 : 2) : rows;
}

// Sum over the lanes of a team.
template <int TEAM>
inline float team_sum(float value) {
  for (ushort step = TEAM / 2; step > 0; step /= 2) {
    value += simd_shuffle_xor(value, step);
  }
  return value;
}

// This lane's vectors of one row of the pool; zeros if the slot is not valid.
template <typename T, int DIM, int TEAM, int VECTORS>
inline void load_row(
    const device T* head, Slot slot, long block_stride, long slot_stride, int team_lane,
    thread float4 (&result)[VECTORS]) {
  const long start = slot.block * block_stride + slot.offset * slot_stride;
  for (int c = 0; c < VECTORS; c++) {
    const int vector = team_lane + c * TEAM;
    result[c] = float4(0.0f);
    if (slot.is_valid && vector < DIM / VECTOR) {
      result[c] = float4(read_vector(head + start + vector * VECTOR));
    }
  }
}

// Grid: (KV heads * row tiles, sequences, splits) threadgroups of THREADS. With a mapping, query
// heads replace the KV heads.
template <typename T, typename Q, int D, int DV, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void paged_attention(
    const device Q* q [[buffer(0)]],
    const device T* k_cache [[buffer(1)]],
    const device T* v_cache [[buffer(2)]],
    const device int* block_tables [[buffer(3)]],
    const device int* context_lens [[buffer(4)]],
    constant AttentionParams& p [[buffer(5)]],
    device Q* out [[buffer(6), function_constant(WHOLE)]],
    device float* partial_out [[buffer(7), function_constant(SPLIT)]],
    device float* partial_sums [[buffer(8), function_constant(SPLIT)]],
    const device int* kv_head_mapping [[buffer(9), function_constant(HAS_MAPPING)]],
    const device float* rope_freqs [[buffer(10), function_constant(HAS_ROPE)]],
    const device bool* bool_mask [[buffer(11), function_constant(HAS_BOOL_MASK)]],
    const device float* float_mask [[buffer(12), function_constant(HAS_FLOAT_MASK)]],
    const device float* sinks [[buffer(13), function_constant(HAS_SINKS)]],
    const device float* alibi_slopes [[buffer(14), function_constant(HAS_ALIBI)]],
    device float* attn [[buffer(15), function_constant(RETURN_ATTN)]],
    uint3 group_position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int TEAM = team_size(D, DV);
  constexpr int TEAMS = LANES / TEAM;
  constexpr int MERGED = merged_rows(ROWS, DV);
  constexpr int K_VECTORS = (D / VECTOR + TEAM - 1) / TEAM;  // of a key that a lane holds
  constexpr int V_VECTORS = (DV / VECTOR + TEAM - 1) / TEAM;
  threadgroup float shared_out[SIMDGROUPS * MERGED * DV];
  threadgroup float shared_max[SIMDGROUPS * ROWS];
  threadgroup float shared_sum[SIMDGROUPS * ROWS];

  const int head_slot = int(group_position.x) / p.row_tiles;
  const int first_row = int(group_position.x) % p.row_tiles * ROWS;
  const int sequence = int(group_position.y);
  const int split = int(group_position.z);
  const int team = int(lane) / TEAM;
  const int team_lane = int(lane) % TEAM;

  const int kv_head = HAS_MAPPING ? kv_head_mapping[head_slot] : head_slot;
  const bool has_keys = kv_head >= 0 && kv_head < p.num_kv_heads;
  const int max_keys = p.max_blocks * BLOCK_SIZE;
  const int context = clamp(context_lens[sequence * p.context_stride], 0, max_keys);
  const device int* table = block_tables + sequence * p.tables_strides[0];
  const device T* k_head = k_cache + kv_head * p.k_strides[0];
  const device T* v_head = v_cache + kv_head * p.v_strides[0];

  QueryRow rows[ROWS];
  float4 queries[ROWS][K_VECTORS];
  int begin = max_keys;
  int end = 0;
  for (int r = 0; r < ROWS; r++) {
    rows[r] = query_row(first_row + r, sequence, head_slot, context, p);
    const bool sees_keys = rows[r].stop > 0;
    // A row that sees no key does not lower `begin`, unless no row sees a key.
    begin = min(begin, rows[r].first);
    end = max(end, rows[r].stop);
    const device Q* row = q + sequence * p.q_strides[0] + rows[r].head * p.q_strides[1] +
        rows[r].token * p.q_strides[2];
    const long angles = sequence * p.rope_strides[0] + rows[r].token * p.rope_strides[1];
    for (int c = 0; c < K_VECTORS; c++) {
      const int vector = team_lane + c * TEAM;
      queries[r][c] = float4(0.0f);
      if (sees_keys && vector < D / VECTOR) {
        queries[r][c] = query_vector(row, rope_freqs + angles, vector, p);
      }
    }
  }
  begin = max(begin, split * p.keys_per_split);
  end = min(end, (split + 1) * p.keys_per_split);
  if (SPLIT && begin >= end) {
    return;  // The merge does not read what this split would store.
  }
  end = has_keys ? end : 0;

  float running_max[ROWS];
  float running_sum[ROWS];
  float4 running_out[ROWS][V_VECTORS];
  for (int r = 0; r < ROWS; r++) {
    running_max[r] = LOWEST;
    running_sum[r] = 0.0f;
    for (int c = 0; c < V_VECTORS; c++) {
      running_out[r][c] = float4(0.0f);
    }
  }

  for (int base = begin + int(simdgroup) * TEAMS; base < end; base += SIMDGROUPS * TEAMS) {
    const int key = base + team;
    const Slot slot = locate(key, end, table, p);
    float4 k[K_VECTORS];
    float4 v[V_VECTORS];
    load_row<T, D, TEAM>(k_head, slot, p.k_strides[1], p.k_strides[2], team_lane, k);
    if (VALUES_IN_KEYS) {
      for (int c = 0; c < V_VECTORS; c++) {
        v[c] = k[min(c, K_VECTORS - 1)];
      }
    } else {
      load_row<T, DV, TEAM>(v_head, slot, p.v_strides[1], p.v_strides[2], team_lane, v);
    }
    for (int r = 0; r < ROWS; r++) {
      float partial = 0.0f;
      for (int c = 0; c < K_VECTORS; c++) {
        partial += dot(queries[r][c], k[c]);
      }
      const float score = finish_score(
          team_sum<TEAM>(partial), rows[r], key, slot.is_valid, bool_mask, float_mask,
          alibi_slopes, p);
      if (score != -INFINITY) {
        const float new_max = max(running_max[r], score);
        const float old_scale = rescale(running_max[r], new_max);
        const float weight = weight_of(score, new_max);
        running_max[r] = new_max;
        running_sum[r] = running_sum[r] * old_scale + weight;
        for (int c = 0; c < V_VECTORS; c++) {
          running_out[r][c] = running_out[r][c] * old_scale + weight * v[c];
        }
      }
    }
  }

  // Merge the teams of each simdgroup.
  for (int r = 0; TEAMS > 1 && r < ROWS; r++) {
    const float other_max = simd_shuffle_xor(running_max[r], ushort(TEAM));
    const float other_sum = simd_shuffle_xor(running_sum[r], ushort(TEAM));
    const float new_max = max(running_max[r], other_max);
    const float own_scale = rescale(running_max[r], new_max);
    const float other_scale = rescale(other_max, new_max);
    for (int c = 0; c < V_VECTORS; c++) {
      for (int i = 0; i < VECTOR; i++) {
        const float own = running_out[r][c][i];
        const float other = simd_shuffle_xor(own, ushort(TEAM));
        running_out[r][c][i] = own * own_scale + other * other_scale;
      }
    }
    running_sum[r] = running_sum[r] * own_scale + other_sum * other_scale;
    running_max[r] = new_max;
  }

  // Merge the simdgroups, some rows at a time: every thread takes some elements of them.
  const int thread_index = int(simdgroup) * LANES + int(lane);
  const int num_rows = min(ROWS, p.group * p.num_tokens - first_row);
  for (int tile = 0; tile < ROWS; tile += MERGED) {
    if (tile > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int i = 0; i < MERGED; i++) {
      const int r = tile + i;
      threadgroup float* own_out = shared_out + (int(simdgroup) * MERGED + i) * DV;
      for (int c = 0; c < V_VECTORS; c++) {
        const int vector = team_lane + c * TEAM;
        for (int j = 0; team == 0 && vector < DV / VECTOR && j < VECTOR; j++) {
          own_out[vector * VECTOR + j] = running_out[r][c][j];
        }
      }
      if (lane == 0) {
        shared_max[int(simdgroup) * ROWS + r] = running_max[r];
        shared_sum[int(simdgroup) * ROWS + r] = running_sum[r];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int stop = min(MERGED, num_rows - tile);
    for (int element = thread_index; element < stop * DV; element += THREADS) {
      const int i = element / DV;
      const int r = tile + i;
      const int d = element % DV;
      const int row = first_row + r;
      const int head = head_slot * p.group + row % p.group;
      const float sink = HAS_SINKS && WHOLE ? in_log2(sinks[head]) : LOWEST;
      float total_max = max(LOWEST, sink);
      for (int s = 0; s < SIMDGROUPS; s++) {
        total_max = max(total_max, shared_max[s * ROWS + r]);
      }
      float sum = 0.0f;
      float weighted = 0.0f;
      for (int s = 0; s < SIMDGROUPS; s++) {
        const float scale = rescale(shared_max[s * ROWS + r], total_max);
        sum += shared_sum[s * ROWS + r] * scale;
        weighted += shared_out[(s * MERGED + i) * DV + d] * scale;
      }
      const int token = row / p.group;
      if (SPLIT) {
        const long out_row = (long(sequence) * p.num_heads + head) * p.num_tokens + token;
        const long partial = out_row * p.num_splits + split;
        partial_out[partial * DV + d] = weighted;
        if (d == 0) {
          partial_sums[2 * partial] = total_max;
          partial_sums[2 * partial + 1] = sum;
        }
      } else {
        const float total = HAS_SINKS ? sum + weight_of(sink, total_max) : sum;
        const long out_row = sequence * p.out_strides[0] + head * p.out_strides[1] +
            token * p.out_strides[2];
        out[out_row + d] = Q(sum != 0.0f ? weighted / total : 0.0f);
      }
    }
  }
  if (!RETURN_ATTN) {
    return;
  }

  // Now the denominators are known. Compute the weights of all keys.
  for (int base = int(simdgroup) * TEAMS; base < max_keys; base += SIMDGROUPS * TEAMS) {
    const int key = base + team;
    const Slot slot = locate(key, end, table, p);
    float4 k[K_VECTORS];
    load_row<T, D, TEAM>(k_head, slot, p.k_strides[1], p.k_strides[2], team_lane, k);
    for (int r = 0; r < ROWS; r++) {
      float partial = 0.0f;
      for (int c = 0; c < K_VECTORS; c++) {
        partial += dot(queries[r][c], k[c]);
      }
      const float score = finish_score(
          team_sum<TEAM>(partial), rows[r], key, slot.is_valid, bool_mask, float_mask,
          alibi_slopes, p);
      if (team_lane == 0 && r < num_rows && key < max_keys) {
        const float sink = HAS_SINKS ? in_log2(sinks[rows[r].head]) : LOWEST;
        float total_max = max(LOWEST, sink);
        for (int s = 0; s < SIMDGROUPS; s++) {
          total_max = max(total_max, shared_max[s * ROWS + r]);
        }
        float sum = HAS_SINKS ? weight_of(sink, total_max) : 0.0f;
        for (int s = 0; s < SIMDGROUPS; s++) {
          sum += shared_sum[s * ROWS + r] * rescale(shared_max[s * ROWS + r], total_max);
        }
        const long attn_row =
            (long(sequence) * p.num_heads + rows[r].head) * p.num_tokens + rows[r].token;
        const float weight = weight_of(score, total_max) / sum;
        attn[attn_row * max_keys + key] = score != -INFINITY ? weight : 0.0f;
      }
    }
  }
}

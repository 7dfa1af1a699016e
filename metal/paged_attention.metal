// Attention of few query rows over a long paged context (decode).
//
// One threadgroup computes ROWS query rows that share a KV head, over one split of the context. It
// uses every loaded key and value for all these rows. A simdgroup takes up to 32 keys at a time, a
// tile. If there are few keys, tiles are shorter, so that every simdgroup has some:
// - Each lane finds the place of one key.
// - Scores: some lanes share a key. They exchange sums until each lane has the scores of one key.
// - Softmax: each lane has one key. The weights go through threadgroup memory.
// - Output: the lanes share the columns of the values.
// At the end the simdgroups are merged; a second kernel merges the splits.

constant constexpr int SHORTEST_TILE = 8;

// Keys of a tile, a power of two: as few as give each simdgroup one, but no fewer than it multiplies
// at once.
inline int tile_keys(int num_keys, int simdgroups, int at_once) {
  int keys = max(SHORTEST_TILE, at_once);
  while (keys < LANES && keys * simdgroups < num_keys) {
    keys *= 2;
  }
  if (RETURN_ATTN) {
    keys = LANES;
  }
  return keys;
}

// Grid: (KV heads * row tiles, sequences, splits) threadgroups of THREADS. With a mapping, query
// heads replace the KV heads.
template <typename K, typename V, typename Q, int D, int DV, int ROWS, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * LANES)]] void paged_attention(
    const device Q* q [[buffer(0)]],
    const device K* k_cache [[buffer(1)]],
    const device V* v_cache [[buffer(2)]],
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
    const device half* k_scales [[buffer(17), function_constant(HAS_SCALES)]],
    const device half* v_scales [[buffer(18), function_constant(HAS_SCALES)]],
    const device int* prefixes [[buffer(19), function_constant(HAS_PREFIXES)]],
    uint3 group_position [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int THREADS = SIMDGROUPS * LANES;
  constexpr int K_LANES = key_lanes(D / VECTOR, ROWS);
  constexpr int V_LANES = value_lanes(DV / VECTOR);
  constexpr int K_VECTORS = (D / VECTOR + K_LANES - 1) / K_LANES;  // of a key that a lane holds
  constexpr int V_VECTORS = (DV / VECTOR + V_LANES - 1) / V_LANES;
  constexpr int OUT_VECTORS = DV / VECTOR;
  // Vectors that a simdgroup has to itself: at most 2 KiB, or 2.25 for values of more than 512
  // elements.
  constexpr int SHARED = ROWS * OUT_VECTORS > LANES ? ROWS * OUT_VECTORS : LANES;
  constexpr int K_STRIDE = K_LANES * K_VECTORS;
  constexpr int RUN = run_of_keys<K, K_VECTORS, ROWS, K_LANES>();
  threadgroup vec<Q, VECTOR> queries[ROWS * K_STRIDE];
  threadgroup float4 shared[SIMDGROUPS * SHARED];  // weights, later outputs
  constexpr int GROUPS = scale_groups(DV, is_pair<V>());
  threadgroup vec<half, 2> shared_scales[is_pair<V>() ? THREADS * GROUPS : 1];
  threadgroup float shared_max[SIMDGROUPS * ROWS];
  threadgroup float shared_sum[SIMDGROUPS * ROWS];

  const int head_slot = int(group_position.x) / p.row_tiles;
  const int first_row = int(group_position.x) % p.row_tiles * ROWS;
  const int num_rows = min(ROWS, p.group * p.num_tokens - first_row);
  const int sequence = int(group_position.y);
  const int split = int(group_position.z);
  const int thread_index = int(simdgroup) * LANES + int(lane);

  const int kv_head = HAS_MAPPING ? int(kv_head_mapping[head_slot]) : head_slot;
  const bool has_keys = kv_head >= 0 && kv_head < p.num_kv_heads;
  const int max_keys = p.max_blocks * BLOCK_SIZE;
  const int context = clamp(context_lens[sequence * p.context_stride], 0, max_keys);
  int split_begin = split * p.keys_per_split;
  if (SPLIT && HAS_WINDOW) {
    split_begin += first_split_key(context, p.num_tokens, p.window);
  }
  int slot_of_split = split;
  if (HAS_PREFIXES && split_begin < context) {
    const int own = first_own_key(sequence, p.keys_per_shared_split, int(lane), prefixes,
                                  context_lens, p.context_stride, p.num_sequences, max_keys);
    split_begin += own;
    slot_of_split += (own + p.keys_per_shared_split - 1) / p.keys_per_shared_split;
  }
  if (SPLIT && split_begin >= context) {
    return;  // The merge does not read what this split would store.
  }
  const device int* table = block_tables + sequence * p.tables_strides[0];
  const device K* k_head = k_cache + kv_head * p.k_strides[0];
  const device V* v_head = v_cache + kv_head * p.v_strides[0];

  // The keys that any row sees, and those that all rows see.
  QueryRow rows[ROWS];
  int begin = max_keys;
  int end = 0;
  int all_begin = 0;
  int all_end = max_keys;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    rows[r] = query_row(first_row + r, head_slot, context, p);
    // A row that sees no key does not lower `begin`, unless no row sees a key.
    begin = min(begin, rows[r].first);
    end = max(end, rows[r].stop);
    all_begin = max(all_begin, rows[r].first);
    all_end = r < num_rows ? min(all_end, rows[r].stop) : all_end;
  }
  begin = max(begin, split_begin);
  end = min(end, split_begin + p.keys_per_split);
  if (SPLIT && begin >= end) {
    return;  // The merge does not read what this split would store.
  }
  end = has_keys ? end : 0;

  // The first entry of the table is asked for before the queries.
  const int first_key = begin / LANES * LANES;
  const int own_key = key_of_lane<K_LANES, RUN>(int(lane));
  const int tile = tile_keys(end - first_key, SIMDGROUPS, RUN * LANES / K_LANES);
  const int own_base = first_key + int(simdgroup) * tile;
  int next_block = block_of(own_base + own_key, begin, min(end, own_base + tile), table, p);

  for (int i = thread_index; i < ROWS * K_STRIDE; i += THREADS) {
    const int vector = i % K_STRIDE;
    const QueryRow row = query_row(first_row + i / K_STRIDE, head_slot, context, p);
    vec<Q, VECTOR> elements = vec<Q, VECTOR>(Q(0.0f));
    if (row.stop > 0 && vector < D / VECTOR) {
      const device Q* from = q + sequence * p.q_strides[0] + row.head * p.q_strides[1] +
          row.token * p.q_strides[2];
      elements = gather_vector(from + vector * VECTOR, 1, WHOLE_QUERIES);
      if (HAS_ROPE) {
        const device float* angles =
            rope_freqs + sequence * p.rope_strides[0] + row.token * p.rope_strides[1];
        UNROLL
        for (int j = 0; j < VECTOR; j++) {
          elements[j] = Q(rotated_element(from, angles, vector * VECTOR + j, p));
        }
      }
    }
    queries[i] = elements;
  }
  // The running maxima stay in threadgroup memory: registers are short while products are computed.
  threadgroup float* running_max = shared_max + int(simdgroup) * ROWS;
  if (int(lane) < ROWS) {
    running_max[lane] = LOWEST;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float running_sum[ROWS] = {0.0f};  // of the keys of this lane
  float4 running_out[ROWS][V_VECTORS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int c = 0; c < V_VECTORS; c++) {
      running_out[r][c] = float4(0.0f);
    }
  }

  threadgroup float4* weights = shared + int(simdgroup) * SHARED;
  threadgroup vec<half, 2>* scales =
      shared_scales + (is_pair<V>() ? int(simdgroup) * LANES * GROUPS : 0);
  for (int base = own_base; base < end; base += SIMDGROUPS * tile) {
    const int key = base + own_key;
    const int count = min(tile, end - base);
    const int block = next_block;
    const int next_base = base + SIMDGROUPS * tile;
    next_block = block_of(next_base + own_key, begin, min(end, next_base + tile), table, p);
    const bool is_valid = block >= 0 && block < p.num_blocks;
    const int slot = key % BLOCK_SIZE;
    float k_scale = 1.0f;
    vec<half, 2> own_scales[GROUPS];
    if (HAS_SCALES) {
      const int place = is_valid ? block * BLOCK_SIZE + slot : -1;
      const vec<half, 2> of_key = read_scales<K>(k_scales + kv_head * p.k_scales_strides[0], place,
                                                 0, p.k_scales_strides[1], p.k_scales_strides[2]);
      k_scale = float(of_key[0]);
      const device half* head = v_scales + kv_head * p.v_scales_strides[0];
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        own_scales[g] =
            read_scales<V>(head, place, g, p.v_scales_strides[1], p.v_scales_strides[2]);
      }
    }
    const bool is_full = simd_all(is_valid && key >= all_begin && key < all_end) &&
        !HAS_BOOL_MASK && !HAS_FLOAT_MASK;

    // Keys that nobody sees get the place of the first that is seen: their scores and values are
    // dropped. In a whole tile without ends it begins a run of keys of its block.
    const bool has_all = tile == LANES && base >= begin && base + LANES <= end;
    const uint number = uint(block) * uint(BLOCK_SIZE) + uint(slot);
    const uint seen = simd_min(is_valid ? number : uint(NOWHERE));
    const int own_block = is_valid ? block : int(seen / uint(BLOCK_SIZE));
    const int own_slot = is_valid ? slot : int(seen % uint(BLOCK_SIZE));
    const uint k_offset = slot_offset<K>(own_block, own_slot, p.k_strides[1], p.k_strides[2]);
    const uint v_offset = slot_offset<V>(own_block, own_slot, p.v_strides[1], p.v_strides[2]);
    const uint k_stride = has_all ? slot_offset<K>(0, 1, 0, p.k_strides[2]) : 0;
    const uint v_stride = has_all ? slot_offset<V>(0, 1, 0, p.v_strides[2]) : 0;
    float scores[ROWS] = {0.0f};
    if (seen != NOWHERE) {
      multiply_keys<D, K_LANES, K_VECTORS>(k_head, k_offset, k_stride, count, int(lane), queries,
                                           scores);
    }

    const float v_scale = HAS_SCALES && !is_pair<V>() ? float(own_scales[0][0]) : 1.0f;
    float4 own_weights = float4(0.0f);
    float new_max[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      // In units of log2; -inf if the row does not see the key. If a row sees only keys with the
      // lowest scores, these share the weights.
      float score = scores[r] * p.scale;
      if (HAS_SCALES) {
        score *= k_scale;
      }
      if (HAS_SOFTCAP) {
        score = p.softcap * precise::tanh(score / p.softcap);
      }
      bool is_seen = is_valid && key >= rows[r].first && key < rows[r].stop;
      if (HAS_ALIBI && is_seen) {
        score += alibi_slopes[rows[r].head] * float(key - rows[r].position);
      }
      long mask_place = 0;
      if (HAS_BOOL_MASK || HAS_FLOAT_MASK) {
        mask_place = sequence * p.mask_strides[0] + rows[r].head * p.mask_strides[1] +
            rows[r].token * p.mask_strides[2] + key * p.mask_strides[3];
      }
      if (HAS_FLOAT_MASK && is_seen) {
        const float bias = float_mask[mask_place];
        is_seen = bias != -INFINITY;
        score = in_log2(score + bias);
      } else {
        score *= LOG2E;
      }
      if (HAS_BOOL_MASK && is_seen) {
        is_seen = bool_mask[mask_place];
      }
      score = is_full || is_seen ? score : -INFINITY;
      if (RETURN_ATTN && r < num_rows && key < max_keys) {
        const long attn_row =
            (long(sequence) * p.num_heads + rows[r].head) * p.num_tokens + rows[r].token;
        attn[attn_row * max_keys + key] = score;
      }

      const float bounded = score < INFINITY ? max(score, LOWEST) : LOWEST;
      new_max[r] = max(running_max[r], simd_max(bounded));
      const float old_scale = rescale(running_max[r], new_max[r]);
      const float weight = score != -INFINITY ? weight_of(score, new_max[r]) : 0.0f;
      running_sum[r] = running_sum[r] * old_scale + weight;
      own_weights[r] = is_full || is_seen ? (HAS_SCALES ? weight * v_scale : weight) : -1.0f;
      UNROLL
      for (int c = 0; c < V_VECTORS; c++) {
        running_out[r][c] *= old_scale;
      }
    }

    weights[own_key] = own_weights;
    if (is_pair<V>()) {
      UNROLL
      for (int g = 0; g < GROUPS; g++) {
        scales[own_key * GROUPS + g] = own_scales[g];
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (lane == 0) {
        running_max[r] = new_max[r];
      }
    }
    if (is_full) {
      add_values<true, DV, V_LANES, K_LANES, RUN>(v_head, v_offset, v_stride, LANES, int(lane),
                                                  weights, scales, running_out);
    } else if (seen != NOWHERE) {
      add_values<false, DV, V_LANES, K_LANES, RUN>(v_head, v_offset, v_stride, count, int(lane),
                                                   weights, scales, running_out);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Merge the lanes.
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    running_sum[r] = simd_sum(running_sum[r]);
    if (lane == 0) {
      shared_sum[int(simdgroup) * ROWS + r] = running_sum[r];
    }
    UNROLL
    for (int c = 0; c < V_VECTORS; c++) {
      UNROLL
      for (int i = 0; i < VECTOR; i++) {
        UNROLL
        for (int step = V_LANES; step < LANES; step *= 2) {
          running_out[r][c][i] += simd_shuffle_xor(running_out[r][c][i], ushort(step));
        }
      }
      const int vector = own_vector<V_LANES, V_VECTORS>(int(lane), c);
      if (int(lane) < V_LANES && vector < OUT_VECTORS) {
        weights[r * OUT_VECTORS + vector] = running_out[r][c];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Merge the simdgroups: every thread takes some vectors of the rows.
  for (int item = thread_index; item < num_rows * OUT_VECTORS; item += THREADS) {
    const int r = item / OUT_VECTORS;
    const int vector = item % OUT_VECTORS;
    const int row = first_row + r;
    const int head = head_slot * p.group + row % p.group;
    const float sink = HAS_SINKS && WHOLE ? in_log2(sinks[head]) : LOWEST;
    float total_max = precise::max(LOWEST, sink);
    for (int s = 0; s < SIMDGROUPS; s++) {
      total_max = max(total_max, shared_max[s * ROWS + r]);
    }
    float sum = 0.0f;
    float4 weighted = float4(0.0f);
    for (int s = 0; s < SIMDGROUPS; s++) {
      const float scale = rescale(shared_max[s * ROWS + r], total_max);
      sum += shared_sum[s * ROWS + r] * scale;
      weighted += shared[s * SHARED + item] * scale;
    }
    const int token = row / p.group;
    if (SPLIT) {
      const long out_row = (long(sequence) * p.num_heads + head) * p.num_tokens + token;
      const long partial = out_row * p.num_splits + slot_of_split;
      write_vector(partial_out + partial * DV + vector * VECTOR, weighted);
      if (vector == 0) {
        partial_sums[2 * partial] = total_max;
        partial_sums[2 * partial + 1] = sum;
      }
    } else {
      const float total = HAS_SINKS ? sum + weight_of(sink, total_max) : sum;
      device Q* out_row = out + sequence * p.out_strides[0] + head * p.out_strides[1] +
          token * p.out_strides[2];
      for (int j = 0; j < VECTOR; j++) {
        out_row[vector * VECTOR + j] = Q(sum != 0.0f ? weighted[j] / total : 0.0f);
      }
    }
  }
  if (!RETURN_ATTN) {
    return;
  }

  // Now the denominators are known. Each thread turns the scores that it stored into weights, and
  // stores zeros for keys that no row sees.
  for (int r = 0; r < num_rows; r++) {
    const int row = first_row + r;
    const int head = head_slot * p.group + row % p.group;
    const float sink = HAS_SINKS ? in_log2(sinks[head]) : LOWEST;
    float total_max = precise::max(LOWEST, sink);
    for (int s = 0; s < SIMDGROUPS; s++) {
      total_max = max(total_max, shared_max[s * ROWS + r]);
    }
    float sum = HAS_SINKS ? weight_of(sink, total_max) : 0.0f;
    for (int s = 0; s < SIMDGROUPS; s++) {
      sum += shared_sum[s * ROWS + r] * rescale(shared_max[s * ROWS + r], total_max);
    }
    const long attn_row =
        (long(sequence) * p.num_heads + head) * p.num_tokens + row / p.group;
    device float* own_attn = attn + attn_row * max_keys;
    const int first_own = first_key % THREADS - THREADS + int(simdgroup) * LANES + own_key;
    for (int key = first_own; key < max_keys; key += THREADS) {
      const bool is_stored = key >= first_key && key < end;
      if (key >= 0) {
        const float score = is_stored ? own_attn[key] : -INFINITY;
        own_attn[key] = score != -INFINITY ? weight_of(score, total_max) / sum : 0.0f;
      }
    }
  }
}

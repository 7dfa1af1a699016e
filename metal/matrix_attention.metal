// Attention of many query rows over a paged context, by products of 8 x 8 matrices: chunks of
// prompts, drafts, and single tokens with many heads to a KV head.
//
// One threadgroup computes ROWS query rows of one sequence that share a KV head, over one split of
// the context. It takes some keys at a time, in four phases with a barrier after each. What a phase
// stores to threadgroup memory was asked for in the phase before:
// 1. All threads store the keys.
// 2. The simdgroups divide the scores among them. All threads ask for the values.
// 3. Each row has a team of threads, which turns its scores into weights. All threads store the
//    values.
// 4. Each simdgroup adds the weighted values to its columns of the output, for all rows. All
//    threads ask for the next keys.

constant constexpr int SCORE_PAD = 4;   // floats after a row of scores
constant constexpr int MOST_KEPT = 16;  // matrices of queries that a simdgroup keeps in registers

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Keys of a step: wide rows take more threadgroup memory, and many of them more registers.
constexpr int step_keys(int head_dim, int value_dim, int rows) {
  return larger(head_dim, value_dim) > (rows > 16 ? 64 : 128) ? 16 : 32;
}

// The score of a key in units of log2.
inline float score_in_log2(float qk, constant AttentionParams& p) {
  return HAS_SOFTCAP ? p.softcap * precise::tanh(qk * p.scale / p.softcap) * LOG2E
                     : qk * (p.scale * LOG2E);
}

// Maximum and sum over the threads of a row, which are neighbouring lanes.
template <int TEAM>
inline float team_max(float value) {
  for (ushort step = TEAM / 2; step > 0; step /= 2) {
    value = precise::max(value, simd_shuffle_xor(value, step));
  }
  return value;
}

template <int TEAM>
inline float team_sum(float value) {
  for (ushort step = TEAM / 2; step > 0; step /= 2) {
    value += simd_shuffle_xor(value, step);
  }
  return value;
}

// Grid: (KV heads * row tiles, sequences, splits) threadgroups of THREADS. In a ragged batch the row
// tiles are those of all sequences and of the tokens after the last one.
template <typename K, typename V, typename T, int D, int DV, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void matrix_attention(
    const device T* q [[buffer(0)]],
    const device K* k_cache [[buffer(1)]],
    const device V* v_cache [[buffer(2)]],
    const device int* block_tables [[buffer(3)]],
    const device int* context_lens [[buffer(4)]],
    constant AttentionParams& p [[buffer(5)]],
    device T* out [[buffer(6), function_constant(WHOLE)]],
    device float* partial_out [[buffer(7), function_constant(SPLIT)]],
    device float* partial_sums [[buffer(8), function_constant(SPLIT)]],
    const device float* sinks [[buffer(13), function_constant(HAS_SINKS)]],
    const device int* cu_seqlens [[buffer(16), function_constant(HAS_SEQLENS)]],
    const device half* k_scales [[buffer(17), function_constant(HAS_SCALES)]],
    const device half* v_scales [[buffer(18), function_constant(HAS_SCALES)]],
    const device int* prefixes [[buffer(19), function_constant(HAS_PREFIXES)]],
    uint3 group_position [[threadgroup_position_in_grid]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]]) {
  constexpr int KEYS = step_keys(D, DV, ROWS);
  constexpr int TEAM = THREADS / ROWS;  // threads of a row
  constexpr int TEAM_KEYS = KEYS / TEAM;
  // Threadgroup memory: elements from one row to the next.
  constexpr int K_STRIDE = padded(D);
  constexpr int V_STRIDE = padded(DV);
  constexpr int S_STRIDE = KEYS + SCORE_PAD;
  // Simdgroups divide the scores by rows, by keys and, if these are few, by dimensions.
  constexpr int ROW_MATRICES = ROWS / EDGE;
  constexpr int KEY_MATRICES = KEYS / EDGE;
  constexpr int KEY_PARTS = ROW_MATRICES > 2 ? KEY_MATRICES / 2 : smaller(KEY_MATRICES, SIMDGROUPS);
  constexpr int ROW_PARTS = smaller(ROW_MATRICES, SIMDGROUPS / KEY_PARTS);
  constexpr int DIM_PARTS = SIMDGROUPS / KEY_PARTS / ROW_PARTS;
  constexpr int OWN_ROWS = ROW_MATRICES / ROW_PARTS;
  constexpr int OWN_KEYS = KEY_MATRICES / KEY_PARTS;
  constexpr int OWN_DIMS = (D / EDGE + DIM_PARTS - 1) / DIM_PARTS;
  constexpr int OWN_COLUMNS = (DV / EDGE + SIMDGROUPS - 1) / SIMDGROUPS;  // of the output
  // If they are few, each simdgroup keeps its matrices of queries. Else they stay where they are.
  constexpr bool KEEPS = OWN_ROWS * OWN_DIMS <= MOST_KEPT;
  constexpr int QUERY_VECTORS = ROWS * K_STRIDE / VECTOR;
  constexpr int ROW_VECTORS = KEYS * larger(K_STRIDE, V_STRIDE) / VECTOR;
  constexpr int FIRST_ROW = KEEPS ? 0 : QUERY_VECTORS;
  threadgroup vec<T, VECTOR> staged[larger(QUERY_VECTORS, FIRST_ROW + ROW_VECTORS)];
  threadgroup float scores[DIM_PARTS * ROWS * S_STRIDE];  // then weights
  threadgroup float factors[ROWS];
  threadgroup uint k_places[2 * KEYS];  // of these keys and the next
  threadgroup uint v_places[2 * KEYS];
  constexpr bool IS_QUANTIZED = metal::is_same_v<K, char> || is_six<K>();
  constexpr int GROUPS = scale_groups(DV, is_pair<V>());
  threadgroup int numbers[2 * KEYS];  // their slots
  threadgroup float of_keys[IS_QUANTIZED ? KEYS : 1];  // scales
  threadgroup vec<half, 2> of_values[IS_QUANTIZED ? KEYS * GROUPS : 1];
  threadgroup int are_spoiled[SIMDGROUPS];  // values of a simdgroup's threads
  threadgroup uint marks[ROWS * mark_words(DV)];

  const int simdgroup = int(simdgroup_index);
  const int lane = int(lane_index);
  const int thread_index = simdgroup * LANES + lane;
  const int head_slot = int(group_position.x) / p.row_tiles;
  const int tile_index = int(group_position.x) % p.row_tiles;
  const int split = int(group_position.z);
  RowTile tile;
  if (HAS_SEQLENS) {
    tile = ragged_tile<ROWS>(tile_index, cu_seqlens, p);
  } else if (SHARES) {
    tile = shared_tile<ROWS>(int(group_position.y), split, lane, prefixes, context_lens, p);
  } else {
    tile.sequence = int(group_position.y);
    tile.first_token = 0;
    tile.num_tokens = p.num_tokens;
    tile.first_row = tile_index * ROWS;
  }
  const int num_rows = min(ROWS, tile.num_tokens * p.group - tile.first_row);
  if ((HAS_SEQLENS || SHARES) && num_rows <= 0) {
    return;
  }
  const bool has_keys = !HAS_SEQLENS || tile.sequence < p.num_sequences;
  const int length = has_keys ? context_lens[tile.sequence * p.context_stride] : 0;
  const int context = clamp(length, 0, p.max_blocks * BLOCK_SIZE);
  const KeyRange of_first = keys_of_row(tile, tile.first_row, context, p);
  const KeyRange of_last = keys_of_row(tile, tile.first_row + num_rows - 1, context, p);
  int split_begin = split * p.keys_per_split;
  if (SPLIT && HAS_WINDOW) {
    split_begin += first_split_key(context, tile.num_tokens, p.window);
  }
  int slot = split;
  if (HAS_PREFIXES && !SHARES && split_begin < context) {
    const int own =
        first_own_key(tile.sequence, p.keys_per_shared_split, lane, prefixes, context_lens,
                      p.context_stride, p.num_sequences, p.max_blocks * BLOCK_SIZE);
    split_begin += own;
    slot += (own + p.keys_per_shared_split - 1) / p.keys_per_shared_split;
  }
  const int begin = max(of_first.first, split_begin);
  const int end = min(of_last.stop, split_begin + p.keys_per_split);
  if (SPLIT && begin >= end) {
    return;  // The merge does not read what this split would store.
  }
  const device int* table = block_tables + tile.sequence * p.tables_strides[0];
  const device K* k_head = k_cache + head_slot * p.k_strides[0];
  const device V* v_head = v_cache + head_slot * p.v_strides[0];

  // This thread's row of scores.
  const int team_row = thread_index / TEAM;
  const int team_lane = thread_index % TEAM;
  const KeyRange seen = keys_of_row(tile, tile.first_row + team_row, context, p);
  float running_max = LOWEST;
  float running_sum = 0.0f;  // over the scores of this thread

  // This simdgroup's part of the scores, and the place of this lane's two elements in a matrix.
  const int key_part = simdgroup % KEY_PARTS;
  const int row_part = simdgroup / KEY_PARTS % ROW_PARTS;
  const int dim_part = simdgroup / (KEY_PARTS * ROW_PARTS);
  const int matrix_row = (lane / 4 & 4) + lane / 2 % 4;
  const int matrix_column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  threadgroup vec<T, VECTOR>* rows = staged + FIRST_ROW;
  const threadgroup T* query_part = reinterpret_cast<const threadgroup T*>(staged) +
      row_part * OWN_ROWS * EDGE * K_STRIDE;
  threadgroup T* value_rows = reinterpret_cast<threadgroup T*>(rows);
  const threadgroup T* key_rows = value_rows + key_part * OWN_KEYS * EDGE * K_STRIDE;
  const int value_stride = VALUES_IN_KEYS ? K_STRIDE : V_STRIDE;
  threadgroup float* score_part = scores +
      (dim_part * ROWS + row_part * OWN_ROWS * EDGE) * S_STRIDE + key_part * OWN_KEYS * EDGE;
  simdgroup_matrix<float, 8, 8> outputs[ROW_MATRICES * OWN_COLUMNS];
  UNROLL
  for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
    outputs[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }

  // Asked for in this order: entries of the table, queries, the first keys.
  const int first_key = begin + thread_index;
  const int first_block = thread_index < KEYS ? block_of(first_key, begin, end, table, p) : -1;
  stage_queries<T, D, ROWS>(q, tile, head_slot, thread_index, prefixes, staged, p);
  if (thread_index < KEYS) {
    note_place<K, V>(first_block, first_key, thread_index, k_places, v_places, numbers, p);
  }
  for (int i = thread_index; i < ROWS * mark_words(DV); i += THREADS) {
    marks[i] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  typename Held<K>::type keys_ahead[own_vectors(KEYS, D)];
  load_rows<D, KEYS>(k_head, k_places, thread_index, keys_ahead);
  simdgroup_matrix<T, 8, 8> queries[KEEPS ? OWN_ROWS * OWN_DIMS : OWN_ROWS];
  if (KEEPS) {
    UNROLL
    for (int i = 0; i < OWN_ROWS * OWN_DIMS; i++) {
      const int d = (i % OWN_DIMS * DIM_PARTS + dim_part) * EDGE;
      if (D % (DIM_PARTS * EDGE) == 0 || d < D) {
        simdgroup_load(queries[i], query_part + i / OWN_DIMS * EDGE * K_STRIDE + d, K_STRIDE);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  half k_scale_ahead = half(0.0f);
  vec<half, 2> v_scales_ahead[(KEYS * GROUPS + THREADS - 1) / THREADS];
  if (HAS_SCALES) {
    load_scales<K, V, KEYS, GROUPS>(k_scales, v_scales, numbers, head_slot, thread_index,
                                    k_scale_ahead, v_scales_ahead, p);
  }
  int half_of_places = 0;
  for (int base = begin; base < end; base += KEYS) {
    const bool all_seen =
        SHARES || (base >= of_last.first && min(base + KEYS, end) <= of_first.stop);
    const threadgroup uint* places = k_places + half_of_places;
    const int next_half = KEYS - half_of_places;

    // 1. Store the keys and all scales.
    vec<T, VECTOR> keys_stored[own_vectors(KEYS, D)];
    convert_rows<D, KEYS, K>(keys_ahead, of_values, thread_index, keys_stored);
    store_rows<D, KEYS>(keys_stored, thread_index, rows);
    if (VALUES_IN_KEYS && !all_seen) {
      note_spoiled(keys_stored, simdgroup, lane, are_spoiled);
    }
    if (HAS_SCALES) {
      store_scales<KEYS, GROUPS>(k_scale_ahead, v_scales_ahead, thread_index, of_keys, of_values);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 2. Compute this simdgroup's scores.
    typename Held<V>::type values_ahead[own_vectors(KEYS, DV)];
    if (!VALUES_IN_KEYS) {
      load_rows<DV, KEYS>(v_head, v_places + half_of_places, thread_index, values_ahead);
    }
    const int next_key = base + KEYS + thread_index;
    const int next_block = thread_index < KEYS ? block_of(next_key, begin, end, table, p) : -1;
    simdgroup_matrix<float, 8, 8> products[OWN_ROWS * OWN_KEYS];
    UNROLL
    for (int i = 0; i < OWN_ROWS * OWN_KEYS; i++) {
      products[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    UNROLL
    for (int step = 0; step < OWN_DIMS; step++) {
      const int d = (step * DIM_PARTS + dim_part) * EDGE;
      if (D % (DIM_PARTS * EDGE) == 0 || d < D) {
        simdgroup_matrix<T, 8, 8> keys[OWN_KEYS];
        simdgroup_barrier(mem_flags::mem_none);
        UNROLL
        for (int k = 0; k < OWN_KEYS; k++) {
          simdgroup_load(keys[k], key_rows + k * EDGE * K_STRIDE + d, K_STRIDE, ulong2(0, 0), true);
        }
        UNROLL
        for (int r = 0; r < (KEEPS ? 0 : OWN_ROWS); r++) {
          simdgroup_load(queries[r], query_part + r * EDGE * K_STRIDE + d, K_STRIDE);
        }
        simdgroup_barrier(mem_flags::mem_none);
        UNROLL
        for (int i = 0; i < OWN_ROWS * OWN_KEYS; i++) {
          const int r = i / OWN_KEYS;
          simdgroup_multiply_accumulate(products[i], queries[KEEPS ? r * OWN_DIMS + step : r],
                                        keys[i % OWN_KEYS], products[i]);
        }
      }
    }
    UNROLL
    for (int i = 0; i < OWN_ROWS * OWN_KEYS; i++) {
      const int row = i / OWN_KEYS * EDGE;
      simdgroup_store(products[i], score_part + row * S_STRIDE + i % OWN_KEYS * EDGE, S_STRIDE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 3. Store the values, and turn this thread's scores into weights.
    if (!VALUES_IN_KEYS) {
      vec<T, VECTOR> values_stored[own_vectors(KEYS, DV)];
      convert_rows<DV, KEYS, V>(values_ahead, of_values, thread_index, values_stored);
      store_rows<DV, KEYS>(values_stored, thread_index, rows);
      if (!all_seen) {
        note_spoiled(values_stored, simdgroup, lane, are_spoiled);
      }
    }
    if (thread_index < KEYS) {
      note_place<K, V>(next_block, next_key, next_half + thread_index, k_places, v_places, numbers,
                       p);
    }
    float own[TEAM_KEYS];
    float new_max = running_max;
    UNROLL
    for (int i = 0; i < TEAM_KEYS; i++) {
      const int key = i * TEAM + team_lane;
      float qk = 0.0f;
      for (int part = 0; part < DIM_PARTS; part++) {
        qk += scores[(part * ROWS + team_row) * S_STRIDE + key];
      }
      if (HAS_SCALES) {
        qk *= of_keys[key];
      }
      own[i] = is_attended(places[key], base + key, seen) ? score_in_log2(qk, p) : -INFINITY;
      new_max = precise::max(new_max, own[i]);
    }
    new_max = team_max<TEAM>(new_max);
    const float factor = rescale(running_max, new_max);
    running_max = new_max;
    running_sum *= factor;
    UNROLL
    for (int i = 0; i < TEAM_KEYS; i++) {
      const float weight = own[i] != -INFINITY ? weight_of(own[i], new_max) : 0.0f;
      running_sum += weight;
      const int key = i * TEAM + team_lane;
      const bool is_scaled = HAS_SCALES && !is_pair<V>() && own[i] != -INFINITY;
      scores[team_row * S_STRIDE + key] = is_scaled ? weight * float(of_values[key][0]) : weight;
    }
    if (team_lane == 0) {
      factors[team_row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 4. Add the weighted values.
    load_rows<D, KEYS>(k_head, k_places + next_half, thread_index, keys_ahead);
    if (HAS_SCALES) {
      load_scales<K, V, KEYS, GROUPS>(k_scales, v_scales, numbers + next_half, head_slot,
                                      thread_index, k_scale_ahead, v_scales_ahead, p);
    }
    UNROLL
    for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
      const float old_factor = factors[i / OWN_COLUMNS * EDGE + matrix_row];
      outputs[i].thread_elements()[0] *= old_factor;
      outputs[i].thread_elements()[1] *= old_factor;
    }
    const bool is_spoiled = !all_seen &&
        (are_spoiled[0] | are_spoiled[1] | are_spoiled[2] | are_spoiled[3]) != 0;
    if (is_spoiled) {
      // Products of matrices would show it to rows that do not see it, too.
      mark_outputs<DV, KEYS, TEAM>(value_rows, value_stride, scores + team_row * S_STRIDE, places,
                                   base, seen, team_lane, marks + team_row * mark_words(DV));
      threadgroup_barrier(mem_flags::mem_threadgroup);
      clear_spoiled<DV, KEYS>(value_rows, value_stride, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int k = 0; k < KEYS; k += EDGE) {
      simdgroup_matrix<float, 8, 8> weights[ROW_MATRICES];
      UNROLL
      for (int r = 0; r < ROW_MATRICES; r++) {
        simdgroup_load(weights[r], scores + r * EDGE * S_STRIDE + k, S_STRIDE);
      }
      UNROLL
      for (int c = 0; c < OWN_COLUMNS; c++) {
        const int column = (c * SIMDGROUPS + simdgroup) * EDGE;
        if (DV % (SIMDGROUPS * EDGE) == 0 || column < DV) {
          simdgroup_matrix<T, 8, 8> value;
          if (D >= 128) {
            simdgroup_barrier(mem_flags::mem_none);
          }
          simdgroup_load(value, value_rows + k * value_stride + column, value_stride);
          UNROLL
          for (int r = 0; r < ROW_MATRICES; r++) {
            const int i = r * OWN_COLUMNS + c;
            simdgroup_multiply_accumulate(outputs[i], weights[r], value, outputs[i]);
          }
        }
      }
    }
    half_of_places = next_half;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // The denominators are known now.
  const float sum = team_sum<TEAM>(running_sum);
  if (team_lane == 0 && team_row < num_rows) {
    const int row = tile.first_row + team_row;
    if (SPLIT) {
      const long partial = row_index(tile, row, head_slot, prefixes, p) * p.num_splits + slot;
      partial_sums[2 * partial] = running_max;
      partial_sums[2 * partial + 1] = sum;
      factors[team_row] = 1.0f;
    } else {
      const float sink = HAS_SINKS ? in_log2(sinks[head_slot * p.group + row % p.group]) : LOWEST;
      const float total_max = precise::max(running_max, sink);
      const float scale = rescale(running_max, total_max);
      const float total = sum * scale + (HAS_SINKS ? weight_of(sink, total_max) : 0.0f);
      factors[team_row] = sum != 0.0f ? scale / total : 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
    const int tile_row = i / OWN_COLUMNS * EDGE + matrix_row;
    const int column = (i % OWN_COLUMNS * SIMDGROUPS + simdgroup) * EDGE + matrix_column;
    if (tile_row < num_rows && column < DV) {
      const int row = tile.first_row + tile_row;
      const uint own = marks[tile_row * mark_words(DV) + column / WORD] >> (2 * (column % WORD));
      const float first = (outputs[i].thread_elements()[0] + marked(own)) * factors[tile_row];
      const float second = (outputs[i].thread_elements()[1] + marked(own >> 2)) * factors[tile_row];
      if (SPLIT) {
        const long partial = row_index(tile, row, head_slot, prefixes, p) * p.num_splits + slot;
        partial_out[partial * DV + column] = first;
        partial_out[partial * DV + column + 1] = second;
      } else {
        device T* to = out + tile.sequence * p.out_strides[0] +
            (head_slot * p.group + row % p.group) * p.out_strides[1] +
            (tile.first_token + row / p.group) * p.out_strides[2] + column;
        to[0] = T(first);
        to[1] = T(second);
      }
    }
  }
}

// Attention of many query rows over a paged context, by products of 8 x 8 matrices: chunks of
// prompts, drafts, and single tokens with many heads to a KV head.
//
// One threadgroup computes ROWS query rows of one sequence that share a KV head, over one split of
// the context. It takes some keys at a time, in four phases with a barrier after each:
// 1. All threads copy the keys to threadgroup memory.
// 2. The simdgroups divide the scores among them.
// 3. Each row has a team of threads, which turns its scores into weights. All threads copy the
//    values to threadgroup memory.
// 4. Each simdgroup adds the weighted values to its columns of the output, for all rows.

constant constexpr int SIMDGROUPS = 4;
constant constexpr int THREADS = SIMDGROUPS * LANES;
constant constexpr int EDGE = 8;       // rows and columns of a matrix
constant constexpr int PAD = 2;        // vectors after a row of threadgroup memory: other banks
constant constexpr int SCORE_PAD = 4;  // floats after a row of scores
constant constexpr float UNSEEN = -1.0f;  // in place of a weight

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Keys of a step: wide rows take more threadgroup memory.
constexpr int step_keys(int head_dim, int value_dim) {
  return larger(head_dim, value_dim) > 128 ? 16 : 32;
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
    value = max(value, simd_shuffle_xor(value, step));
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

// Copies the query rows of a tile to threadgroup memory. Rows that do not exist become zeros.
template <typename T, int DIM, int ROWS>
inline void stage_queries(
    const device T* q, RowTile tile, int head_slot, int thread_index,
    threadgroup vec<T, VECTOR>* staged, constant AttentionParams& p) {
  constexpr int VECTORS = DIM / VECTOR;
  for (int i = thread_index; i < ROWS * VECTORS; i += THREADS) {
    const int row = tile.first_row + i / VECTORS;
    const int d = i % VECTORS * VECTOR;
    vec<T, VECTOR> elements = vec<T, VECTOR>(T(0));
    if (row < tile.num_tokens * p.group) {
      const int token = tile.first_token + row / p.group;
      const device T* from = q + tile.sequence * p.q_strides[0] +
          (head_slot * p.group + row % p.group) * p.q_strides[1] + token * p.q_strides[2] + d;
      if (WHOLE_QUERIES) {
        elements = read_vector(from);
      } else {
        for (int j = 0; j < VECTOR; j++) {
          elements[j] = from[j];
        }
      }
    }
    staged[i / VECTORS * (VECTORS + PAD) + i % VECTORS] = elements;
  }
}

// Notes where the keys of a step are in the pool: -1 if nothing may be read there.
template <int KEYS>
inline void find_keys(
    int base, int end, const device int* table, int thread_index, threadgroup long* k_places,
    threadgroup long* v_places, constant AttentionParams& p) {
  if (thread_index < KEYS) {
    const int key = base + thread_index;
    const int block = key < end ? table[key / BLOCK_SIZE * p.tables_strides[1]] : -1;
    const bool is_valid = block >= 0 && block < p.num_blocks;
    const int offset = key % BLOCK_SIZE;
    k_places[thread_index] = is_valid ? block * p.k_strides[1] + offset * p.k_strides[2] : -1;
    v_places[thread_index] = is_valid ? block * p.v_strides[1] + offset * p.v_strides[2] : -1;
  }
}

// Copies rows of the pool to threadgroup memory. Keys that have no place become zeros.
template <typename T, int DIM, int KEYS>
inline void stage_rows(
    const device T* head, const threadgroup long* places, int thread_index,
    threadgroup vec<T, VECTOR>* staged) {
  constexpr int VECTORS = DIM / VECTOR;
  constexpr int STEPS = (KEYS * VECTORS + THREADS - 1) / THREADS;
  UNROLL
  for (int step = 0; step < STEPS; step++) {
    const int i = step * THREADS + thread_index;
    const int key = i / VECTORS;
    const int vector = i % VECTORS;
    if (KEYS * VECTORS % THREADS == 0 || key < KEYS) {
      vec<T, VECTOR> elements = vec<T, VECTOR>(T(0));
      if (places[key] >= 0) {
        elements = read_vector(head + places[key] + vector * VECTOR);
      }
      staged[key * (VECTORS + PAD) + vector] = elements;
    }
  }
}

// Grid: (KV heads * row tiles, sequences, splits) threadgroups of THREADS. In a ragged batch the row
// tiles are those of all sequences.
template <typename T, int D, int DV, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void matrix_attention(
    const device T* q [[buffer(0)]],
    const device T* k_cache [[buffer(1)]],
    const device T* v_cache [[buffer(2)]],
    const device int* block_tables [[buffer(3)]],
    const device int* context_lens [[buffer(4)]],
    constant AttentionParams& p [[buffer(5)]],
    device T* out [[buffer(6), function_constant(WHOLE)]],
    device float* partial_out [[buffer(7), function_constant(SPLIT)]],
    device float* partial_sums [[buffer(8), function_constant(SPLIT)]],
    const device float* sinks [[buffer(13), function_constant(HAS_SINKS)]],
    const device int* cu_seqlens [[buffer(16), function_constant(HAS_SEQLENS)]],
    uint3 group_position [[threadgroup_position_in_grid]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]]) {
  constexpr int KEYS = step_keys(D, DV);
  constexpr int TEAM = THREADS / ROWS;  // threads of a row
  constexpr int TEAM_KEYS = KEYS / TEAM;
  // Threadgroup memory: elements from one row to the next.
  constexpr int Q_STRIDE = D + PAD * VECTOR;
  constexpr int V_STRIDE = DV + PAD * VECTOR;
  constexpr int S_STRIDE = KEYS + SCORE_PAD;
  // Simdgroups divide the scores by rows, by keys and, if these are few, by dimensions.
  constexpr int ROW_MATRICES = ROWS / EDGE;
  constexpr int KEY_MATRICES = KEYS / EDGE;
  constexpr int KEY_PARTS = ROW_MATRICES > 2 ? 2 : smaller(KEY_MATRICES, SIMDGROUPS);
  constexpr int ROW_PARTS = smaller(ROW_MATRICES, SIMDGROUPS / KEY_PARTS);
  constexpr int DIM_PARTS = SIMDGROUPS / KEY_PARTS / ROW_PARTS;
  constexpr int OWN_ROWS = ROW_MATRICES / ROW_PARTS;
  constexpr int OWN_KEYS = KEY_MATRICES / KEY_PARTS;
  constexpr int OWN_COLUMNS = (DV / EDGE + SIMDGROUPS - 1) / SIMDGROUPS;  // of the output
  threadgroup vec<T, VECTOR> queries[ROWS * Q_STRIDE / VECTOR];
  threadgroup vec<T, VECTOR> rows[KEYS * larger(Q_STRIDE, V_STRIDE) / VECTOR];
  threadgroup float scores[DIM_PARTS * ROWS * S_STRIDE];  // then weights
  threadgroup float factors[ROWS];
  threadgroup long k_places[KEYS];
  threadgroup long v_places[KEYS];

  const int simdgroup = int(simdgroup_index);
  const int lane = int(lane_index);
  const int thread_index = simdgroup * LANES + lane;
  const int head_slot = int(group_position.x) / p.row_tiles;
  const int tile_index = int(group_position.x) % p.row_tiles;
  const int split = int(group_position.z);
  RowTile tile;
  if (HAS_SEQLENS) {
    tile = ragged_tile<ROWS>(tile_index, cu_seqlens, p);
  } else {
    tile.sequence = int(group_position.y);
    tile.first_token = 0;
    tile.num_tokens = p.num_tokens;
    tile.first_row = tile_index * ROWS;
  }
  const int num_rows = min(ROWS, tile.num_tokens * p.group - tile.first_row);
  if (HAS_SEQLENS && num_rows <= 0) {
    return;
  }
  const int context =
      clamp(context_lens[tile.sequence * p.context_stride], 0, p.max_blocks * BLOCK_SIZE);
  const int last_row = tile.first_row + num_rows - 1;
  const KeyRange of_first = keys_of_row(tile, tile.first_row, context, p);
  const KeyRange of_last = keys_of_row(tile, last_row, context, p);
  const int begin = max(of_first.first, split * p.keys_per_split);
  const int end = min(of_last.stop, (split + 1) * p.keys_per_split);
  if (SPLIT && begin >= end) {
    return;  // The merge does not read what this split would store.
  }
  const device int* table = block_tables + tile.sequence * p.tables_strides[0];
  const device T* k_head = k_cache + head_slot * p.k_strides[0];
  const device T* v_head = v_cache + head_slot * p.v_strides[0];

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
  const threadgroup T* query_part = reinterpret_cast<const threadgroup T*>(queries) +
      row_part * OWN_ROWS * EDGE * Q_STRIDE;
  const threadgroup T* key_rows = reinterpret_cast<const threadgroup T*>(rows) +
      key_part * OWN_KEYS * EDGE * Q_STRIDE;
  const threadgroup T* value_rows = reinterpret_cast<const threadgroup T*>(rows);
  const int value_stride = VALUES_IN_KEYS ? Q_STRIDE : V_STRIDE;
  threadgroup float* score_part = scores +
      (dim_part * ROWS + row_part * OWN_ROWS * EDGE) * S_STRIDE + key_part * OWN_KEYS * EDGE;
  simdgroup_matrix<float, 8, 8> outputs[ROW_MATRICES * OWN_COLUMNS];
  UNROLL
  for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
    outputs[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }

  stage_queries<T, D, ROWS>(q, tile, head_slot, thread_index, queries, p);
  find_keys<KEYS>(begin, end, table, thread_index, k_places, v_places, p);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int base = begin; base < end; base += KEYS) {
    // 1. Copy the keys.
    stage_rows<T, D, KEYS>(k_head, k_places, thread_index, rows);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 2. Compute this simdgroup's scores.
    simdgroup_matrix<float, 8, 8> products[OWN_ROWS * OWN_KEYS];
    UNROLL
    for (int i = 0; i < OWN_ROWS * OWN_KEYS; i++) {
      products[i] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    }
    for (int d = dim_part * EDGE; d < D; d += DIM_PARTS * EDGE) {
      simdgroup_matrix<T, 8, 8> keys[OWN_KEYS];
      UNROLL
      for (int k = 0; k < OWN_KEYS; k++) {
        simdgroup_load(keys[k], key_rows + k * EDGE * Q_STRIDE + d, Q_STRIDE, ulong2(0, 0), true);
      }
      UNROLL
      for (int r = 0; r < OWN_ROWS; r++) {
        simdgroup_matrix<T, 8, 8> query;
        simdgroup_load(query, query_part + r * EDGE * Q_STRIDE + d, Q_STRIDE);
        UNROLL
        for (int k = 0; k < OWN_KEYS; k++) {
          const int i = r * OWN_KEYS + k;
          simdgroup_multiply_accumulate(products[i], query, keys[k], products[i]);
        }
      }
    }
    UNROLL
    for (int i = 0; i < OWN_ROWS * OWN_KEYS; i++) {
      const int row = i / OWN_KEYS * EDGE;
      simdgroup_store(products[i], score_part + row * S_STRIDE + i % OWN_KEYS * EDGE, S_STRIDE);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 3. Copy the values, and turn this thread's scores into weights.
    const bool all_seen = base >= of_last.first && min(base + KEYS, end) <= of_first.stop;
    if (!VALUES_IN_KEYS) {
      stage_rows<T, DV, KEYS>(v_head, v_places, thread_index, rows);
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
      const bool is_seen =
          k_places[key] >= 0 && base + key >= seen.first && base + key < seen.stop;
      own[i] = is_seen ? score_in_log2(qk, p) : -INFINITY;
      new_max = max(new_max, own[i]);
    }
    new_max = team_max<TEAM>(new_max);
    const float factor = rescale(running_max, new_max);
    running_max = new_max;
    running_sum *= factor;
    UNROLL
    for (int i = 0; i < TEAM_KEYS; i++) {
      const bool has_weight = own[i] != -INFINITY;
      const float weight = has_weight ? weight_of(own[i], new_max) : 0.0f;
      running_sum += weight;
      scores[team_row * S_STRIDE + i * TEAM + team_lane] =
          has_weight || all_seen ? weight : UNSEEN;
    }
    if (team_lane == 0) {
      factors[team_row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // 4. Add the weighted values, and find the next keys.
    find_keys<KEYS>(base + KEYS, end, table, thread_index, k_places, v_places, p);
    UNROLL
    for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
      const float old_factor = factors[i / OWN_COLUMNS * EDGE + matrix_row];
      outputs[i].thread_elements()[0] *= old_factor;
      outputs[i].thread_elements()[1] *= old_factor;
    }
    if (all_seen) {
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
            simdgroup_load(value, value_rows + k * value_stride + column, value_stride);
            UNROLL
            for (int r = 0; r < ROW_MATRICES; r++) {
              const int i = r * OWN_COLUMNS + c;
              simdgroup_multiply_accumulate(outputs[i], weights[r], value, outputs[i]);
            }
          }
        }
      }
    } else {
      // A product of matrices would turn NaN in a value into NaN for rows that do not see it.
      UNROLL
      for (int i = 0; i < ROW_MATRICES * OWN_COLUMNS; i++) {
        const int row = i / OWN_COLUMNS * EDGE + matrix_row;
        const int column = (i % OWN_COLUMNS * SIMDGROUPS + simdgroup) * EDGE + matrix_column;
        for (int k = 0; column < DV && k < KEYS; k++) {
          const float weight = scores[row * S_STRIDE + k];
          const threadgroup T* value = value_rows + k * value_stride + column;
          if (weight != UNSEEN) {
            outputs[i].thread_elements()[0] += weight * float(value[0]);
            outputs[i].thread_elements()[1] += weight * float(value[1]);
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // The denominators are known now.
  const float sum = team_sum<TEAM>(running_sum);
  if (team_lane == 0 && team_row < num_rows) {
    const int row = tile.first_row + team_row;
    if (SPLIT) {
      const long partial = row_index(tile, row, head_slot, p) * p.num_splits + split;
      partial_sums[2 * partial] = running_max;
      partial_sums[2 * partial + 1] = sum;
      factors[team_row] = 1.0f;
    } else {
      const float sink = HAS_SINKS ? in_log2(sinks[head_slot * p.group + row % p.group]) : LOWEST;
      const float total_max = max(running_max, sink);
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
      const float first = outputs[i].thread_elements()[0] * factors[tile_row];
      const float second = outputs[i].thread_elements()[1] * factors[tile_row];
      if (SPLIT) {
        const long partial = row_index(tile, row, head_slot, p) * p.num_splits + split;
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

// How the threads of the matrix kernel bring rows of elements to threadgroup memory.

constant constexpr int SIMDGROUPS = 4;
constant constexpr int THREADS = SIMDGROUPS * LANES;
constant constexpr int EDGE = 8;  // rows and columns of a matrix

// Elements from one row in threadgroup memory to the next: an odd multiple of EDGE, so that the
// rows of a matrix are in different banks.
constexpr int padded(int dim) { return dim % (2 * EDGE) == 0 ? dim + EDGE : dim; }

// Vectors of `rows` rows that a thread brings.
constexpr int own_vectors(int rows, int dim) {
  return (rows * (dim / VECTOR) + THREADS - 1) / THREADS;
}

// Copies the query rows of a tile. Rows that do not exist become zeros.
template <typename T, int DIM, int ROWS>
inline void stage_queries(const device T* q, RowTile tile, int head_slot, int thread_index,
                          const device int* prefixes, threadgroup vec<T, VECTOR>* staged,
                          constant AttentionParams& p) {
  constexpr int VECTORS = DIM / VECTOR;
  for (int i = thread_index; i < ROWS * VECTORS; i += THREADS) {
    const int row = tile.first_row + i / VECTORS;
    const int d = i % VECTORS * VECTOR;
    vec<T, VECTOR> elements = vec<T, VECTOR>(T(0));
    if (row < tile.num_tokens * p.group) {
      const RowPlace place = place_of(tile, row, prefixes, p);
      const device T* from = q + place.sequence * p.q_strides[0] +
                             (head_slot * p.group + row % p.group) * p.q_strides[1] +
                             place.token * p.q_strides[2] + d;
      elements = gather_vector(from, 1, WHOLE_QUERIES);
    }
    staged[i / VECTORS * (padded(DIM) / VECTOR) + i % VECTORS] = elements;
  }
}

// Notes as the i-th where a key and its value are in the pool, and in which slot of all.
template <typename K, typename V>
inline void note_place(int block, int key, int i, threadgroup uint* k_places,
                       threadgroup uint* v_places, threadgroup int* numbers,
                       constant AttentionParams& p) {
  const bool is_valid = block >= 0 && block < p.num_blocks;
  const int slot = key % BLOCK_SIZE;
  numbers[i] = is_valid ? block * BLOCK_SIZE + slot : -1;
  k_places[i] = is_valid ? slot_offset<K>(block, slot, p.k_strides[1], p.k_strides[2]) : NOWHERE;
  v_places[i] = is_valid ? slot_offset<V>(block, slot, p.v_strides[1], p.v_strides[2]) : NOWHERE;
}

// Asks for this thread's scales of some keys and values.
template <typename K, typename V, int KEYS, int GROUPS, int COUNT>
inline void load_scales(const device half* k_scales, const device half* v_scales,
                        const threadgroup int* numbers, int head_slot, int thread_index,
                        thread half& own_k, thread vec<half, 2> (&own_v)[COUNT],
                        constant AttentionParams& p) {
  const device half* k_head = k_scales + head_slot * p.k_scales_strides[0];
  const device half* v_head = v_scales + head_slot * p.v_scales_strides[0];
  if (thread_index < KEYS) {
    const vec<half, 2> of_key = read_scales<K>(k_head, numbers[thread_index], 0,
                                               p.k_scales_strides[1], p.k_scales_strides[2]);
    own_k = of_key[0];
  }
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    const int i = step * THREADS + thread_index;
    if (i < KEYS * GROUPS) {
      own_v[step] = read_scales<V>(v_head, numbers[i / GROUPS], i % GROUPS, p.v_scales_strides[1],
                                   p.v_scales_strides[2]);
    }
  }
}

// Stores them to threadgroup memory.
template <int KEYS, int GROUPS, int COUNT>
inline void store_scales(half own_k, thread vec<half, 2> (&own_v)[COUNT], int thread_index,
                         threadgroup float* of_keys, threadgroup vec<half, 2>* of_values) {
  if (thread_index < KEYS) {
    of_keys[thread_index] = float(own_k);
  }
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    const int i = step * THREADS + thread_index;
    if (i < KEYS * GROUPS) {
      of_values[i] = own_v[step];
    }
  }
}

// Asks for this thread's vectors of some rows of the pool. Those of no place are zeros.
template <int DIM, int KEYS, typename T, int COUNT>
inline void load_rows(const device T* head, const threadgroup uint* places, int thread_index,
                      thread typename Held<T>::type (&own)[COUNT]) {
  constexpr int VECTORS = DIM / VECTOR;
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    const int i = step * THREADS + thread_index;
    own[step] = typename Held<T>::type(T(0));
    if (KEYS * VECTORS % THREADS == 0 || i < KEYS * VECTORS) {
      const uint place = places[i / VECTORS];
      if (place != NOWHERE) {
        own[step] = read_pool(head, place + vector_place<T>(uint(i % VECTORS)));
      }
    }
  }
}

// Converts loaded vectors: bytes as they are, pairs with the scale and the minimum of their group.
template <int DIM, int KEYS, typename S, typename T, int COUNT>
inline void convert_rows(thread typename Held<S>::type (&own)[COUNT],
                         const threadgroup vec<half, 2>* scales, int thread_index,
                         thread vec<T, VECTOR> (&result)[COUNT]) {
  constexpr int VECTORS = DIM / VECTOR;
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    const int i = step * THREADS + thread_index;
    const int vector = i % VECTORS;
    const typename Held<S>::elements_type elements = Held<S>::elements(own[step], vector);
    if (!is_pair<S>()) {
      UNROLL
      for (int j = 0; j < VECTOR; j++) {
        result[step][j] = T(elements[j]);
      }
    } else {
      const int group = vector / (GROUP / VECTOR);
      const vec<half, 2> of_row =
          scales[min(i / VECTORS, KEYS - 1) * scale_groups(DIM, true) + group];
      const float4 values = float4(elements) * float(of_row[0]) + float(of_row[1]);
      UNROLL
      for (int j = 0; j < VECTOR; j++) {
        result[step][j] = T(values[j]);
      }
    }
  }
}

// Stores them to threadgroup memory.
template <int DIM, int KEYS, typename T, int COUNT>
inline void store_rows(thread vec<T, VECTOR> (&own)[COUNT], int thread_index,
                       threadgroup vec<T, VECTOR>* staged) {
  constexpr int VECTORS = DIM / VECTOR;
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    const int i = step * THREADS + thread_index;
    if (KEYS * VECTORS % THREADS == 0 || i < KEYS * VECTORS) {
      staged[i / VECTORS * (padded(DIM) / VECTOR) + i % VECTORS] = own[step];
    }
  }
}

// Notes whether some of a simdgroup's are NaN or infinite, which have the highest exponent.
template <typename T, int COUNT>
inline void note_spoiled(thread vec<T, VECTOR> (&own)[COUNT], int simdgroup, int lane,
                         threadgroup int* are_spoiled) {
  constexpr ushort INFINITE = metal::is_same_v<T, half> ? 0x7C00 : 0x7F80;
  ushort highest = 0;
  UNROLL
  for (int step = 0; step < COUNT; step++) {
    UNROLL
    for (int i = 0; i < VECTOR; i++) {
      const ushort magnitude = as_type<ushort>(own[step][i]) & 0x7FFF;
      highest = max(highest, magnitude);
    }
  }
  const bool are_finite = simd_all(highest < INFINITE);
  if (lane == 0) {
    are_spoiled[simdgroup] = are_finite ? 0 : 1;
  }
}

// Whether a row with these keys attends to a key.
inline bool is_attended(uint place, int key, KeyRange keys) {
  return place != NOWHERE && key >= keys.first && key < keys.stop;
}

// How an output is marked that gets +inf, -inf or, as both, NaN.
inline uint mark_of(float value) {
  return (value < INFINITY ? 0 : 1) | (value > -INFINITY ? 0 : 2);
}

// What the lowest mark of a word adds to its output.
inline float marked(uint word) {
  return ((word & 1) != 0 ? INFINITY : 0.0f) - ((word & 2) != 0 ? INFINITY : 0.0f);
}

constant constexpr int WORD = 16;  // marks in a word

// Words of a row's marks.
constexpr int mark_words(int value_dim) { return (value_dim + WORD - 1) / WORD; }

// Marks the outputs of a row that get what is not finite of some values. Each thread of a team has
// other words.
template <int DIM, int KEYS, int TEAM, typename T>
inline void mark_outputs(const threadgroup T* values, int stride, const threadgroup float* weights,
                         const threadgroup uint* places, int base, KeyRange seen, int team_lane,
                         threadgroup uint* marks) {
  NO_UNROLL
  for (int word = team_lane; word < mark_words(DIM); word += TEAM) {
    uint found = marks[word];
    NO_UNROLL
    for (int key = 0; key < KEYS; key++) {
      if (is_attended(places[key], base + key, seen)) {
        NO_UNROLL
        for (int i = 0; i < min(WORD, DIM - word * WORD); i++) {
          const float value = float(values[key * stride + word * WORD + i]);
          found |= mark_of(weights[key] * value) << (2 * i);
        }
      }
    }
    marks[word] = found;
  }
}

// Puts zeros in the place of what is not finite of some values.
template <int DIM, int KEYS, typename T>
inline void clear_spoiled(threadgroup T* values, int stride, int thread_index) {
  NO_UNROLL
  for (int i = thread_index; i < KEYS * DIM; i += THREADS) {
    const int place = i / DIM * stride + i % DIM;
    if (mark_of(float(values[place])) != 0) {
      values[place] = T(0);
    }
  }
}

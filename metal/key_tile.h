// A tile of up to 32 keys: how the lanes of a simdgroup share its scores and its values.

// A lane asks for 64 bytes of keys or values before it uses the first: more would need too many
// registers. No condition is on a load: keys that nobody sees have the place of a key that is seen.

// Keys that a lane asks for at once, of each of which it gets so many bytes.
constexpr int key_steps(int bytes, int rows) {
  return bytes <= 12 ? 8 : rows * bytes <= 64 && bytes < 64 ? 4 : 2;
}

// Values that a lane asks for at once: with those of its neighbours no more than a block has, so
// that one place tells all.
constexpr int value_steps(int bytes, int rows, int lanes) {
  return bytes <= 4 && lanes == LANES ? 16 : bytes <= (rows == 1 ? 16 : 8) ? 8 : 4;
}

// Lanes that share a key: none holds more than three vectors of it, or five for a single row.
constexpr int key_lanes(int vectors, int rows) {
  const int most = rows == 1 ? 64 : 48;
  return vectors > most ? 32 : vectors > 24 ? 16 : vectors >= 8 ? 8 : vectors >= 3 ? 4 : vectors;
}

// Lanes that share a value: as few as it has vectors, so that no lane has more than it must.
constexpr int value_lanes(int vectors) {
  return vectors > 16 ? 32 : vectors > 8 ? 16 : vectors > 4 ? 8 : 4;
}

// Which key of a tile a lane has: those that a simdgroup multiplies at once are neighbours, so that
// it multiplies the first keys alone if a tile has no more.
template <int SHARE, int STEPS>
inline int key_of_lane(int lane) {
  constexpr int TEAMS = LANES / SHARE;
  return (lane % SHARE / STEPS * TEAMS + lane / SHARE) * STEPS + lane % STEPS;
}

// The lane that has a key of a tile.
template <int SHARE, int STEPS>
inline int lane_of_key(int key) {
  constexpr int TEAMS = LANES / SHARE;
  return key / STEPS % TEAMS * SHARE + key / (STEPS * TEAMS) * STEPS + key % STEPS;
}

// Which vector of a row is a lane's c-th: pairs of neighbours or single ones.
template <int STRIDE, int COUNT>
inline int own_vector(int lane, int c) {
  return COUNT % 2 == 0 ? (c / 2 * STRIDE + lane) * 2 + c % 2 : c * STRIDE + lane;
}

// Where the keys `first`, `first` + APART, ... of a tile are, which lanes have as above. Slots of a
// block are a `stride` apart. If it is 0, keys may be anywhere.
template <int APART, int SHARE, int RUN, int STEPS>
inline void find_keys(uint own_offset, uint stride, int first, thread uint (&offsets)[STEPS]) {
  if (stride > 0 && BLOCK_SIZE % (STEPS * APART) == 0) {
    const uint run = simd_shuffle(own_offset, ushort(lane_of_key<SHARE, RUN>(first)));
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      offsets[i] = run + uint(i * APART) * stride;
    }
  } else {
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      const int lane = lane_of_key<SHARE, RUN>(first + i * APART);
      offsets[i] = simd_shuffle(own_offset, ushort(lane));
    }
  }
}

// This lane's vectors of one row of the pool.
template <int DIM, int STRIDE, typename T, int COUNT>
inline void load_row(const device T* head, uint offset, int lane,
                     thread typename Held<T>::type (&row)[COUNT]) {
  constexpr bool IS_EVEN = DIM == VECTOR * STRIDE * COUNT;
  UNROLL
  for (int c = 0; c < COUNT; c++) {
    const int vector = own_vector<STRIDE, COUNT>(lane, c);
    // The address of a pair is the first one's: only so a compiler makes one load of them.
    const uint next = COUNT % 2 == 0 ? c % 2 : is_six<T>() ? vector % 2 : 0;
    const uint place = offset + vector_place<T>(uint(vector) - next);
    row[c] = typename Held<T>::type(T(0.0f));
    if (IS_EVEN || vector < DIM / VECTOR) {
      row[c] = read_pool(head + long(place) * unit_of_place<T>(), vector_place<T>(next));
    }
  }
}

// A sum over two lanes: of `second` in the lane that has the bit, of `first` in the other lane.
inline float exchange(float first, float second, bool has_bit, ushort bit) {
  const float kept = has_bit ? second : first;
  const float given = has_bit ? first : second;
  return kept + simd_shuffle_xor(given, bit);
}

// Adds up sums over lanes whose places differ in some bits, from `first` on: then a lane has the
// one sum, as its first, whose number these bits of its place are.
template <int COUNT>
inline void exchange_all(thread float (&sums)[COUNT], int place, int first) {
  UNROLL
  for (int apart = COUNT / 2; apart > 0; apart /= 2) {
    UNROLL
    for (int i = 0; i < COUNT / 2; i++) {
      if (i < apart) {
        const int bit = apart * first;
        sums[i] = exchange(sums[i], sums[i + apart], (place & bit) != 0, ushort(bit));
      }
    }
  }
}

// Keys that a lane multiplies one after the other before it asks for more.
template <typename T, int VECTORS, int ROWS, int SHARE>
constexpr int run_of_keys() {
  constexpr int MOST = key_steps(VECTORS * int(sizeof(typename Held<T>::type)), ROWS);
  return SHARE < MOST ? SHARE : MOST;
}

// The products of the queries with the first `count` keys of a tile: a lane gets those of its key.
// Of the keys that it has asked for, a lane multiplies some at once: more would need too many
// registers for elements as floats.
template <int D, int SHARE, int VECTORS, typename T, typename Q, int ROWS>
inline void multiply_keys(const device T* head, uint own_offset, uint stride, int count, int lane,
                          const threadgroup vec<Q, VECTOR>* queries,
                          thread float (&products)[ROWS]) {
  constexpr int STEPS = run_of_keys<T, VECTORS, ROWS, SHARE>();
  constexpr int TEAMS = LANES / SHARE;  // that take as many keys each
  constexpr int AT_ONCE = ROWS > 1 && STEPS > 2 ? 2 : STEPS;
  constexpr int ROUNDS = STEPS / AT_ONCE;
  const int place = lane % SHARE;
  NO_UNROLL
  for (int step = 0; step * TEAMS < count; step += STEPS) {
    uint offsets[STEPS];
    const int first = step * TEAMS + lane / SHARE * STEPS;
    find_keys<1, SHARE, STEPS>(own_offset, stride, first, offsets);
    typename Held<T>::type keys[STEPS][VECTORS];
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      load_row<D, SHARE>(head, offsets[i], place, keys[i]);
    }
    float sums[ROWS][ROUNDS];
    UNROLL
    for (int i = 0; i < ROUNDS; i++) {
      // Else a compiler keeps all queries in registers, as floats.
      simdgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        float own_sums[AT_ONCE] = {0.0f};
        UNROLL
        for (int c = 0; c < VECTORS; c++) {
          const int vector = own_vector<SHARE, VECTORS>(place, c);
          const float4 query = float4(queries[r * VECTORS * SHARE + vector]);
          UNROLL
          for (int j = 0; j < AT_ONCE; j++) {
            own_sums[j] += dot(query, float4(Held<T>::elements(keys[j * ROUNDS + i][c], vector)));
          }
        }
        exchange_all(own_sums, place, ROUNDS);
        sums[r][i] = own_sums[0];
      }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      exchange_all(sums[r], place, 1);
      UNROLL
      for (int bit = STEPS; bit < SHARE; bit *= 2) {
        sums[r][0] += simd_shuffle_xor(sums[r][0], ushort(bit));
      }
      products[r] = place / STEPS == step / STEPS ? sums[r][0] : products[r];
    }
  }
}

// Adds the weighted values of the first `count` keys of a tile. A negative weight means that the
// row does not see the key, which may then hold anything.
template <bool IS_FULL, int DV, int SHARE, int K_SHARE, int RUN, typename T, int ROWS, int VECTORS>
inline void add_values(const device T* head, uint own_offset, uint stride, int count, int lane,
                       const threadgroup float4* weights, const threadgroup vec<half, 2>* scales,
                       thread float4 (&sums)[ROWS][VECTORS]) {
  constexpr int GROUPS = scale_groups(DV, is_pair<T>());
  constexpr int TEAMS = LANES / SHARE;  // that take a key each
  constexpr int MOST = value_steps(VECTORS * int(sizeof(typename Held<T>::type)), ROWS, SHARE);
  constexpr int STEPS = SHARE < MOST ? SHARE : MOST;
  const int team = lane / SHARE;
  const int place = lane % SHARE;
  NO_UNROLL
  for (int first = team; first - team < count; first += STEPS * TEAMS) {
    uint offsets[STEPS];
    find_keys<TEAMS, K_SHARE, RUN>(own_offset, stride, first, offsets);
    typename Held<T>::type values[STEPS][VECTORS];
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      load_row<DV, SHARE>(head, offsets[i], place, values[i]);
    }
    UNROLL
    for (int i = 0; i < STEPS; i++) {
      const float4 weight = weights[first + i * TEAMS];
      UNROLL
      for (int c = 0; c < VECTORS; c++) {
        const int vector = own_vector<SHARE, VECTORS>(place, c);
        float4 value = float4(Held<T>::elements(values[i][c], vector));
        if (is_pair<T>()) {
          const int group = min(vector / (GROUP / VECTOR), GROUPS - 1);
          const vec<half, 2> own = scales[(first + i * TEAMS) * GROUPS + group];
          value = value * float(own[0]) + float(own[1]);
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
          if (IS_FULL || !(weight[r] < 0.0f)) {
            sums[r][c] += weight[r] * value;
          }
        }
      }
    }
  }
}

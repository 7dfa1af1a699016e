// How both attention kernels read keys and values, and the function constants of both. The other
// constants are beside their kernel.

constant int BLOCK_SIZE [[function_constant(0)]];
constant bool CAUSAL [[function_constant(1)]];
constant bool HAS_WINDOW [[function_constant(2)]];
constant bool HAS_SOFTCAP [[function_constant(3)]];
constant bool HAS_SINKS [[function_constant(7)]];
constant bool SPLIT [[function_constant(10)]];
constant bool WHOLE_QUERIES [[function_constant(13)]];  // queries begin at whole vectors
constant bool HAS_SCALES [[function_constant(18)]];     // a quantized pool
constant bool WHOLE = !SPLIT;

// The place of a key that is not attended.
constant constexpr uint NOWHERE = 0xFFFFFFFF;

// Whether a byte of the pool holds two elements: see csrc/kv_formats.h.
template <typename T>
constexpr bool is_pair() {
  return metal::is_same_v<T, uchar>;
}

// Whether the pool's words hold elements of 6 bits.
template <typename T>
constexpr bool is_six() {
  return metal::is_same_v<T, ushort>;
}

// How a lane holds neighbouring elements that it has read, and what they are. Those of fewer than 8
// bits stay together until they are used: apart they would take more registers.
template <typename T>
struct Held {
  using type = vec<T, VECTOR>;
  using elements_type = type;
  static elements_type elements(type held, int) { return held; }
};

template <>
struct Held<ushort> {
  using type = uint;  // two words; an odd vector begins with the second byte
  using elements_type = vec<int, VECTOR>;
  static elements_type elements(uint held, int vector) {
    const uint upper = vector % 2 == 0 ? held << 8 : held;
    elements_type result;
    UNROLL
    for (int i = 0; i < VECTOR; i++) {
      result[i] = int(upper << (18 - 6 * i)) >> 26;  // with the sign of the element's upper bit
    }
    return result;
  }
};

template <>
struct Held<uchar> {
  using type = ushort;
  using elements_type = vec<int, VECTOR>;
  static elements_type elements(ushort held, int) {
    elements_type result;
    UNROLL
    for (int i = 0; i < VECTOR; i++) {
      result[i] = int(held) >> (4 * i) & 15;
    }
    return result;
  }
};

// Groups of columns that have a scale and a minimum each.
constexpr int scale_groups(int value_dim, bool has_pairs) {
  return has_pairs ? (value_dim + GROUP - 1) / GROUP : 1;
}

// The block of a key, or -1 if the key is not in [begin, end).
inline int block_of(int key, int begin, int end, const device int* table,
                    constant AttentionParams& p) {
  return key >= begin && key < end ? table[key / BLOCK_SIZE * int(p.tables_strides[1])] : -1;
}

// Stored elements in the unit of a place: a vector, or a word of elements of 6 bits.
template <typename T>
constexpr int unit_of_place() {
  return is_six<T>() ? 1 : is_pair<T>() ? VECTOR / 2 : VECTOR;
}

// The place of a slot in a head of the pool.
template <typename T>
inline uint slot_offset(int block, int slot, long block_stride, long slot_stride) {
  constexpr int STORED = unit_of_place<T>();
  return uint(block) * uint(block_stride / STORED) + uint(slot) * uint(slot_stride / STORED);
}

// The scale of a group in one of the pool's slots, and its minimum or 0; zeros if `slot` is -1.
template <typename T>
inline vec<half, 2> read_scales(const device half* head, int slot, int group, long block_stride,
                                long slot_stride) {
  vec<half, 2> result = vec<half, 2>(half(0.0f));
  if (slot >= 0) {
    const uint place = uint(slot / BLOCK_SIZE) * uint(block_stride) +
                       uint(slot % BLOCK_SIZE) * uint(slot_stride) + uint(2 * group);
    result[0] = head[place];
    if (is_pair<T>()) {
      result[1] = head[place + 1];
    }
  }
  return result;
}

// Where a vector is in its row, in units of a place. Two vectors of elements of 6 bits are three
// words.
template <typename T>
inline uint vector_place(uint vector) {
  return is_six<T>() ? vector / 2 * 3 + vector % 2 : vector;
}

// Neighbouring elements of a key or value. Every one that a kernel computes with is read here.
template <typename T>
inline typename Held<T>::type read_pool(const device T* head, uint place) {
  return reinterpret_cast<const device typename Held<T>::type*>(head)[place];
}

inline uint read_pool(const device ushort* head, uint place) {
  const device ushort* words = head + place;
  return uint(words[0]) | uint(words[1]) << 16;
}

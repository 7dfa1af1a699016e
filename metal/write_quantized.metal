// Writes of new keys and values to quantized pools.

constant bool HAS_PAIRS [[function_constant(19)]];  // values of 4 bits, two a byte
constant bool HAS_SIXES [[function_constant(21)]];  // keys of 6 bits, and values without HAS_PAIRS

// The nearest integer, limited; NaN becomes `least`.
inline int nearest(float x, float least, float most) {
  const float limited = x > least ? (x < most ? x : most) : least;
  return int(rint(limited));
}

// The scale of a row whose largest element becomes `most`, as it is stored.
template <typename T>
inline half symmetric_scale(const device T* from, long stride, int vectors, int lane, float most) {
  uint highest = 0;  // as bits: their order is that of the numbers, and NaNs come last
  for (int vector = lane; vector < vectors; vector += LANES) {
    const vec<T, VECTOR> elements = new_elements(from, vector, stride);
    for (int i = 0; i < VECTOR; i++) {
      highest = max(highest, as_type<uint>(float(elements[i])) & 0x7FFFFFFF);
    }
  }
  return half(as_type<float>(simd_max(highest)) / most);
}

// A row with 8 bits an element, and its scale.
template <typename T>
inline void write_bytes(const device T* from, long stride, int vectors, int lane,
                        device uchar* to, device half* scales) {
  const half stored = symmetric_scale(from, stride, vectors, lane, 127.0f);
  const float scale = float(stored);
  for (int vector = lane; vector < vectors; vector += LANES) {
    const vec<T, VECTOR> elements = new_elements(from, vector, stride);
    vec<uchar, VECTOR> result;
    for (int i = 0; i < VECTOR; i++) {
      const float x = float(elements[i]);
      result[i] = uchar(scale == 0.0f ? 0 : nearest(x / scale, -127.0f, 127.0f));
    }
    write_vector(to + VECTOR * vector, result);
  }
  if (lane == 0) {
    scales[0] = stored;
  }
}

// A row with 6 bits an element, and its scale. A lane has the eight elements of three words.
template <typename T>
inline void write_sixes(const device T* from, long stride, int vectors, int lane,
                        device ushort* to, device half* scales) {
  const half stored = symmetric_scale(from, stride, vectors, lane, 31.0f);
  const float scale = float(stored);
  for (int eight = lane; eight < vectors / 2; eight += LANES) {
    uint fours[2] = {0, 0};
    UNROLL
    for (int four = 0; four < 2; four++) {
      const vec<T, VECTOR> elements = new_elements(from, 2 * eight + four, stride);
      for (int i = 0; i < VECTOR; i++) {
        const float x = float(elements[i]);
        const int q = scale == 0.0f ? 0 : nearest(x / scale, -31.0f, 31.0f);
        fours[four] |= (uint(q) & 63) << (6 * i);
      }
    }
    to[3 * eight] = ushort(fours[0]);
    to[3 * eight + 1] = ushort(fours[0] >> 16 | fours[1] << 8);
    to[3 * eight + 2] = ushort(fours[1] >> 8);
  }
  if (lane == 0) {
    scales[0] = stored;
  }
}

// A row with 4 bits an element, and the scale and the minimum of each group. A lane has two
// neighbouring elements of a group.
template <typename T>
inline void write_pairs(const device T* from, long stride, int width, int lane, device uchar* to,
                        device half* scales) {
  for (int first = 0; first < width; first += GROUP) {
    const bool is_inside = first + 2 * lane < width;
    const int column = is_inside ? first + 2 * lane : first;
    const float even = float(from[column * stride]);
    const float odd = float(from[(column + 1) * stride]);
    const bool are_finite = simd_all(even - even == 0.0f && odd - odd == 0.0f);
    const half minimum = half(are_finite ? simd_min(min(even, odd)) : NAN);
    const float low = float(minimum);
    const half stored = half(are_finite ? (simd_max(max(even, odd)) - low) / 15.0f : NAN);
    const float scale = float(stored);
    if (is_inside) {
      const int q = scale == 0.0f ? 0 : nearest((even - low) / scale, 0.0f, 15.0f);
      const int next = scale == 0.0f ? 0 : nearest((odd - low) / scale, 0.0f, 15.0f);
      to[column / 2] = uchar(q + 16 * next);
    }
    if (lane == 0) {
      scales[first / GROUP * 2] = stored;
      scales[first / GROUP * 2 + 1] = minimum;
    }
  }
}

// Writes to a quantized pool, rounded as csrc/cpu/quantize.h rounds. Grid in threads: (LANES, KV
// heads, rows). A simdgroup has a key and a value.
template <typename T>
[[kernel]] void write_quantized(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device int* slot_mapping [[buffer(2)]],
    constant WriteParams& p [[buffer(3)]],
    device uchar* k_cache [[buffer(4)]],
    device uchar* v_cache [[buffer(5)]],
    device half* k_scales [[buffer(6)]],
    device half* v_scales [[buffer(7)]],
    uint3 position [[thread_position_in_grid]]) {
  const int lane = int(position.x);
  const int head = int(position.y);
  const int row = int(position.z);
  const int slot = slot_mapping[row * long(p.slots_stride)];
  if (slot < 0 || slot >= p.num_blocks * BLOCK_SIZE) {
    return;
  }
  const long block = slot / BLOCK_SIZE;
  const long offset = slot % BLOCK_SIZE;
  const device T* key = k + row * p.k_strides[0] + head * p.k_strides[1];
  const device T* value = v + row * p.v_strides[0] + head * p.v_strides[1];
  const long k_place = head * p.k_cache_strides[0] + block * p.k_cache_strides[1] +
      offset * p.k_cache_strides[2];
  const long v_place = head * p.v_cache_strides[0] + block * p.v_cache_strides[1] +
      offset * p.v_cache_strides[2];
  device half* k_numbers = k_scales + head * p.k_scales_strides[0] +
      block * p.k_scales_strides[1] + offset * p.k_scales_strides[2];
  device half* v_numbers = v_scales + head * p.v_scales_strides[0] +
      block * p.v_scales_strides[1] + offset * p.v_scales_strides[2];
  if (HAS_SIXES) {
    device ushort* to = reinterpret_cast<device ushort*>(k_cache) + k_place;
    write_sixes(key, p.k_strides[2], p.k_vectors, lane, to, k_numbers);
  } else {
    write_bytes(key, p.k_strides[2], p.k_vectors, lane, k_cache + k_place, k_numbers);
  }
  if (HAS_PAIRS) {
    write_pairs(value, p.v_strides[2], VECTOR * p.v_vectors, lane, v_cache + v_place, v_numbers);
  } else if (HAS_SIXES) {
    device ushort* to = reinterpret_cast<device ushort*>(v_cache) + v_place;
    write_sixes(value, p.v_strides[2], p.v_vectors, lane, to, v_numbers);
  } else {
    write_bytes(value, p.v_strides[2], p.v_vectors, lane, v_cache + v_place, v_numbers);
  }
}

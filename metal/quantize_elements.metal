// The simplest write to a quantized pool: no vectors, no function constants, no simdgroups.

// The nearest integer, limited; NaN becomes `least`.
inline int nearest_of(float x, float least, float most) {
  const float limited = x > least ? (x < most ? x : most) : least;
  return int(rint(limited));
}

// A row whose largest element becomes `most`, and its scale. Elements of 6 bits are in words, eight
// in three, which a pool of bytes holds with the lower byte first.
template <typename T>
inline void quantize_symmetric(const device T* from, long stride, int width, int bits,
                               device uchar* to, device half* scales) {
  const float most = bits == 6 ? 31.0f : 127.0f;
  uint highest = 0;  // as bits: their order is that of the numbers, and NaNs come last
  for (int i = 0; i < width; i++) {
    highest = max(highest, as_type<uint>(float(from[i * stride])) & 0x7FFFFFFF);
  }
  const half stored = half(as_type<float>(highest) / most);
  const float scale = float(stored);
  uint held = 0;
  int held_bits = 0;
  int place = 0;
  for (int i = 0; i < width; i++) {
    const float x = float(from[i * stride]);
    const int q = scale == 0.0f ? 0 : nearest_of(x / scale, -most, most);
    held |= (uint(q) & ((uint(1) << bits) - 1)) << held_bits;
    held_bits += bits;
    while (held_bits >= 8) {
      to[place] = uchar(held & 255);
      place += 1;
      held = held >> 8;
      held_bits -= 8;
    }
  }
  scales[0] = stored;
}

// A row with 4 bits an element, and the scale and the minimum of each group.
template <typename T>
inline void quantize_pairs(const device T* from, long stride, int width, int group,
                           device uchar* to, device half* scales) {
  for (int first = 0; first < width; first += group) {
    const int last = min(first + group, width);
    float low = float(from[first * stride]);
    float high = low;
    bool are_finite = true;
    for (int i = first; i < last; i++) {
      const float x = float(from[i * stride]);
      are_finite = are_finite && x - x == 0.0f;
      low = x < low ? x : low;
      high = x > high ? x : high;
    }
    const half minimum = half(are_finite ? low : NAN);
    const float base = float(minimum);
    const half stored = half(are_finite ? (high - base) / 15.0f : NAN);
    const float scale = float(stored);
    for (int i = first; i < last; i += 2) {
      const float even = float(from[i * stride]);
      const float odd = float(from[(i + 1) * stride]);
      const int q = scale == 0.0f ? 0 : nearest_of((even - base) / scale, 0.0f, 15.0f);
      const int next = scale == 0.0f ? 0 : nearest_of((odd - base) / scale, 0.0f, 15.0f);
      to[i / 2] = uchar(q + 16 * next);
    }
    scales[first / group * 2] = stored;
    scales[first / group * 2 + 1] = minimum;
  }
}

// Rounded as csrc/cpu/quantize.h rounds. Grid in threads: (1, KV heads, rows). A thread writes a
// key and a value.
template <typename T>
[[kernel]] void quantize_elements(
    const device T* k [[buffer(0)]],
    const device T* v [[buffer(1)]],
    const device int* slot_mapping [[buffer(2)]],
    constant WriteParams& p [[buffer(3)]],
    device uchar* k_cache [[buffer(4)]],
    device uchar* v_cache [[buffer(5)]],
    device half* k_scales [[buffer(6)]],
    device half* v_scales [[buffer(7)]],
    uint3 position [[thread_position_in_grid]]) {
  const int head = int(position.y);
  const int row = int(position.z);
  const int slot = slot_mapping[row * long(p.slots_stride)];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) {
    return;
  }
  const long block = slot / p.block_size;
  const long offset = slot % p.block_size;
  const device T* key = k + row * p.k_strides[0] + head * p.k_strides[1];
  const device T* value = v + row * p.v_strides[0] + head * p.v_strides[1];
  device uchar* k_to = k_cache + head * p.k_cache_strides[0] + block * p.k_cache_strides[1] +
      offset * p.k_cache_strides[2];
  device uchar* v_to = v_cache + head * p.v_cache_strides[0] + block * p.v_cache_strides[1] +
      offset * p.v_cache_strides[2];
  device half* k_numbers = k_scales + head * p.k_scales_strides[0] +
      block * p.k_scales_strides[1] + offset * p.k_scales_strides[2];
  device half* v_numbers = v_scales + head * p.v_scales_strides[0] +
      block * p.v_scales_strides[1] + offset * p.v_scales_strides[2];
  quantize_symmetric(key, p.k_strides[2], p.k_vectors, p.k_bits, k_to, k_numbers);
  if (p.v_bits == 4) {
    quantize_pairs(value, p.v_strides[2], p.v_vectors, p.group, v_to, v_numbers);
  } else {
    quantize_symmetric(value, p.v_strides[2], p.v_vectors, p.v_bits, v_to, v_numbers);
  }
}

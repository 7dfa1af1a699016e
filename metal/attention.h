// The tile kernel's own function constants, a query row and the keys that it sees, the place of a key
// in the pool, and the score of a key.

constant bool HAS_ALIBI [[function_constant(4)]];
constant bool HAS_BOOL_MASK [[function_constant(5)]];
constant bool HAS_FLOAT_MASK [[function_constant(6)]];
constant bool HAS_ROPE [[function_constant(8)]];
constant bool HAS_MAPPING [[function_constant(9)]];
constant bool RETURN_ATTN [[function_constant(11)]];

// One query row and the keys [first, stop) that it sees without a mask.
struct QueryRow {
  int head;
  int token;
  int position;
  int first;
  int stop;
  long mask;  // offset of its mask
};

// The place of a key in the pool. A key that is not attended has no place.
struct Slot {
  bool is_valid;
  int block;
  int offset;
};

inline QueryRow query_row(
    int row, int sequence, int head_slot, int context, constant AttentionParams& p) {
  QueryRow result;
  result.token = row / p.group;
  result.head = head_slot * p.group + row % p.group;
  result.position = context - p.num_tokens + result.token;
  const KeyRange keys = key_range(result.position, context, CAUSAL, HAS_WINDOW ? p.window : 0);
  result.first = keys.first;
  result.stop = row < p.group * p.num_tokens ? keys.stop : 0;
  result.mask = sequence * p.mask_strides[0] + result.head * p.mask_strides[1] +
      result.token * p.mask_strides[2];
  return result;
}

// Dimension d of a query row, rotated if there are angles: pairs (d, d + R / 2) by angle d.
template <typename Q>
inline float query_element(
    const device Q* q, const device float* angles, int d, constant AttentionParams& p) {
  const float own = float(q[d]);
  if (!HAS_ROPE || d >= 2 * p.rope_pairs) {
    return own;
  }
  const bool is_first = d < p.rope_pairs;
  const float angle = angles[is_first ? d : d - p.rope_pairs];
  const float other = float(q[is_first ? d + p.rope_pairs : d - p.rope_pairs]);
  return own * precise::cos(angle) + (is_first ? -other : other) * precise::sin(angle);
}

// A vector of a query row, rotated if there are angles.
template <typename Q>
inline float4 query_vector(
    const device Q* q, const device float* angles, int vector, constant AttentionParams& p) {
  if (WHOLE_QUERIES && !HAS_ROPE) {
    return float4(read_vector(q + vector * VECTOR));
  }
  float4 result;
  for (int i = 0; i < VECTOR; i++) {
    result[i] = query_element(q, angles, vector * VECTOR + i, p);
  }
  return result;
}

inline Slot locate(int key, int end, const device int* table, constant AttentionParams& p) {
  Slot slot;
  slot.block = key < end ? table[key / BLOCK_SIZE * p.tables_strides[1]] : -1;
  slot.offset = key % BLOCK_SIZE;
  slot.is_valid = slot.block >= 0 && slot.block < p.num_blocks;
  return slot;
}

// The score of a key in units of log2; -inf if the row does not see the key, which may then hold
// anything. If a row sees only keys with the lowest scores, these share the weights.
inline float finish_score(
    float qk, QueryRow row, int key, bool is_valid, const device bool* bool_mask,
    const device float* float_mask, const device float* alibi_slopes, constant AttentionParams& p) {
  if (!is_valid || key < row.first || key >= row.stop) {
    return -INFINITY;
  }
  float score = qk * p.scale;
  if (HAS_SOFTCAP) {
    score = p.softcap * precise::tanh(score / p.softcap);
  }
  if (HAS_ALIBI) {
    score += alibi_slopes[row.head] * float(key - row.position);
  }
  if (HAS_BOOL_MASK) {
    score = bool_mask[row.mask + key * p.mask_strides[3]] ? score : -INFINITY;
  }
  if (HAS_FLOAT_MASK) {
    const float bias = float_mask[row.mask + key * p.mask_strides[3]];
    return bias == -INFINITY ? bias : in_log2(score + bias);
  }
  return score * LOG2E;
}

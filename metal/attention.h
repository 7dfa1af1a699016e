// The tile kernel's own function constants, a query row and the keys that it sees.

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
};

inline QueryRow query_row(int row, int head_slot, int context, constant AttentionParams& p) {
  QueryRow result;
  result.token = row / p.group;
  result.head = head_slot * p.group + row % p.group;
  result.position = context - p.num_tokens + result.token;
  const KeyRange keys = key_range(result.position, context, CAUSAL, HAS_WINDOW ? p.window : 0);
  result.first = keys.first;
  result.stop = row < p.group * p.num_tokens ? keys.stop : 0;
  return result;
}

// Dimension d of a query row, rotated: pairs (d, d + R / 2) by angle d.
template <typename Q>
inline float rotated_element(const device Q* q, const device float* angles, int d,
                             constant AttentionParams& p) {
  const float own = float(q[d]);
  if (d >= 2 * p.rope_pairs) {
    return own;
  }
  const bool is_first = d < p.rope_pairs;
  const float angle = angles[is_first ? d : d - p.rope_pairs];
  const float other = float(q[is_first ? d + p.rope_pairs : d - p.rope_pairs]);
  return own * precise::cos(angle) + (is_first ? -other : other) * precise::sin(angle);
}

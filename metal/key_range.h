// The keys that a query sees without a mask: [first, stop).
struct KeyRange {
  int first;
  int stop;
};

// `window` is the most keys that it sees, or 0.
inline KeyRange key_range(int position, int context, bool is_causal, int window) {
  KeyRange keys;
  keys.first = window > 0 ? max(0, position - window + 1) : 0;
  const int stop = is_causal || window > 0 ? position + 1 : context;
  keys.stop = position >= 0 ? stop : 0;
  return keys;
}

// Where the splits of a sequence begin: its first token sees no key before. A multiple of
// SPLIT_STEP, so that no two splits load the keys of one step.
inline int first_split_key(int context, int num_tokens, int window) {
  const KeyRange keys = key_range(max(0, context - num_tokens), context, true, window);
  return keys.first / SPLIT_STEP * SPLIT_STEP;
}

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

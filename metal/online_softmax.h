// Streaming softmax in units of log2 (Milakov and Gimelshein 2018, "Online normalizer
// calculation").

constant constexpr float LOG2E = 1.44269504088896340736f;

// Below every score: the running maximum before the first key. Finite, so that differences are.
constant constexpr float LOWEST = -3.0e38f;

// What turns sums taken relative to the maximum `old_max` into sums relative to `new_max`.
inline float rescale(float old_max, float new_max) { return exp2(old_max - new_max); }

// A denominator relative to `maximum` with an attention sink added. A sink far above every score
// may overflow it to infinity, and then the weights are zero, as they should be.
inline float add_sink(float sum, float maximum, float sink) {
  return sum + exp2(sink * LOG2E - maximum);
}

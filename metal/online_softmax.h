// Streaming softmax in units of log2 (Milakov and Gimelshein 2018, "Online normalizer
// calculation").

constant constexpr float LOG2E = 1.44269504088896340736f;

// Below every score: the running maximum before the first key. Finite, so that differences are.
constant constexpr float LOWEST = -3.0e38f;

// What turns sums taken relative to the maximum `old_max` into sums relative to `new_max`.
inline float rescale(float old_max, float new_max) { return fast::exp2(old_max - new_max); }

// The weight of a score relative to a maximum. Written out for NaN and +inf, of which fast::exp2
// promises nothing: a sum of weights stays NaN whatever is added or multiplied afterwards.
inline float weight_of(float score, float maximum) {
  return score < INFINITY ? fast::exp2(score - maximum) : NAN;
}

// A value in units of log2, where the lowest floats would become -inf. NaN stays NaN.
inline float in_log2(float value) {
  const float scaled = value * LOG2E;
  return scaled < LOWEST ? LOWEST : scaled;
}

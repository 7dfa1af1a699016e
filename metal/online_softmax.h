// Streaming softmax in units of log2 (Milakov and Gimelshein 2018, "Online normalizer
// calculation").

constant constexpr float LOG2E = 1.44269504088896340736f;

// The running maximum before the first key: below every score, but finite, as differences must be.
constant constexpr float LOWEST = -3.0e38f;

// The factor that turns sums relative to the maximum `old_max` into sums relative to `new_max`.
inline float rescale(float old_max, float new_max) { return fast::exp2(old_max - new_max); }

// The weight of a score relative to a maximum. The result of fast::exp2 is undefined for NaN and
// +inf, so these give NaN here: then the sum of weights stays NaN.
inline float weight_of(float score, float maximum) {
  return score < INFINITY ? fast::exp2(score - maximum) : NAN;
}

// Converts a value to units of log2. The lowest floats become LOWEST, not -inf. NaN stays NaN.
inline float in_log2(float value) {
  const float scaled = value * LOG2E;
  return scaled < LOWEST ? float(LOWEST) : scaled;
}

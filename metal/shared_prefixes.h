// Sequences that begin with the same blocks: which of their keys are computed for several at once.
//
// `prefixes` has an order of the sequences, and then for each place in it how many first keys this
// sequence has in the same blocks as the one before. Keys that a sequence shares are divided into
// splits. In a split, places that share all of it with a neighbour are one run, and so are those
// that share its first keys, up to the least that two of them have in common. The other keys of a
// sequence are its own: their splits begin with the first of them. Each kernel finds both by the
// functions here, so that all agree, whatever the numbers are. A sequence that the order names
// twice gets wrong results; no other does.

constant bool HAS_PREFIXES [[function_constant(22)]];

constant constexpr int FEWEST_SHARED = 64;  // keys of a split that are worth it
constant constexpr int MOST_KEYS = 0x7FFFFFFF;

// Neighbours in the order, [first, stop), and the first keys that all of them share.
struct Run {
  int first;
  int stop;
  int common;
};

// How many first keys a place shares with the one before: no more than both contexts have, or a
// table.
inline int shared_keys(int place, const device int* prefixes, const device int* context_lens,
                       int stride, int count, int most) {
  if (place <= 0 || place >= count) {
    return 0;
  }
  const int before = clamp(prefixes[place - 1], 0, count - 1);
  const int own = clamp(prefixes[place], 0, count - 1);
  const int context = min(context_lens[before * stride], context_lens[own * stride]);
  return clamp(prefixes[count + place], 0, clamp(context, 0, most));
}

// The run of a place: neighbours share `lowest` keys at least, fewer than `end`, and with others
// fewer than that, too. All lanes have the same place.
inline Run run_of(int place, int lowest, int end, int lane, const device int* prefixes,
                  const device int* context_lens, int stride, int count, int most) {
  Run run;
  run.first = 0;
  run.stop = count;
  for (int i = lane; i < count; i += LANES) {
    const int same = shared_keys(i, prefixes, context_lens, stride, count, most);
    const int around = max(shared_keys(i - 1, prefixes, context_lens, stride, count, most),
                           shared_keys(i + 1, prefixes, context_lens, stride, count, most));
    if (same < lowest || max(same, around) >= end) {  // it begins a run
      run.first = i <= place ? max(run.first, i) : run.first;
      run.stop = i > place ? min(run.stop, i) : run.stop;
    }
  }
  run.first = simd_max(run.first);
  run.stop = simd_min(run.stop);
  run.common = most;
  for (int i = run.first + 1 + lane; i < run.stop; i += LANES) {
    run.common = min(run.common, shared_keys(i, prefixes, context_lens, stride, count, most));
  }
  run.common = simd_min(run.common);
  return run;
}

// The run of a place in a split of the shared keys; of one place if it shares none of it.
inline Run run_in_split(int place, int split, int split_keys, int lane, const device int* prefixes,
                        const device int* context_lens, int stride, int count, int most) {
  const int lowest = split * split_keys + FEWEST_SHARED;
  const int end = (split + 1) * split_keys;
  const int same = max(shared_keys(place, prefixes, context_lens, stride, count, most),
                       shared_keys(place + 1, prefixes, context_lens, stride, count, most));
  Run run;
  run.first = place;
  run.stop = place + 1;
  run.common = 0;
  if (same >= lowest) {
    run = run_of(place, same < end ? lowest : end, same < end ? end : int(MOST_KEYS), lane,
                 prefixes, context_lens, stride, count, most);
    run.common = min(run.common, end);
  }
  return run;
}

// The first key of a sequence that is its own.
inline int first_own_key(int sequence, int split_keys, int lane, const device int* prefixes,
                         const device int* context_lens, int stride, int count, int most) {
  int place = count;
  for (int i = lane; i < count; i += LANES) {
    place = prefixes[i] == sequence ? min(place, i) : place;
  }
  place = simd_min(place);
  const int same = max(shared_keys(place, prefixes, context_lens, stride, count, most),
                       shared_keys(place + 1, prefixes, context_lens, stride, count, most));
  const int split = same / split_keys;
  const Run run =
      run_in_split(place, split, split_keys, lane, prefixes, context_lens, stride, count, most);
  return run.stop - run.first > 1 ? run.common : split * split_keys;
}

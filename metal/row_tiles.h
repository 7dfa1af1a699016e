// The query rows that a threadgroup of the matrix kernel computes, and the keys that they see.

constant bool VALUES_IN_KEYS [[function_constant(12)]];  // V is the first columns of K
constant bool HAS_SEQLENS [[function_constant(17)]];     // a ragged batch
constant bool OF_SHARED [[function_constant(23)]];       // keys, not of own ones
constant bool SHARES = HAS_PREFIXES && OF_SHARED;

// The tokens of a sequence in q, and the first row that a threadgroup computes of them. Of shared
// keys it computes several sequences of one token each: then tokens are places in their order, and
// the first place's sequence is the one whose table is read.
struct RowTile {
  int sequence;
  int first_token;
  int num_tokens;
  int first_row;
  int shared_stop;  // where the keys that they share end in this split
};

// In a ragged batch sequence s has the tiles from this one on; s = B has the tokens after the last.
template <int ROWS>
inline int tile_start(int sequence, const device int* cu_seqlens, constant AttentionParams& p) {
  return clamp(cu_seqlens[sequence], 0, p.num_tokens) * p.group / ROWS + sequence;
}

template <int ROWS>
inline RowTile ragged_tile(int index, const device int* cu_seqlens, constant AttentionParams& p) {
  int low = p.first_sequence;
  const int tile = tile_start<ROWS>(low, cu_seqlens, p) + index;
  int high = p.num_sequences;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tile_start<ROWS>(middle, cu_seqlens, p) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  RowTile result;
  result.sequence = low;
  // Wrong values may fall: the last tokens are not those of the last sequence, too.
  const int before = low < p.num_sequences ? 0 : cu_seqlens[low - 1];
  result.first_token = clamp(max(cu_seqlens[low], before), 0, p.num_tokens);
  const int end = low < p.num_sequences ? cu_seqlens[low + 1] : int(p.num_tokens);
  result.num_tokens = clamp(end, result.first_token, p.num_tokens) - result.first_token;
  result.first_row = (tile - tile_start<ROWS>(low, cu_seqlens, p)) * ROWS;
  return result;
}

// The token of a row, and its sequence.
struct RowPlace {
  int sequence;
  int token;
};

inline RowPlace place_of(RowTile tile, int row, const device int* prefixes,
                         constant AttentionParams& p) {
  RowPlace place;
  place.sequence = tile.sequence;
  place.token = tile.first_token + row / p.group;
  if (SHARES) {
    place.sequence = clamp(prefixes[place.token], 0, p.num_sequences - 1);
    place.token = 0;
  }
  return place;
}

// The tile that begins at a place in the order of the sequences; without tokens if none does.
template <int ROWS>
inline RowTile shared_tile(int place, int split, int lane, const device int* prefixes,
                           const device int* context_lens, constant AttentionParams& p) {
  const Run run = run_in_split(place, split, p.keys_per_shared_split, lane, prefixes, context_lens,
                               p.context_stride, p.num_sequences, p.max_blocks * BLOCK_SIZE);
  const int count = run.stop - run.first;
  const int num_tiles = (count - 1) / (ROWS / p.group) + 1;
  const int most = (count - 1) / num_tiles + 1;
  RowTile tile;
  tile.sequence = 0;
  tile.first_token = place;
  tile.num_tokens = count > 1 && (place - run.first) % most == 0 ? min(most, run.stop - place) : 0;
  tile.first_row = 0;
  tile.shared_stop = run.common;
  tile.sequence = place_of(tile, 0, prefixes, p).sequence;
  return tile;
}

// The number of a query row among all rows of the call.
inline long row_index(RowTile tile, int row, int head_slot, const device int* prefixes,
                      constant AttentionParams& p) {
  const RowPlace place = place_of(tile, row, prefixes, p);
  const int head = head_slot * p.group + row % p.group;
  return HAS_SEQLENS ? long(place.token) * p.num_heads + head
                     : (long(place.sequence) * p.num_heads + head) * p.num_tokens + place.token;
}

// The keys that a row sees.
inline KeyRange keys_of_row(RowTile tile, int row, int context, constant AttentionParams& p) {
  const int position = context - tile.num_tokens + row / p.group;
  KeyRange keys = key_range(position, context, CAUSAL, HAS_WINDOW ? p.window : 0);
  if (SHARES) {
    keys.first = 0;
    keys.stop = tile.shared_stop;
  }
  return keys;
}

// Rows of new keys and values, which the pool gets.

constant int BLOCK_SIZE [[function_constant(15)]];
constant bool WHOLE_VECTORS [[function_constant(16)]];  // new rows are as dense as rows of the pool

// Four neighbouring elements of a new row.
template <typename T>
inline vec<T, VECTOR> new_elements(const device T* row, int vector, long stride) {
  const long apart = WHOLE_VECTORS ? 1 : stride;
  return gather_vector(row + VECTOR * vector * apart, apart, WHOLE_VECTORS);
}

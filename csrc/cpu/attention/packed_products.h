// Scores and outputs of a row tile with many rows. Keys and values are first packed as float32 in
// the order in which a matrix product reads them; all rows share the packed form. See simd.h for
// the rules of inclusion.
#pragma once

#include "csrc/cpu/attention/scales.h"

namespace mlx_paged::cpu::KERNEL_ISA {

// A packed matrix [depth, width] is stored in panels of this many columns, each [depth, kPanel].
// The remaining columns, a multiple of kLanes, are stored in panels of kLanes columns.
inline constexpr int32_t kPanel = kColumnBlock * kLanes;

// The width of the panel that holds a column.
inline int32_t panel_width(int32_t width, int32_t column) {
  return column < width / kPanel * kPanel ? kPanel : kLanes;
}

// The start of a column of a packed matrix of `depth` rows.
inline float* packed_column(float* packed, int32_t depth, int32_t width, int32_t column) {
  const int32_t in_panel = column % panel_width(width, column);
  return packed + depth * (column - in_panel) + in_panel;
}

static_assert(kKeyTile % kPanel == 0);

// Keys [kKeyTile, D], transposed to [D padded, kKeyTile].
template <typename T>
[[gnu::noinline]] void pack_keys(const KeyTile<T>& tile, int32_t head_dim, float* packed) {
  const int32_t depth = padded(head_dim);
  for (int32_t key = 0; key < kKeyTile; key += kLanes) {
    for (int32_t d = 0; d < head_dim; d += kLanes) {
      Floats rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        rows[i] = load_up_to(element(tile.k[key + i], d), head_dim - d);
      }
      transpose(rows);
      float* to = packed_column(packed, depth, kKeyTile, key) + d * kPanel;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        store(to + i * kPanel, rows[i]);
      }
    }
  }
}

// Values [kKeyTile, D_v padded].
template <typename T>
[[gnu::noinline]] void pack_values(const KeyTile<T>& tile, int32_t value_dim, float* packed) {
  const int32_t width = padded(value_dim);
  ValueScales scales;
  const auto pack_columns = [&](int32_t group, int32_t first, int32_t end) {
    if constexpr (kScaled<T>) {
      scales.load_group(tile, group);
    }
    for (int32_t column = first; column < end; column += kLanes) {
      float* to = packed_column(packed, kKeyTile, width, column);
      const int32_t stride = panel_width(width, column);
      for (int32_t key = 0; key < kKeyTile; ++key) {
        Floats v = load_up_to(element(tile.v[key], column), value_dim - column);
        if constexpr (kScaled<T>) {
          v = scales.value<T>(key, v);
        }
        store(to + key * stride, v);
      }
    }
  };
  for_groups<T>(value_dim, pack_columns);
}

// c = c * rescale + a . panel for kRows rows and kColumns registers of columns.
template <int kRows, int kColumns>
[[gnu::noinline]] void multiply_panel(const float* a, int32_t a_stride, const float* panel,
                                      int32_t depth, const float* rescale, float* c,
                                      int32_t c_stride) {
  Floats sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kColumns; ++i) {
      sum[r][i] = load(c + r * c_stride + i * kLanes) * rescale[r];
    }
  }
  for (int32_t k = 0; k < depth; ++k, panel += kColumns * kLanes) {
    Floats b[kColumns];
    for (int i = 0; i < kColumns; ++i) {
      b[i] = load(panel + i * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      const Floats a_k = broadcast(a[r * a_stride + k]);
      for (int i = 0; i < kColumns; ++i) {
        sum[r][i] += a_k * b[i];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kColumns; ++i) {
      store(c + r * c_stride + i * kLanes, sum[r][i]);
    }
  }
}

// The lanes of a row's sum in score_block are its elements kLane, kLane + kLanes, ..., whose halves
// sum_each adds. The lanes are summed here one after another, in an order in which each half
// is ready when the other one is: number kNumber is the lane whose bits are kNumber's in reverse.
constexpr int reversed(int number) {
  int lane = 0;
  for (int bit = 1; bit < kLanes; bit *= 2) {
    lane = 2 * lane + (number & bit ? 1 : 0);
  }
  return lane;
}

// The scores of one lane of kRows rows and the keys of a panel, to which the unfinished halves are
// added that it completes. So a row's scores do not depend on the number of rows.
template <int kRows, int kNumber>
[[gnu::always_inline]] inline void score_lane(const float* q, int32_t q_stride, const float* panel,
                                              int32_t depth, float* halves, float* scores) {
  constexpr int kUnfinished = __builtin_popcount(kNumber);
  constexpr int kCompleted = __builtin_ctz(kNumber + 1);
  constexpr bool kIsLast = kNumber == kLanes - 1;
  constexpr int kStride = kIsLast ? kKeyTile : kPanel;
  Floats sum[kRows][kColumnBlock];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kColumnBlock; ++i) {
    sum[i / kColumnBlock][i % kColumnBlock] = Floats{};
  }
  int32_t k = reversed(kNumber);
  do {
#pragma GCC unroll 4
    for (int i = 0; i < kColumnBlock; ++i) {
      const Floats keys = load(panel + k * kPanel + i * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sum[r][i] += keys * broadcast(q[r * q_stride + k]);
      }
    }
  } while ((k += kLanes) < depth);
  float* to = kIsLast ? scores : halves + (kUnfinished - kCompleted) * kRows * kPanel;
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kColumnBlock; ++i) {
#pragma GCC unroll 4
      for (int half = kUnfinished - 1; half >= kUnfinished - kCompleted; --half) {
        sum[r][i] += load(halves + (half * kRows + r) * kPanel + i * kLanes);
      }
      store(to + r * kStride + i * kLanes, sum[r][i]);
    }
  }
}

// The scores of kRows rows and the keys of a panel.
template <int kRows, int... kNumber>
[[gnu::noinline]] void score_panel(const float* q, int32_t q_stride, const float* panel,
                                   int32_t depth, float* scores,
                                   std::integer_sequence<int, kNumber...>) {
  float halves[__builtin_ctz(kLanes) * kRows * kPanel];
  (score_lane<kRows, kNumber>(q, q_stride, panel, depth, halves, scores), ...);
}

// scores [num_rows, kKeyTile] = q [num_rows, D] . packed keys. Calls after_block(row) after
// each kRowBlock rows of the first panel.
template <typename AfterBlock>
void score_packed(const float* q, int32_t q_stride, int32_t num_rows, float* packed,
                  int32_t head_dim, float* scores, AfterBlock after_block) {
  const int32_t depth = padded(head_dim);
  for (int32_t column = 0; column < kKeyTile; column += kPanel) {
    const float* panel = packed_column(packed, depth, kKeyTile, column);
    for_row_blocks(num_rows, [&]<int kRows>(int32_t row) {
      score_panel<kRows>(q + row * q_stride, q_stride, panel, depth,
                         scores + row * kKeyTile + column,
                         std::make_integer_sequence<int, kLanes>());
      if (column == 0) {
        after_block(row);
      }
    });
  }
}

// A packed matrix of `rows` rows, of which a product uses the first `depth`.
struct Packed {
  const float* data;
  int32_t rows;
  int32_t depth;
  int32_t width;
};

// c [num_rows, width] = c * rescale + a [num_rows, depth] . b. Calls after_block(row) after each
// block of rows of the first panel.
template <typename AfterBlock>
void multiply_packed(const float* a, int32_t a_stride, int32_t num_rows, const Packed& b,
                     const float* rescale, float* c, int32_t c_stride, AfterBlock after_block) {
  const auto panel = [&]<int kColumns>(int32_t column) {
    for_row_blocks(num_rows, [&]<int kRows>(int32_t r) {
      multiply_panel<kRows, kColumns>(a + r * a_stride, a_stride, b.data + b.rows * column, b.depth,
                                      rescale + r, c + r * c_stride + column, c_stride);
      if (column == 0) {
        after_block(r);
      }
    });
  };
  int32_t column = 0;
  for (; column + kPanel <= b.width; column += kPanel) {
    panel.template operator()<kColumnBlock>(column);
  }
  for (; column < b.width; column += kLanes) {
    panel.template operator()<1>(column);
  }
}

}  // namespace mlx_paged::cpu::KERNEL_ISA

"""Which positions each row of a padded forward computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.kv.block_tables import Int32Array


@dataclass(frozen=True, eq=False)
class RowSpans:
    """B rows of N columns: column c of row b is position ``starts[b] + c`` of its sequence.

    Columns at negative positions (left padding) and from ``lengths[b]`` on (right padding) are not
    tokens: their K/V is written nowhere.

    Attributes:
        starts: ``[B]`` int32, position of the first column.
        lengths: ``[B]`` int32, columns that are not right padding, each in [0, N].
        columns: N.
    """

    starts: Int32Array
    lengths: Int32Array
    columns: int

    @classmethod
    def of(
        cls,
        starts: Int32Array | Sequence[int],
        columns: int,
        lengths: Int32Array | None = None,
    ) -> "RowSpans":
        """Spans of `columns` tokens, no more than `lengths` of them real."""
        starts = np.asarray(starts, np.int32)
        if lengths is None:
            return cls(starts, np.full(starts.size, columns, np.int32), columns)
        return cls(starts, np.clip(lengths, 0, columns).astype(np.int32), columns)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RowSpans)
            and self.columns == other.columns
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.lengths, other.lengths)
        )

    @property
    def stops(self) -> Int32Array:
        """``[B]`` int32, position after each row's last token."""
        return self.starts + self.lengths

    @property
    def max_context(self) -> int:
        """The longest context, these tokens included: length of gathered keys, at least 1."""
        return max(1, int(self.stops.max(initial=0)))

    @property
    def positions(self) -> Int32Array:
        """``[B, N]`` int32, of every column."""
        columns: Int32Array = np.arange(self.columns, dtype=np.int32)
        return self.starts[:, None] + columns

    @property
    def are_tokens(self) -> npt.NDArray[np.bool_]:
        """``[B, N]`` bool: which columns are not padding."""
        columns = np.arange(self.columns, dtype=np.int32)
        return (columns < self.lengths[:, None]) & (columns >= -self.starts[:, None])

    def mask(self, window: int | None) -> mx.array:
        """``[B, 1, N, S]`` bool over gathered keys: causal, no further back than `window`."""
        keys = mx.arange(self.max_context)
        queries = mx.array(self.starts)[:, None, None, None] + mx.arange(self.columns)[:, None]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

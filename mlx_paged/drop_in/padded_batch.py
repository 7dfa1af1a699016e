"""One padded forward over sequences of a pool: the arrays that all its layers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.attention.pool_attention import Chunk, causal_mask, max_paged_queries
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import as_int32


@dataclass(frozen=True, eq=False)
class PaddedSpans:
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
    ) -> "PaddedSpans":
        """Rows of `columns` columns; of these at most `lengths` are no right padding."""
        starts = np.asarray(starts, np.int32)
        if lengths is None:
            return cls(starts, np.full_like(starts, columns), columns)
        return cls(starts, np.clip(lengths, 0, columns, dtype=np.int32), columns)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PaddedSpans)
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
        """Length of gathered keys: the longest context, these tokens included, at least 1."""
        return max(1, int(self.stops.max(initial=0)))

    @property
    def positions(self) -> Int32Array:
        """``[B, N]`` int32, the position of every column."""
        columns: Int32Array = np.arange(self.columns, dtype=np.int32)
        return self.starts[:, None] + columns

    @property
    def are_tokens(self) -> npt.NDArray[np.bool_]:
        """``[B, N]`` bool: which columns are not padding."""
        columns = np.arange(self.columns, dtype=np.int32)
        return (columns < self.lengths[:, None]) & (columns >= -self.starts[:, None])

    def mask(self, window: int | None) -> mx.array:
        """``[B, 1, N, S]`` bool over gathered keys: causal, of at most `window` tokens."""
        queries = mx.array(self.starts)[:, None, None, None] + mx.arange(self.columns)[:, None]
        return causal_mask(queries, self.max_context, window)


class PaddedBatch:
    """B rows of N columns, with their block tables and slot mapping.

    Args:
        ids: the sequence of each row.
        spans: the positions that each row computes.
        tables: ``[B, M]`` int32 block tables; entries after a row's own blocks have no meaning.
        block_size: token slots in a block.

    Attributes:
        valid: whether the tables still hold: no later step wrote a row, and no row was forked.
        reads: what the latest layer read, if it has a window. It depends on all reads before it.
        firsts: the first position that each row holds.
        max_paged_queries: columns up to which the paged op attends.
    """

    def __init__(
        self, ids: tuple[int, ...], spans: PaddedSpans, tables: Int32Array, block_size: int
    ) -> None:
        self.ids = ids
        self.spans = spans
        self.valid = True
        self.reads: tuple[mx.array, ...] = ()
        self.firsts: list[int] = []
        self.max_paged_queries = max_paged_queries()
        self._block_size = block_size
        self._host_tables = self._wide_enough(tables)

    def _wide_enough(self, tables: Int32Array) -> Int32Array:
        """The tables with exactly as many columns as the forward's positions need."""
        longest = max(1, int(self.spans.starts.max(initial=0)) + self.spans.columns)
        width = -(-longest // self._block_size)
        missing = max(0, width - tables.shape[1])
        return np.pad(tables, ((0, 0), (0, missing)))[:, :width]

    def serves(self, ids: tuple[int, ...], spans: PaddedSpans) -> bool:
        """Whether another layer of the same forward can use it."""
        return self.valid and self.ids == ids and self.spans == spans

    @cached_property
    def slots(self) -> mx.array:
        """``[B * N]`` int32, slot mapping of the columns; -1 for padding."""
        positions, size = self.spans.positions, np.int32(self._block_size)
        blocks = np.take_along_axis(self._host_tables, np.maximum(positions, 0) // size, axis=1)
        slots = np.where(self.spans.are_tokens, blocks * size + positions % size, np.int32(-1))
        return as_int32(slots.reshape(-1))

    @cached_property
    def tables(self) -> mx.array:
        """``[B, M]`` int32."""
        return mx.array(self._host_tables)

    @cached_property
    def context_lens(self) -> mx.array:
        """``[B]`` int32, position after each row's last column, padding included."""
        return as_int32(self.spans.starts + np.int32(self.spans.columns))

    @cached_property
    def next_offset(self) -> mx.array:
        """``[B]`` int32, position of each row's next token."""
        return as_int32(self.spans.stops)

    @cached_property
    def chunks(self) -> list[Chunk | None]:
        """Each row's tokens; `first_row` is their first column. None for a row of padding."""
        return [self._chunk(row) for row in range(len(self.ids))]

    def _chunk(self, row: int) -> Chunk | None:
        start, stop = int(self.spans.starts[row]), int(self.spans.stops[row])
        first = max(start, 0)
        if stop <= first:
            return None
        blocks = self._host_tables[row, : -(-stop // self._block_size)]
        return Chunk(first - start, first, stop - first, mx.array(blocks))

    def gathered(self, cache: mx.array) -> mx.array:
        """``[B, H_kv, S, D]``, each row's context of one layer's ``[H_kv, num_blocks, ...]``, with
        zeros for what the row let go."""
        length = self.spans.max_context
        found = ops.gather_blocks(cache, self.tables[:, : -(-length // self._block_size)], length)
        return mx.where(self._held, found, 0) if any(self.firsts) else found

    @cached_property
    def _held(self) -> mx.array:
        """``[B, 1, S, 1]`` bool: which positions a row holds."""
        firsts = mx.array(self.firsts, mx.int32)[:, None, None, None]
        return mx.arange(self.spans.max_context)[:, None] >= firsts

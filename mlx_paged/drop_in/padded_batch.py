"""One padded forward over sequences of a pool: the arrays that all its layers share."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from mlx_paged.attention.forward import Chunk, Forward
from mlx_paged.attention.paths import FEW_QUERIES, max_paged_queries
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.kv.pool import as_int32
from mlx_paged.ops import padded_arrays


@dataclass
class PaddedSpans:
    """B rows of N columns: column c of row b is position ``starts[b] + c`` of its sequence.

    Columns at negative positions (left padding) and from ``lengths[b]`` on (right padding) are not
    tokens: their K/V is written nowhere.
    """

    starts: tuple[int, ...]  # of each row, position of the first column
    lengths: tuple[int, ...]  # of each row, columns that are not right padding, each in [0, N]
    columns: int  # N
    is_full: bool = field(compare=False)  # whether no row was given right padding

    @classmethod
    def of(
        cls, starts: Sequence[int], columns: int, lengths: Sequence[int] | None = None
    ) -> "PaddedSpans":
        """Rows of `columns` columns; of these at most `lengths` are no right padding."""
        if lengths is None:
            return cls(tuple(starts), (columns,) * len(starts), columns, True)
        kept = tuple(max(0, min(length, columns)) for length in lengths)
        return cls(tuple(starts), kept, columns, False)

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Position after each row's last token."""
        return tuple(map(operator.add, self.starts, self.lengths))

    @cached_property
    def max_context(self) -> int:
        """Length of gathered keys: the longest context, these tokens included, at least 1."""
        return max((1, *self.stops))


class PaddedBatch(Forward):
    """B rows of N columns, with their block tables and slot mapping."""

    slot_mapping: mx.array
    next_offset: mx.array

    def __init__(
        self,
        ids: tuple[int, ...],  # the sequence of each row
        spans: PaddedSpans,  # the positions that each row computes
        # ``[R, M]`` int32 block tables; entries after a row's own blocks have no meaning.
        tables: Int32Array,
        block_size: int,  # token slots in a block
        rows: Sequence[int],  # which of these tables each row has
        firsts: Sequence[int] = (),  # the first position that each row holds; default 0
    ) -> None:
        self.ids = ids
        self.spans = spans
        # Whether the tables still hold: no later step wrote a row, and no row was forked.
        self.valid = True
        # What the latest layer read, if that layer has a window. The next write waits for it. It
        # depends on the reads of the layers before.
        self.reads: tuple[mx.array, ...] = ()
        self.max_paged_queries = max_paged_queries()  # the most columns for which the op attends
        arrays = padded_arrays(spans.starts, spans.lengths, spans.columns, tables, rows, block_size)
        positions, slots, row_tables, lens, offset, next_offset = arrays
        longest = spans.max_context
        super().__init__(
            spans.columns, positions, slots, row_tables, lens, longest, offset, next_offset
        )
        if any(firsts):
            held_from = as_int32(firsts)[:, None, None, None]
            self.held = mx.arange(spans.max_context)[:, None] >= held_from
        if spans.columns > max(FEW_QUERIES, self.max_paged_queries):
            self.row_chunks = [
                _chunk(tables[row], start, stop, block_size)
                for row, start, stop in zip(rows, spans.starts, spans.stops, strict=True)
            ]

    def serves(self, ids: tuple[int, ...], spans: PaddedSpans) -> bool:
        """Whether another layer of the same forward can use it."""
        return self.valid and self.ids == ids and self.spans == spans


def _chunk(table: Int32Array, start: int, stop: int, block_size: int) -> Chunk | None:
    """A row's tokens without its padding; None for a row of padding."""
    first = max(start, 0)
    if stop <= first:
        return None
    blocks = mx.array(table[: ceil_div(stop, block_size)])
    return Chunk(first - start, first, stop - first, blocks)

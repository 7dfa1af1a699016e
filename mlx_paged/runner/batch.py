"""A step's spans as the arrays of one forward of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import ClassVar

import mlx.core as mx
import numpy as np

from mlx_paged.attention.pool_attention import Chunk, causal_mask
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import as_int32
from mlx_paged.request import Request
from mlx_paged.scheduler.step import Span

SPARE_COLUMNS = 16
"""Blocks by which the longest sequence may grow before all rows are copied again."""


class BatchTables:
    """The block tables of a batch's sequences, on the host and on the device.

    While the batch has the same sequences, an update writes only entries for their new blocks. If
    there are none, the device's array stays. All rows are copied when another sequence joins, when
    the order changes, or when a row's blocks were replaced: by copy-on-write, or because its
    sequence was preempted and runs again.

    Attributes:
        array: ``[R, longest]`` int32, as of the last :meth:`update`; entries past a row's end are
            undefined.
    """

    array: mx.array
    _seq_ids: list[int]
    _rows: Int32Array  # rows of these sequences in the allocator's tables
    _lengths: Int32Array  # number of blocks of each sequence
    _host: Int32Array  # the host's copy, wider than `array`
    _version: int  # version of the allocator's tables that was copied

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._take_over([])

    def update(self, seq_ids: list[int]) -> None:
        """Make these the tables of the sequences `seq_ids` as they are now."""
        tables = self._allocator.block_tables
        if seq_ids != self._seq_ids or self._is_outdated():
            self._take_over(seq_ids)
            return
        self._version = tables.version
        lengths = tables.lengths(self._rows)
        grown = np.flatnonzero(lengths != self._lengths).astype(np.int32)
        if grown.size == 0:
            return
        columns = self._lengths[grown]
        if lengths.max() > self._host.shape[1] or (lengths[grown] > columns + 1).any():
            self._take_over(seq_ids)
            return
        self._host[grown, columns] = tables.entries(self._rows[grown], columns)
        self._lengths = lengths
        self._upload()

    def blocks_at(self, columns: Int32Array) -> Int32Array:
        """For each sequence the block in its column of the table, ``[R]``."""
        blocks: Int32Array = self._host[np.arange(len(columns)), columns]
        return blocks

    def host(self) -> Int32Array:
        """The content of `array`, on the host."""
        return self._host[:, : self._lengths.max(initial=0)]

    def _is_outdated(self) -> bool:
        tables = self._allocator.block_tables
        if tables.version == self._version:
            return False
        rows = self._allocator.table_rows(self._seq_ids)
        return bool(tables.changed_since(rows, self._version).any())

    def _take_over(self, seq_ids: list[int]) -> None:
        tables = self._allocator.block_tables
        self._seq_ids = list(seq_ids)
        self._version = tables.version
        self._rows = self._allocator.table_rows(seq_ids)
        self._lengths = tables.lengths(self._rows)
        entries = tables.rows(self._rows)
        width = entries.shape[1]
        self._host = np.zeros((len(entries), width + SPARE_COLUMNS), np.int32)
        self._host[:, :width] = entries
        self._upload()

    def _upload(self) -> None:
        # MLX copies a contiguous array much faster than columns of a wider one.
        self.array = mx.array(np.ascontiguousarray(self.host()))


class Layout(StrEnum):
    """How tokens are laid out in the model's input."""

    ROWS = "rows"  # inputs [T, 1]: every token is a batch row with its own position
    CHUNK = "chunk"  # inputs [1, L]: consecutive tokens of one sequence


@dataclass(frozen=True, eq=False)
class SampledRows:
    """A batch's sampled tokens: R rows that attend and whose K/V is stored already.

    Attributes:
        positions: ``[R]`` int32.
        context_lens: ``[R]`` int32, the token itself included.
        block_tables: ``[R, max_blocks]`` int32.
        max_context: the longest context.
    """

    positions: mx.array
    context_lens: mx.array
    block_tables: mx.array
    max_context: int
    layout: ClassVar[Layout] = Layout.ROWS
    chunks: ClassVar[tuple[Chunk, ...]] = ()

    @property
    def num_decodes(self) -> int:
        return self.positions.size

    @property
    def row_tables(self) -> mx.array:
        return self.block_tables

    @property
    def next_offset(self) -> mx.array:
        return self.context_lens

    def mask(self, window: int | None) -> mx.array:
        """``[R, 1, 1, S]`` bool over gathered keys: causal, within `window`."""
        return causal_mask(self.positions[:, None, None, None], self.max_context, window)


@dataclass(frozen=True, eq=False)
class PendingTokens:
    """Tokens that a running step is choosing: one for each of `requests`, ``[R]`` int32."""

    requests: list[Request]
    tokens: mx.array

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The index of each request's token, by request id."""
        return {request.id: row for row, request in enumerate(self.requests)}


class Batch:
    """The arrays of one forward, shared by all layers.

    T tokens: first the single ones (decodes), then those of chunks. The host data is in range by
    construction, so nothing here checks it again.

    Attributes:
        tokens: ``[T]`` int32 ids.
        positions: ``[T]`` int32, of each token in its sequence.
        num_tokens: T.
        slot_mapping: ``[T]`` int32, the slot for each token's K/V.
        num_decodes: how many of the first tokens are single ones, attended through block tables.
        block_tables: ``[num_decodes, max_blocks]`` int32.
        context_lens: ``[num_decodes]`` int32, the token itself included.
        offset: the rotary offset: `positions`, or of a chunk the position of its first token.
        next_offset: the same after these tokens.
        max_context: the longest context, which is the length of gathered keys.
        chunks: the other tokens, sequence by sequence.
        sampled: the requests that get a token.
        sampled_lengths: number of tokens of each of `sampled` before this one, tokens that are
            still being chosen included; ``[R]`` int32, on the host.
        num_sampled_rows: how many rows need logits.
        samples_all: whether every row needs logits, each for one request.
        logits_of: for each of `sampled` the row of logits to draw from; None: its own.
        seq_ids: the sequence of each span.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        allocator: BlockAllocator,
        layout: Layout = Layout.ROWS,
        coming: PendingTokens | None = None,
        tables: BatchTables | None = None,
    ) -> None:
        """Lay out `spans`: any number for rows, exactly one for a chunk.

        Args:
            coming: tokens of the step before that are not known yet.
            tables: the tables of the batch before, which are updated; None: new ones.
        """
        assert layout is Layout.ROWS or len(spans) == 1
        self.layout = layout
        singles = [s for s in spans if s.stop - s.start == 1] if layout is Layout.ROWS else []
        if 0 < len(singles) < len(spans):
            spans = singles + [s for s in spans if len(s) > 1]
        self.num_decodes = len(singles)
        self.start = spans[0].start
        self.offset: int | mx.array
        self.next_offset: int | mx.array
        self.seq_ids = [span.request.id for span in spans]
        self._starts = np.array([span.start for span in spans], np.int32)
        self._stops = np.array([span.stop for span in spans], np.int32)
        self._tables = tables or BatchTables(allocator)
        self._chunk_tables = [allocator.table(i) for i in self.seq_ids[self.num_decodes :]]
        self._lay_out(allocator.block_size)
        self._choose_rows(spans)
        self.tokens = self._known_and_coming(spans, coming)
        self.chunks = [
            self._chunk(allocator, index) for index in range(self.num_decodes, len(spans))
        ]

    def _lay_out(self, block_size: int) -> None:
        """Set positions, slots, and the tables and context lengths of single tokens."""
        count = self.num_decodes
        self._lengths = self._stops - self._starts
        self._first_rows = np.cumsum(self._lengths, dtype=np.int32) - self._lengths
        if self._chunk_tables:
            offsets = np.repeat(self._starts - self._first_rows, self._lengths)
            positions = np.arange(len(offsets), dtype=np.int32) + offsets
        else:
            positions = self._starts
        self._tables.update(self.seq_ids[:count])
        columns = positions // np.int32(block_size)
        blocks = [self._tables.blocks_at(columns[:count])]
        for index, table in enumerate(self._chunk_tables, start=count):
            first = self._first_rows[index]
            blocks.append(table[columns[first : first + self._lengths[index]]])
        slots = np.concatenate(blocks) * np.int32(block_size) + positions % np.int32(block_size)
        self._host_positions = positions
        self.num_tokens = len(positions)
        self.max_context = int(self._stops.max())
        self.positions = mx.array(positions)
        self.slot_mapping = mx.array(slots)
        self.block_tables = self._tables.array
        self.context_lens = mx.array(self._stops[:count])
        if self.layout is Layout.CHUNK:
            self.offset, self.next_offset = self.start, self.start + len(positions)
        else:
            self.offset, self.next_offset = self.positions, self.context_lens
            if self._chunk_tables:
                self.next_offset = mx.array(positions + np.int32(1))

    def _choose_rows(self, spans: Sequence[Span]) -> None:
        """Set which requests get a token, and from which rows of logits."""
        drawing = [span for span in spans if span.samples]
        rows, lengths = self._first_rows + self._lengths - 1, self._stops
        self._draws = np.array([span.samples for span in spans])
        if len(drawing) < len(spans):
            rows, lengths = rows[self._draws], lengths[self._draws]
        self.sampled = [span.request for span in drawing]
        self.logits_of: mx.array | None = None
        if any([span.forks for span in drawing]):
            self.sampled = [r for span in drawing for r in (span.request, *span.forks)]
            counts = [1 + len(span.forks) for span in drawing]
            self.logits_of = as_int32(np.repeat(np.arange(len(drawing), dtype=np.int32), counts))
            lengths = np.repeat(lengths, counts)
        self.sampled_lengths = lengths
        self._sampled_rows = rows
        self.num_sampled_rows = len(rows)
        self.samples_all = len(self.sampled) == len(rows) == self.num_tokens

    def _known_and_coming(self, spans: Sequence[Span], coming: PendingTokens | None) -> mx.array:
        """Token ids ``[T]``. Tokens that are still being chosen are read from `coming`."""
        if coming is not None and self.samples_all and coming.requests == self.sampled:
            return coming.tokens
        tokens: list[int] = []
        late: list[int] = []  # spans whose token is not known yet
        for index, span in enumerate(spans):
            known = span.request.tokens[span.start : span.stop]
            if not known:
                late.append(index)
                known = [0]
            tokens += known
        assert len(tokens) == self.num_tokens, "a span has both known and unknown tokens"
        if not late:
            return as_int32(tokens)
        assert coming is not None
        sources = np.arange(len(tokens), dtype=np.int32)
        rows = [coming.row_of[spans[i].request.id] for i in late]
        sources[self._first_rows[late]] = len(tokens) + np.array(rows)
        return mx.concatenate([as_int32(tokens), coming.tokens])[mx.array(sources)]

    def _chunk(self, allocator: BlockAllocator, index: int) -> Chunk:
        start, stop = int(self._starts[index]), int(self._stops[index])
        table = self._chunk_tables[index - self.num_decodes]
        block_ids = mx.array(table[: allocator.blocks_needed(stop)])
        return Chunk(int(self._first_rows[index]), start, stop - start, block_ids)

    @cached_property
    def sampled_rows(self) -> mx.array:
        """Rows that need logits, int32."""
        return mx.array(self._sampled_rows)

    @property
    def inputs(self) -> mx.array:
        """The model's input ids, ``[T, 1]`` or ``[1, L]``."""
        return self.tokens[:, None] if self.layout is Layout.ROWS else self.tokens[None]

    @property
    def newest(self) -> mx.array:
        """The newest token of each of `sampled`, int32."""
        if self.samples_all:
            return self.tokens
        rows = self.sampled_rows if self.logits_of is None else self.sampled_rows[self.logits_of]
        return self.tokens[rows]

    @cached_property
    def row_tables(self) -> mx.array:
        """Block table of every row of the model's input, ``[T or 1, max_blocks]`` int32."""
        if not self._chunk_tables:
            return self.block_tables
        tables = _padded(self._tables.host(), self._chunk_tables)
        if self.layout is Layout.CHUNK:
            return mx.array(tables)
        sequences = np.repeat(np.arange(len(tables), dtype=np.int32), self._lengths)
        return mx.take(mx.array(tables), mx.array(sequences), axis=0)

    def mask(self, window: int | None) -> mx.array:
        """``[T, 1, 1, S]`` or ``[1, 1, L, S]`` bool over gathered keys: causal, within `window`."""
        shape = (-1, 1, 1, 1) if self.layout is Layout.ROWS else (1, 1, -1, 1)
        return causal_mask(self.positions.reshape(shape), self.max_context, window)

    def sampled_alone(self) -> SampledRows:
        """The sampled tokens of a batch of rows."""
        assert self.layout is Layout.ROWS
        positions = self._host_positions[self._sampled_rows]
        contexts = positions + np.int32(1)
        sampled, max_context = mx.array(positions), int(contexts.max())
        return SampledRows(sampled, mx.array(contexts), self._sampled_tables(), max_context)

    def _sampled_tables(self) -> mx.array:
        """Block tables of the sampled rows, ``[R, max_blocks]`` int32."""
        singles, chunks = self._draws[: self.num_decodes], self._draws[self.num_decodes :]
        if singles.all() and not chunks.any():
            return self.block_tables
        others = [self._chunk_tables[index] for index in np.flatnonzero(chunks)]
        return mx.array(_padded(self._tables.host()[singles], others))


def _padded(rows: Int32Array, tables: Sequence[Int32Array]) -> Int32Array:
    """`rows`, then `tables`, each filled with zeros up to the longest."""
    width = max([rows.shape[1], *map(len, tables)])
    padded = np.zeros((len(rows) + len(tables), width), np.int32)
    padded[: len(rows), : rows.shape[1]] = rows
    for row, table in zip(padded[len(rows) :], tables, strict=True):
        row[: len(table)] = table
    return padded

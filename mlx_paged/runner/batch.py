"""A step's spans as the arrays of one forward of the model."""

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from operator import attrgetter

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.attention.forward import Chunk, Forward
from mlx_paged.attention.shared_prefixes import MakePrefixes, no_prefixes
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import as_int32
from mlx_paged.request import Request
from mlx_paged.runner.buckets import Buckets
from mlx_paged.sampling.sampler import PendingTokens
from mlx_paged.scheduler.step import Span

ID = attrgetter("id")

SampledRows = tuple[mx.array, mx.array, Int32Array]
"""Of some rows the logits, the newest tokens and the numbers of tokens."""

SPARE_COLUMNS = 16  # blocks by which the longest sequence may grow before all rows are copied


class Layout(StrEnum):
    """How tokens are laid out in the model's input."""

    ROWS = "rows"  # inputs [T, 1]: every token is a batch row with its own position
    CHUNK = "chunk"  # inputs [1, L]: consecutive tokens of one sequence


def row_bucket(rows: int) -> int:
    """The number of rows with padding: at most a sixteenth more, and none up to 32."""
    step = max(1, (1 << rows.bit_length() >> 1) // 16)
    return -(-rows // step) * step


class BatchTables:
    """A layer group's block tables of a batch's sequences, on the host and on the device.

    While the batch has the same sequences, an update writes only entries for their new blocks. If
    there are none, the device's array stays. All rows are copied when another sequence joins, when
    the order changes, or when a row's blocks were replaced: by copy-on-write, or because its
    sequence was preempted and runs again.

    Attributes:
        group: index of the group.
        arrays: for each member of the group ``[R, longest]`` int32, as of the last :meth:`update`;
            entries past a row's end are undefined, and so are those that a window has left.
        buckets: of rows and columns that the arrays have; None: no padding.
        num_rows: rows of the arrays.
        prefixes: which of the sequences begin with the same blocks.
    """

    arrays: list[mx.array]
    num_rows: int
    _seq_ids: list[int]
    _rows: Int32Array  # rows of these sequences in the allocator's tables
    _lengths: Int32Array  # number of blocks of each sequence
    _host: Int32Array  # the host's copy, wider than `array`
    _version: int  # version of the allocator's tables that was copied
    _num_appends: int  # to these tables, when they were copied

    def __init__(
        self,
        allocator: BlockAllocator,
        group: int = 0,
        buckets: Buckets | None = None,
        make_prefixes: MakePrefixes = no_prefixes,
    ) -> None:
        self.group = group
        self.buckets = buckets
        self.prefixes = make_prefixes(allocator, group)
        self._allocator, self._store = allocator, allocator.store
        plan = allocator.groups[group]
        self._has_whole_blocks = plan.members * plan.pieces == 1  # else entries are no blocks
        self._take_over([])

    @classmethod
    def of_groups(
        cls,
        allocator: BlockAllocator,
        buckets: Buckets | None = None,
        make_prefixes: MakePrefixes = no_prefixes,
    ) -> list["BatchTables"]:
        """Tables for each layer group."""
        groups = range(len(allocator.groups))
        return [cls(allocator, group, buckets, make_prefixes) for group in groups]

    def update(self, seq_ids: list[int]) -> None:
        """Make these the tables of the sequences `seq_ids` as they are now."""
        tables = self._allocator.block_tables
        if seq_ids != self._seq_ids or (
            tables.version != self._version and self._allocator.are_replaced(seq_ids, self._version)
        ):
            self._take_over(seq_ids)
            return
        self._version = tables.version
        if tables.num_appends == self._num_appends:
            return
        self._num_appends = tables.num_appends
        lengths = tables.lengths(self._rows, self.group)
        grown = np.flatnonzero(lengths != self._lengths).astype(np.int32)
        if grown.size == 0:
            return
        columns = self._lengths[grown]
        if lengths.max() > self._host.shape[1] or (lengths[grown] > columns + 1).any():
            self._take_over(seq_ids)
            return
        self._host[grown, columns] = tables.entries(self._rows[grown], columns, self.group)
        self._lengths = lengths
        self._upload()

    def decode_arrays(self, starts: list[int]) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Of one token of each sequence, at these positions: positions and context lengths, and the
        slots for each member of the group. Rows of nobody follow."""
        size = self._allocator.block_size
        positions, lens, slots = ops.decode_arrays(starts, self._host, self.num_rows, size)
        if self._has_whole_blocks:
            return positions, lens, [slots]
        at = np.array(starts, np.int32)
        found = self._store.slots(self.blocks_at(at // np.int32(size)), at, self.group)
        of_nobody = [(0, 0), (0, self.num_rows - len(starts))]
        return positions, lens, of_members(np.pad(found, of_nobody, constant_values=-1))

    def blocks_at(self, columns: Int32Array) -> Int32Array:
        """For each sequence the block in its column of the table, ``[R]``."""
        blocks: Int32Array = self._host[np.arange(len(columns)), columns]
        return blocks

    def _take_over(self, seq_ids: list[int]) -> None:
        tables = self._allocator.block_tables
        self._seq_ids = list(seq_ids)
        self._version, self._num_appends = tables.version, tables.num_appends
        self._rows = self._allocator.table_rows(seq_ids)
        self._lengths = tables.lengths(self._rows, self.group)
        entries = tables.rows(self._rows, self.group)
        rows, width = entries.shape
        shape = rows, width + SPARE_COLUMNS
        if self.buckets is not None:
            shape = row_bucket(rows), self.buckets.width(width)
        self.num_rows = shape[0]
        self._host = np.zeros(shape, np.int32)
        self._host[:rows, :width] = entries
        self._upload()

    def _upload(self) -> None:
        # MLX copies a contiguous array much faster than columns of a wider one.
        width = None if self.buckets else self._lengths.max(initial=0)
        host = self._host[:, :width]
        tables = self._store.tables(host, self.group)
        self.arrays = of_members(np.ascontiguousarray(tables))


def of_members(values: Int32Array) -> list[mx.array]:
    """Host values ``[members, ...]`` as an array for each member."""
    return [mx.array(values[0])] if len(values) == 1 else list(mx.array(values))


def joined(parts: Sequence[SampledRows]) -> SampledRows:
    """The rows of all parts, in order."""
    logits, newest, lengths = map(list, zip(*parts, strict=True))
    return mx.concatenate(logits), mx.concatenate(newest), np.concatenate(lengths)


class Batch:
    """The arrays of one forward, shared by all layers.

    T tokens: first the single ones (decodes), then those of chunks, short chunks first. The host
    data is in range by construction, so nothing here checks it again. A batch that only decodes may
    have rows of nobody after its tokens: token 0 at position 0, slot -1, context length 0.

    Attributes:
        tokens: ``[T + num_empty]`` int32 ids.
        num_tokens: T.
        num_rows: rows of the arrays that have one for each sequence: the sequences, then
            `num_empty` rows of nobody.
        num_decodes: how many of the first tokens are single ones.
        positions: ``[T]`` int32, of each token in its sequence.
        forwards: what the layers know of it: group by group, one for each member.
        sampled: the requests that get a token.
        newest: the newest token of each of `sampled`, int32.
        sampled_lengths: number of tokens of each of `sampled` before this one, tokens that are
            still being chosen included; ``[R]`` int32, on the host.
        num_sampled_rows: how many rows need logits.
        samples_all: whether every row needs logits, each for one request.
        logits_of: for each of `sampled` the row of logits to draw from; None: its own.
        scored: requests whose prompt tokens need log-probabilities, with the positions of the
            tokens before these. Their rows of logits are the last ones.
        spans: of the sequences, in the order of their rows.
        seq_ids: the sequence of each span.
        decodes_only: whether every token is a sequence of its own, in a row of its own.
        figures: what is reported of the batch, by name.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        allocator: BlockAllocator,
        layout: Layout = Layout.ROWS,
        coming: PendingTokens | None = None,
        tables: Sequence[BatchTables] | None = None,
        scores: bool = False,
    ) -> None:
        """Lay out `spans`: any number for rows, exactly one for a chunk.

        Args:
            coming: tokens of the step before that are not known yet.
            tables: the tables of the batch before, which are updated; None: new ones.
            scores: whether some prompt tokens may need log-probabilities.
        """
        assert layout is Layout.ROWS or len(spans) == 1
        self.layout = layout
        self.spans = spans
        self.figures: dict[str, int] = {}
        self.scored: list[tuple[Request, range]] = []
        self.logits_of: mx.array | None = None
        tables = tables or BatchTables.of_groups(allocator)
        starts, requests = list[int](), list[Request]()
        for span in spans:
            if span.stop - span.start == span.samples == 1 and not span.forks:
                starts.append(span.start)
                requests.append(span.request)
        if layout is Layout.ROWS and len(starts) == len(spans) and not scores:
            self._lay_out_decodes(starts, requests, tables)
        else:
            self._lay_out(allocator, tables, scores)
        self.tokens = self.newest = self._known_and_coming(self.spans, coming)
        if not self.samples_all:
            rows, of = self.sampled_rows, self.logits_of
            self.newest = self.tokens[rows if of is None else rows[of]]
        if self.num_empty:
            self.tokens = mx.pad(self.tokens, (0, self.num_empty))

    def _lay_out_decodes(
        self, starts: list[int], requests: list[Request], tables: Sequence[BatchTables]
    ) -> None:
        """Lay out spans of one token each, at these positions, which each choose the next one of
        these requests."""
        self.sampled = requests
        self.seq_ids = list(map(ID, self.sampled))
        self.decodes_only = self.samples_all = True
        self.num_decodes = self.num_tokens = self.num_sampled_rows = len(starts)
        self.sampled_lengths = np.array(starts, np.int32) + np.int32(1)
        for of_group in tables:
            of_group.update(self.seq_ids)
        self.num_rows = tables[0].num_rows
        self.num_empty = self.num_rows - len(starts)
        self.forwards = forwards = list[Forward]()
        longest = max(starts) + 1
        for of_group in tables:
            positions, lens, slots = of_group.decode_arrays(starts)
            if forwards:  # all layers share them
                positions, lens = forwards[0].positions, forwards[0].context_lens
            shared = self._prefixes(of_group)
            for slot_mapping, table in zip(slots, of_group.arrays, strict=True):
                forward = Forward(
                    columns=1,
                    positions=positions,
                    slot_mapping=slot_mapping,
                    block_tables=table,
                    context_lens=lens,
                    max_context=longest,
                    offset=positions,
                    next_offset=lens,
                    shared_prefixes=shared,
                )
                forwards.append(forward)
        self.positions = forwards[0].positions

    def _lay_out(
        self, allocator: BlockAllocator, tables: Sequence[BatchTables], scores: bool
    ) -> None:
        """Lay out any spans."""
        spans, is_rows = self.spans, self.layout is Layout.ROWS
        singles = [s for s in spans if s.stop - s.start == 1] if is_rows else []
        if len(spans) > max(1, len(singles)):
            self.spans = spans = sorted(spans, key=len)
        self.num_decodes = len(singles)
        self.decodes_only = self.num_decodes == len(spans)
        self.seq_ids = [span.request.id for span in spans]
        self._starts = np.array([span.start for span in spans], np.int32)
        self._stops = np.array([span.stop for span in spans], np.int32)
        self._lengths = self._stops - self._starts
        self.first_rows = np.cumsum(self._lengths, dtype=np.int32) - self._lengths
        self._positions = self._starts
        if self.num_decodes < len(spans):
            offsets = np.repeat(self._starts - self.first_rows, self._lengths)
            self._positions = np.arange(len(offsets), dtype=np.int32) + offsets
        self.num_tokens = len(self._positions)
        self.num_rows = len(spans)
        if self.decodes_only:
            for of_group in tables:
                of_group.update(self.seq_ids)
            self.num_rows = tables[0].num_rows
        self.num_empty = self.num_rows - len(spans)
        self.positions = mx.array(self._padded(self._positions))
        self.forwards = self._forwards(allocator, tables)
        self._choose_rows(spans, scores)

    def _prefixes(self, of_group: BatchTables) -> mx.array | None:
        """Which sequences begin with the same blocks; one sequence shares with none."""
        if len(self.seq_ids) == 1:
            return None
        found = of_group.prefixes.of(self.seq_ids, self.num_rows)
        of_group.prefixes.note(self.figures)
        return found

    def _forwards(self, allocator: BlockAllocator, tables: Sequence[BatchTables]) -> list[Forward]:
        """The batch as the layers of each group's members know it."""
        is_chunk = self.layout is Layout.CHUNK
        is_ragged = not is_chunk and self.num_decodes < len(self.seq_ids)
        context_lens, max_context = mx.array(self._padded(self._stops)), int(self._stops.max())
        offset: int | mx.array = int(self._starts[0]) if is_chunk else self.positions
        next_offset: int | mx.array = max_context if is_chunk else context_lens
        cu_seqlens = sequences = None
        if is_ragged:
            next_offset = mx.array(self._positions + np.int32(1))
            cu_seqlens = mx.array(np.append(self.first_rows, np.int32(self.num_tokens)))
            sequences = mx.array(self._sequences)
        forwards = []
        for of_group in tables:
            prefixes = self._prefixes(of_group)
            members = zip(*self._slots_chunks_and_tables(allocator, of_group), strict=True)
            for slots, chunks, block_tables in members:
                forward = Forward(
                    columns=self.num_tokens if is_chunk else 1,
                    positions=self.positions,
                    slot_mapping=slots,
                    block_tables=block_tables,
                    context_lens=context_lens,
                    max_context=max_context,
                    offset=offset,
                    next_offset=next_offset,
                    cu_seqlens=cu_seqlens,
                    chunks=chunks if is_ragged else (),
                    row_chunks=chunks if is_chunk else (),
                    shared_prefixes=prefixes,
                )
                if sequences is not None:
                    forward.row_tables = mx.take(block_tables, sequences, axis=0)
                forwards.append(forward)
        return forwards

    def _slots_chunks_and_tables(
        self, allocator: BlockAllocator, tables: BatchTables
    ) -> tuple[list[mx.array], list[list[Chunk]], list[mx.array]]:
        """The slot mapping, the chunks and all sequences' tables, for each member of a group."""
        count, group, store = self.num_decodes, tables.group, allocator.store
        columns = self._positions // np.int32(allocator.block_size)
        if self.decodes_only:
            slots = store.slots(tables.blocks_at(columns), self._positions, group)
            return of_members(self._padded(slots, -1)), [[] for _ in tables.arrays], tables.arrays
        rows = allocator.table_rows(self.seq_ids)
        entries = allocator.block_tables.rows(rows, group)[:, : columns.max() + 1]
        slots = store.slots(entries[self._sequences, columns], self._positions, group)
        stored = np.array([span.start + span.stored for span in self.spans], np.int32)
        slots = np.where(self._positions < stored[self._sequences], np.int32(-1), slots)
        block_tables = np.ascontiguousarray(store.tables(entries, group))
        chunks: list[list[Chunk]] = [[] for _ in block_tables]
        for index in range(count, len(self.seq_ids)):
            first, start, length = (
                int(of[index]) for of in (self.first_rows, self._starts, self._lengths)
            )
            width = allocator.blocks_needed(start + length) * allocator.groups[group].pieces
            for member, blocks in enumerate(block_tables[:, index, :width]):
                chunks[member].append(Chunk(first, start, length, mx.array(blocks)))
        return of_members(slots), chunks, of_members(block_tables)

    def _padded(self, values: Int32Array, value: int = 0) -> Int32Array:
        """``[..., T]`` with `value` in the rows of nobody."""
        if not self.num_empty:
            return values
        padded = np.full((*values.shape[:-1], self.num_rows), value, np.int32)
        padded[..., : -self.num_empty] = values
        return padded

    @cached_property
    def first_rows(self) -> Int32Array:
        """Of each span its first row, ``[S]`` int32, on the host. Each decode has one row."""
        return np.arange(len(self.spans), dtype=np.int32)

    @cached_property
    def _sequences(self) -> Int32Array:
        """Which span each token belongs to, ``[T]``."""
        return np.repeat(np.arange(len(self.seq_ids), dtype=np.int32), self._lengths)

    def _choose_rows(self, spans: Sequence[Span], scores: bool) -> None:
        """Set which requests get a token, and from which rows of logits."""
        drawing = [span for span in spans if span.samples]
        rows, lengths = self.first_rows + self._lengths - 1, self._stops
        if len(drawing) < len(spans):
            draws = np.array([span.samples > 0 for span in spans])
            rows, lengths = rows[draws], lengths[draws]
        if any([span.samples > 1 for span in drawing]):  # a row for each token that is chosen
            counts = np.array([span.samples for span in drawing], np.int32)
            later = np.repeat(np.cumsum(counts, dtype=np.int32), counts)
            later -= np.arange(1, len(later) + 1, dtype=np.int32)
            rows, lengths = np.repeat(rows, counts) - later, np.repeat(lengths, counts) - later
            drawing = [span for span in drawing for _ in range(span.samples)]
        self.sampled = [span.request for span in drawing]
        if any([span.forks for span in drawing]):
            self.sampled = [r for span in drawing for r in (span.request, *span.forks)]
            counts = np.array([1 + len(span.forks) for span in drawing], np.int32)
            self.logits_of = as_int32(np.repeat(np.arange(len(drawing), dtype=np.int32), counts))
            lengths = np.repeat(lengths, counts)
        self.sampled_lengths = lengths
        if scores:
            found = [span.request.scored(span.start, span.stop) for span in spans]
            self.scored = [(s.request, each) for s, each in zip(spans, found, strict=True) if each]
            if self.scored and self.logits_of is None:
                self.logits_of = mx.arange(len(rows), dtype=mx.int32)
            offsets = self.first_rows - self._starts
            of_scored = (np.array(each) + at for each, at in zip(found, offsets, strict=True))
            rows = np.concatenate([rows, *of_scored]).astype(np.int32)
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
            known = span.known
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
        sources[self.first_rows[late]] = len(tokens) + np.array(rows)
        return mx.concatenate([as_int32(tokens), coming.tokens])[mx.array(sources)]

    @cached_property
    def sampled_rows(self) -> mx.array:
        """Rows that need logits, int32."""
        return mx.array(self._sampled_rows)

    @property
    def inputs(self) -> mx.array:
        """The model's input ids, ``[T, 1]`` or ``[1, L]``."""
        return mx.expand_dims(self.tokens, 1 if self.layout is Layout.ROWS else 0)

    def sampled_alone(self) -> list[Forward]:
        """The sampled tokens of a batch of rows, whose K/V is stored already."""
        assert self.layout is Layout.ROWS
        contexts = self._positions[self._sampled_rows] + np.int32(1)
        positions, context_lens = mx.array(contexts - np.int32(1)), mx.array(contexts)
        max_context = int(contexts.max())
        tables = [forward.block_tables for forward in self.forwards]
        drawing = self._sequences[self._sampled_rows]
        if not np.array_equal(drawing, np.arange(len(self.seq_ids))):
            index = mx.array(drawing)
            tables = [mx.take(of_all, index, axis=0) for of_all in tables]
        return [
            Forward(1, positions, None, table, context_lens, max_context, positions, context_lens)
            for table in tables
        ]

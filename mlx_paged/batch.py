"""A step's spans as the arrays of one forward of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.block_allocator import BlockAllocator
from mlx_paged.block_tables import Int32Array
from mlx_paged.kv_pool import as_int32
from mlx_paged.request import Request
from mlx_paged.step import Span


class Layout(StrEnum):
    """How tokens are laid out in the model's input."""

    ROWS = "rows"  # inputs [T, 1]: every token is a batch row with its own position
    CHUNK = "chunk"  # inputs [1, L]: consecutive tokens of one sequence


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence, attended together.

    Attributes:
        first_row: where the chunk begins among the batch's tokens.
        start: position of its first token.
        length: its tokens.
        block_ids: ``[n]`` int32, blocks of the sequence up to the chunk's end.
    """

    first_row: int
    start: int
    length: int
    block_ids: mx.array

    @property
    def context_len(self) -> int:
        return self.start + self.length

    @cached_property
    def tables(self) -> mx.array:
        """``[1, n]`` int32, the blocks as a batch of one."""
        return self.block_ids[None]

    @cached_property
    def context_lens(self) -> mx.array:
        """``[1]`` int32, the context as a batch of one."""
        return as_int32([self.context_len])

    def first_seen(self, window: int, block_size: int) -> int:
        """Where the block begins that holds the first position that the chunk's tokens see."""
        return max(0, self.start - window + 1) // block_size * block_size

    def window_mask(self, window: int, first: int = 0) -> mx.array:
        """``[length, context_len - first]`` bool over the keys from position `first`: causal, and
        no further back than `window` tokens."""
        keys = mx.arange(first, self.context_len)[None]
        queries = mx.arange(self.start, self.context_len)[:, None]
        return (keys <= queries) & (keys > queries - window)


@dataclass(frozen=True, eq=False)
class ComingTokens:
    """Tokens that a step under way is choosing: those of `requests`, as an array ``[R]`` int32."""

    requests: list[Request]
    tokens: mx.array

    @cached_property
    def row_of(self) -> dict[int, int]:
        """Where the token of each request is, by id."""
        return {request.id: row for row, request in enumerate(self.requests)}


class Batch:
    """The arrays of one forward, shared by all layers.

    T tokens: first the single ones (decodes), then those of chunks. Every field is made once, here,
    from host data that is in range by construction.

    Attributes:
        tokens: ``[T]`` int32 ids.
        positions: ``[T]`` int32, of each token in its sequence.
        slot_mapping: ``[T]`` int32, where each token's K/V goes.
        num_decodes: how many leading tokens are single ones, attended through block tables.
        block_tables: ``[num_decodes, max_blocks]`` int32.
        context_lens: ``[num_decodes]`` int32, the token itself included.
        chunks: the other tokens, sequence by sequence.
        sampled_rows: rows whose logits are wanted.
        sampled: the requests that get a token.
        logits_of: which of the wanted logits each of `sampled` draws from; None: its own.
        seq_ids: the sequence of each span.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        allocator: BlockAllocator,
        layout: Layout = Layout.ROWS,
        coming: ComingTokens | None = None,
    ) -> None:
        """Lay out `spans`: in any number for rows, exactly one for a chunk."""
        assert layout is Layout.ROWS or len(spans) == 1
        spans = sorted(spans, key=lambda span: len(span) > 1)
        self.layout = layout
        self.seq_ids = [span.request.id for span in spans]
        lengths = np.array([len(span) for span in spans])
        first_rows = np.cumsum(lengths) - lengths
        num_single = int((lengths == 1).sum()) if layout is Layout.ROWS else 0

        positions: Int32Array = np.concatenate(
            [np.arange(span.start, span.stop, dtype=np.int32) for span in spans]
        )
        self._host_tables = allocator.tables(self.seq_ids)
        self._host_positions = positions
        self._owner = np.repeat(np.arange(len(spans)), lengths)
        blocks = self._host_tables[self._owner, positions // allocator.block_size]
        slots = blocks * np.int32(allocator.block_size) + positions % np.int32(allocator.block_size)

        self.tokens = self._known_and_coming(spans, first_rows, coming)
        self.positions = mx.array(positions)
        self.slot_mapping = mx.array(slots)
        self.num_decodes = num_single
        self.block_tables, self.context_lens = self._decode_tables(allocator, num_single)
        self.chunks = [
            self._chunk(allocator, i, int(first_rows[i]), spans[i])
            for i in range(num_single, len(spans))
        ]
        sampled = [i for i, span in enumerate(spans) if span.samples]
        self.sampled_rows = as_int32((first_rows + lengths - 1)[sampled].astype(np.int32))
        self.sampled = [r for i in sampled for r in (spans[i].request, *spans[i].forks)]
        self.logits_of: mx.array | None = None
        if len(self.sampled) > len(sampled):
            counts = [1 + len(spans[i].forks) for i in sampled]
            self.logits_of = as_int32(np.repeat(np.arange(len(sampled), dtype=np.int32), counts))
        self.start = spans[0].start

    def _known_and_coming(
        self, spans: Sequence[Span], first_rows: npt.NDArray[np.int64], coming: ComingTokens | None
    ) -> mx.array:
        """Token ids ``[T]``; a token that is still being chosen is taken from where it will be."""
        tokens = [t for span in spans for t in (span.request.tokens[span.start : span.stop] or [0])]
        known = as_int32(tokens)
        late = [i for i, span in enumerate(spans) if span.stop > len(span.request.tokens)]
        if not late:
            return known
        assert coming is not None and all(len(spans[i]) == 1 for i in late)
        sources = np.arange(len(tokens), dtype=np.int32)
        rows = [coming.row_of[spans[i].request.id] for i in late]
        sources[first_rows[late]] = len(tokens) + np.array(rows)
        return mx.concatenate([known, coming.tokens])[as_int32(sources)]

    def _decode_tables(self, allocator: BlockAllocator, count: int) -> tuple[mx.array, mx.array]:
        context_lens = self._host_positions[:count] + np.int32(1)
        width = allocator.blocks_needed(int(context_lens.max(initial=0)))
        return mx.array(self._host_tables[:count, :width]), mx.array(context_lens)

    def _chunk(self, allocator: BlockAllocator, index: int, first_row: int, span: Span) -> Chunk:
        num_blocks = allocator.blocks_needed(span.stop)
        block_ids = mx.array(self._host_tables[index, :num_blocks])
        return Chunk(first_row, span.start, len(span), block_ids)

    @property
    def num_tokens(self) -> int:
        return self._host_positions.size

    @property
    def inputs(self) -> mx.array:
        """The model's input ids, ``[T, 1]`` or ``[1, L]``."""
        return self.tokens[:, None] if self.layout is Layout.ROWS else self.tokens[None]

    @property
    def newest(self) -> mx.array:
        """The newest token of each of `sampled`, int32."""
        rows = self.sampled_rows if self.logits_of is None else self.sampled_rows[self.logits_of]
        return self.tokens[rows]

    @cached_property
    def max_context(self) -> int:
        """The longest context of the batch: length of gathered keys."""
        return int(self._host_positions.max()) + 1

    @cached_property
    def row_tables(self) -> mx.array:
        """Block table of every row of the model's input, ``[T or 1, max_blocks]`` int32."""
        if self.layout is Layout.CHUNK:
            return mx.array(self._host_tables)
        return mx.array(self._host_tables[self._owner])

    def mask(self, window: int | None) -> mx.array:
        """``[T, 1, 1, S]`` or ``[1, 1, L, S]`` bool over gathered keys: causal, within `window`."""
        keys = mx.arange(self.max_context)
        queries = self.positions.reshape(
            (-1, 1, 1, 1) if self.layout is Layout.ROWS else (1, 1, -1, 1)
        )
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

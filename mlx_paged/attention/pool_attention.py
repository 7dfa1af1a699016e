"""Attention over a layer of the pool: through block tables, or over blocks gathered once."""

import os
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention.sdpa_hook import mlx_attention
from mlx_paged.kv.pool import KVPool, as_int32

PATHS = "paged", "gather"
"""The paged op, through block tables; blocks gathered into one array, then MLX's own attention."""

VARIABLE = "MLX_PAGED_ATTENTION"
"""The environment variable that forces one of the paths."""

FEW_QUERIES = 8
"""On a GPU, chunks of up to so many tokens of a sequence take the paged op."""

ANY_NUMBER = 2**31

path_counts: Counter[str] = Counter()
"""How often each path was called since the process began."""


def max_paged_queries() -> int:
    """How many tokens of a sequence take the paged op; longer chunks are gathered.

    The default device and the environment decide. Callers ask once and keep the answer.
    """
    path = _forced_path()
    if path is None:
        return ANY_NUMBER if mx.default_device() == mx.cpu else FEW_QUERIES
    return ANY_NUMBER if path == "paged" else 0


@cache
def _forced_path() -> str | None:
    """What the environment asks for; None: nothing, or nothing that exists."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in PATHS:
        return wanted
    if wanted:
        expected = " or ".join(PATHS)
        warnings.warn(f"{VARIABLE} is {wanted!r}: expected {expected}; ignored", stacklevel=3)
    return None


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of one sequence, attended together.

    Attributes:
        first_row: row of its first token among the batch's tokens.
        start: position of its first token.
        length: number of its tokens.
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


def narrowest(window: int | None, other: int | None) -> int | None:
    """The smaller of two windows; None if neither is a window."""
    if window is None or other is None:
        return other if window is None else window
    return min(window, other)


def causal_mask(queries: mx.array, num_keys: int, window: int | None, first: int = 0) -> mx.array:
    """Which keys at positions ``[first, num_keys)`` the queries at these positions see: keys up to
    their own position and, with a window, only the last `window` of these."""
    keys = mx.arange(first, num_keys)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


@dataclass(slots=True, eq=False)  # not frozen: a frozen one takes twice as long to make
class PoolAttention:
    """One layer's attention. Both paths give the same answer.

    Attributes:
        window: tokens that a query sees at most, itself included.
        sinks: ``[H]``, extra logits in the softmax denominator.
        max_paged_queries: tokens of a sequence up to which the paged op attends.
    """

    pool: KVPool
    layer: int
    scale: float
    window: int | None
    sinks: mx.array | None
    max_paged_queries: int = ANY_NUMBER

    def rows(self, q: mx.array, tables: mx.array, context_lens: mx.array) -> mx.array:
        """The last L tokens of B sequences, ``q [B, H, L, D]``.

        Args:
            tables: ``[B, M]`` int32 block tables.
            context_lens: ``[B]`` int32, tokens of each sequence, these L included.
        """
        if q.shape[2] <= self.max_paged_queries:
            return self.through_tables(q, tables, context_lens)
        return self.gathered_rows(q, tables, context_lens)

    def chunk(self, q: mx.array, chunk: Chunk) -> mx.array:
        """Causal attention of one chunk's queries ``[1, H, L, D]`` over its sequence."""
        if q.shape[2] <= self.max_paged_queries:
            return self.through_tables(q, chunk.tables, chunk.context_lens)
        return self.gathered_chunk(q, chunk)

    def through_tables(self, q: mx.array, tables: mx.array, context_lens: mx.array) -> mx.array:
        """As `rows`, by the paged op."""
        path_counts["paged"] += 1
        return ops.paged_attention(
            q,
            self.pool.k,
            self.pool.v,
            tables,
            context_lens,
            self.layer,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
            check_tables=False,
        )

    def gathered_rows(self, q: mx.array, tables: mx.array, context_lens: mx.array) -> mx.array:
        """As `rows`, by MLX's own attention; all blocks of the tables are gathered."""
        path_counts["gather"] += 1
        k, v = gather_rows(self.pool, self.layer, tables)
        length = q.shape[2]
        queries = context_lens[:, None, None, None] - length + mx.arange(length)[:, None]
        mask = causal_mask(queries, k.shape[2], self.window)
        v = mx.where(mask.any(axis=2)[..., None], v, 0)  # a weight of zero does not hide a NaN
        return mlx_attention(q, k, v, scale=self.scale, mask=mask, sinks=self.sinks)

    def gathered_chunk(self, q: mx.array, chunk: Chunk) -> mx.array:
        """As `chunk`, by MLX's own attention; only blocks within the window are gathered."""
        path_counts["gather"] += 1
        first, end, block_size = 0, chunk.context_len, self.pool.block_size
        mask: mx.array | str = "causal"
        if self.window is not None and end > self.window:
            first = max(0, chunk.start - self.window + 1) // block_size * block_size
            mask = causal_mask(mx.arange(chunk.start, end)[:, None], end, self.window, first)
        k, v = self.pool.gather(self.layer, chunk.block_ids[first // block_size :], end - first)
        return mlx_attention(q, k, v, scale=self.scale, mask=mask, sinks=self.sinks)


def gather_rows(pool: KVPool, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
    """K and V of all blocks of the tables ``[B, M]`` int32: ``[B, H_kv, M * S, D]`` each."""
    batch, num_columns = tables.shape
    num_tokens = num_columns * pool.block_size
    k, v = pool.gather(layer, tables.flatten(), batch * num_tokens)
    k, v = (x.reshape(x.shape[1], batch, num_tokens, x.shape[3]) for x in (k, v))
    return k.transpose(1, 0, 2, 3), v.transpose(1, 0, 2, 3)

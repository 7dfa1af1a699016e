"""Attention over a layer of the pool: through block tables, or over blocks gathered once."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.attention.chunks import Chunk
from mlx_paged.attention.dispatch import dispatcher
from mlx_paged.attention.path_table import AttentionPath, Heads
from mlx_paged.attention.sdpa_hook import mlx_attention
from mlx_paged.kv.pool import KVPool, KVShape

calls: Counter[str] = Counter()
"""How often which path answered since the process began: "paged" (the op) or "gather" (blocks
gathered once, MLX's own attention)."""


@lru_cache(maxsize=64)
def _heads(shape: KVShape, num_heads: int, device: str) -> Heads:
    """What a table of paths calls this kind of attention."""
    dtype = str(shape.dtype).removeprefix("mlx.core.")
    group = num_heads // shape.n_kv_heads
    return Heads(device, dtype, group, shape.head_dim, shape.v_head_dim)


@dataclass(slots=True, eq=False)  # not frozen, which would double the time to make one
class PoolAttention:
    """One layer's attention.

    Both paths give the same answer; a table says which is the faster one.

    Attributes:
        window: tokens that a query sees at most, itself included.
        sinks: ``[H]``, extra logits in the softmax denominator.
    """

    pool: KVPool
    layer: int
    scale: float
    window: int | None
    sinks: mx.array | None

    def path(self, q: mx.array, context: int) -> AttentionPath:
        """How ``q [B, H, L, D]`` at the end of contexts of up to `context` tokens is attended."""
        _, num_heads, length, _ = q.shape
        shape = self.pool.shapes[self.layer]
        if mx.default_device() == mx.cpu:
            device = "cpu"
        else:
            kernel = ops.kernel_for(None, shape.head_dim, shape.v_head_dim)
            device = "gpu" if kernel == "native" else "none"
        if self.window is not None:
            context = min(context, self.window + length - 1)
        return dispatcher().path(_heads(shape, num_heads, device), length, context)

    def rows(self, q: mx.array, tables: mx.array, context_lens: mx.array) -> mx.array:
        """The last L tokens of B sequences, ``q [B, H, L, D]``.

        Args:
            tables: ``[B, M]`` int32 block tables.
            context_lens: ``[B]`` int32, tokens of each sequence, these L included.
        """
        if self.path(q, tables.shape[1] * self.pool.block_size) is AttentionPath.PAGED:
            return self.through_tables(q, tables, context_lens)
        return self.gathered_rows(q, tables, context_lens)

    def chunk(self, q: mx.array, chunk: Chunk) -> mx.array:
        """Causal attention of one chunk's queries ``[1, H, L, D]`` over its sequence."""
        if self.path(q, chunk.context_len) is AttentionPath.PAGED:
            return self.through_tables(q, chunk.tables, chunk.context_lens)
        return self.gathered_chunk(q, chunk)

    def through_tables(self, q: mx.array, tables: mx.array, context_lens: mx.array) -> mx.array:
        """As `rows`, by the paged op."""
        calls[AttentionPath.PAGED] += 1
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
        calls[AttentionPath.GATHER] += 1
        k, v = gather_rows(self.pool, self.layer, tables)
        keys = mx.arange(k.shape[2])
        queries = context_lens[:, None, None, None] - q.shape[2] + mx.arange(q.shape[2])[:, None]
        mask = keys <= queries
        if self.window is not None:
            mask = mask & (keys > queries - self.window)
        v = mx.where(mask.any(axis=2)[..., None], v, 0)  # a weight of zero does not hide a NaN
        return mlx_attention(q, k, v, scale=self.scale, mask=mask, sinks=self.sinks)

    def gathered_chunk(self, q: mx.array, chunk: Chunk) -> mx.array:
        """As `chunk`, by MLX's own attention; only blocks within the window are gathered."""
        calls[AttentionPath.GATHER] += 1
        first = 0
        mask: mx.array | str = "causal"
        if self.window is not None and chunk.context_len > self.window:
            first = chunk.first_seen(self.window, self.pool.block_size)
            mask = chunk.window_mask(self.window, first)
        blocks = chunk.block_ids[first // self.pool.block_size :]
        k, v = self.pool.gather(self.layer, blocks, chunk.context_len - first)
        return mlx_attention(q, k, v, scale=self.scale, mask=mask, sinks=self.sinks)


def gather_rows(pool: KVPool, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
    """K and V of all blocks of the tables ``[B, M]`` int32: ``[B, H_kv, M * S, D]`` each."""
    batch, num_columns = tables.shape
    num_tokens = num_columns * pool.block_size
    k, v = pool.gather(layer, tables.flatten(), batch * num_tokens)
    k, v = (x.reshape(x.shape[1], batch, num_tokens, x.shape[3]) for x in (k, v))
    return k.transpose(1, 0, 2, 3), v.transpose(1, 0, 2, 3)

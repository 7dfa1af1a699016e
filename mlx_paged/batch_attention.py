"""Attention of a batch over the pool: block tables for single tokens, one gather for a chunk."""

from collections import Counter
from dataclasses import dataclass

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.batch import Batch, Chunk, Layout
from mlx_paged.kv_pool import KVPool
from mlx_paged.sdpa_hook import mlx_attention

calls: Counter[str] = Counter()
"""How often which path answered since the process began: "paged" (the op, single tokens) or "chunk"
(blocks gathered once, MLX's own attention)."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchAttention:
    """One layer's attention.

    Both paths give the same answer; the paged op reads each K/V byte of a single token's context
    once, the gather is read by all rows of its chunk.

    Attributes:
        window: tokens that a query sees at most, itself included.
        sinks: ``[H]``, extra logits in the softmax denominator.
    """

    pool: KVPool
    layer: int
    scale: float
    window: int | None
    sinks: mx.array | None

    def attend(self, q: mx.array, batch: Batch) -> mx.array:
        """Attention of ``q [T, H, 1, D]`` (rows) or ``[1, H, L, D]`` (a chunk); returns that shape
        with the values' head_dim."""
        if batch.layout is Layout.CHUNK:
            return self._chunk(q, batch.chunks[0])
        parts = [self._decodes(q[: batch.num_decodes], batch)] if batch.num_decodes else []
        for chunk in batch.chunks:
            rows = q[chunk.first_row : chunk.first_row + chunk.length].transpose(2, 1, 0, 3)
            parts.append(self._chunk(rows, chunk).transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def _decodes(self, q: mx.array, batch: Batch) -> mx.array:
        calls["paged"] += 1
        return ops.paged_attention(
            q,
            self.pool.k,
            self.pool.v,
            batch.block_tables,
            batch.context_lens,
            self.layer,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
            check_tables=False,
        )

    def _chunk(self, q: mx.array, chunk: Chunk) -> mx.array:
        """Causal attention of one chunk's queries ``[1, H, L, D]`` over its sequence."""
        calls["chunk"] += 1
        first = 0
        mask: mx.array | str = "causal"
        if self.window is not None and chunk.context_len > self.window:
            first = chunk.first_seen(self.window, self.pool.block_size)
            mask = chunk.window_mask(self.window, first)
        blocks = chunk.block_ids[first // self.pool.block_size :]
        k, v = self.pool.gather(self.layer, blocks, chunk.context_len - first)
        return mlx_attention(q, k, v, scale=self.scale, mask=mask, sinks=self.sinks)

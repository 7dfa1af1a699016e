"""Attention of a batch over the pool: block tables for single tokens, one gather for a chunk."""

from collections import Counter

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.batch import Batch, Chunk, Layout
from mlx_paged.kv_pool import KVPool
from mlx_paged.sdpa_hook import mlx_attention

calls: Counter[str] = Counter()
"""How often which path answered since the process began: "paged" (the op, single tokens) or "chunk"
(blocks gathered once, MLX's own attention)."""


def attend(
    q: mx.array,
    pool: KVPool,
    layer: int,
    batch: Batch,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of ``q [T, H, 1, D]`` (rows) or ``[1, H, L, D]`` (a chunk); returns that shape
    with the values' head_dim.

    Both paths give the same answer; the paged op reads each K/V byte of a single token's context
    once, the gather is read by all rows of its chunk.
    """
    if batch.layout is Layout.CHUNK:
        return _attend_chunk(q, pool, layer, batch.chunks[0], scale, window, sinks)
    parts = []
    if batch.num_decodes:
        decodes = q[: batch.num_decodes]
        parts.append(_attend_decodes(decodes, pool, layer, batch, scale, window, sinks))
    for chunk in batch.chunks:
        rows = q[chunk.first_row : chunk.first_row + chunk.length].transpose(2, 1, 0, 3)
        out = _attend_chunk(rows, pool, layer, chunk, scale, window, sinks)
        parts.append(out.transpose(2, 1, 0, 3))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _attend_decodes(
    q: mx.array,
    pool: KVPool,
    layer: int,
    batch: Batch,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    calls["paged"] += 1
    return ops.paged_attention(
        q,
        pool.k,
        pool.v,
        batch.block_tables,
        batch.context_lens,
        layer,
        scale=scale,
        window=window,
        sinks=sinks,
        check_tables=False,
    )


def _attend_chunk(
    q: mx.array,
    pool: KVPool,
    layer: int,
    chunk: Chunk,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Causal attention of one chunk's queries ``[1, H, L, D]`` over its sequence."""
    calls["chunk"] += 1
    k, v = pool.gather(layer, chunk.block_ids, chunk.context_len)
    limited = window is not None and chunk.context_len > window
    mask = chunk.window_mask(window) if window is not None and limited else "causal"
    return mlx_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

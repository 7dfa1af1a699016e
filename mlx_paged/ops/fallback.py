"""The ops in plain MLX, for devices without a compiled kernel and for MLX's transformations.

They take the validated arguments of ``mlx_paged._ext`` and compute the same; dimension letters as
in ``mlx_paged.ops.paged``. Attention gathers all K/V of a batch. A write is a scatter: MLX copies
the pool if an old handle or a pending read still holds it (see :func:`scattered`).
They run on the default stream.
"""

import mlx.core as mx
import numpy as np

from mlx_paged import _ext
from mlx_paged.ops.formats import dequantized, dims_of, format_of, quantized
from mlx_paged.ops.host import as_numpy


def paged_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    *,
    scale: float,
    causal: bool = True,
    kv_head_mapping: mx.array | None = None,
    rope_freqs: mx.array | None = None,
    attn_mask: mx.array | None = None,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    alibi_slopes: mx.array | None = None,
    return_attn: bool = False,
    k_scales: mx.array | None = None,
    v_scales: mx.array | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """``mlx_paged.paged_attention`` on one layer's pool; softmax in float32."""
    batch, num_heads, num_tokens, _ = q.shape
    num_kv_heads, num_blocks, block_size, _ = k_cache.shape
    num_keys = block_tables.shape[1] * block_size
    out_shape = (batch, num_heads, num_tokens, dims_of(v_cache))
    attn_shape = (batch, num_heads, num_tokens, num_keys)
    if 0 in (*out_shape, num_blocks, num_keys):
        out, attn = mx.zeros(out_shape, q.dtype), mx.zeros(attn_shape)
        return (out, attn) if return_attn else out

    context = mx.clip(context_lens, 0, num_keys)[:, None, None, None]
    position = context - num_tokens + mx.arange(num_tokens)[:, None]
    key = mx.arange(num_keys)
    seen = (key < context) & (position >= 0)
    if causal or window is not None:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (key > position - window)
    in_pool = (block_tables >= 0) & (block_tables < num_blocks)
    seen = seen & mx.repeat(in_pool, block_size, axis=1)[:, None, None]
    blocks = mx.where(in_pool, block_tables, 0)
    k, v = _gather(k_cache, blocks, k_scales), _gather(v_cache, blocks, v_scales)

    if kv_head_mapping is not None:
        known = (kv_head_mapping >= 0) & (kv_head_mapping < num_kv_heads)
        seen = seen & known[:, None, None]
        kv_heads = mx.where(known, kv_head_mapping, 0)
        k, v, num_kv_heads = k[:, kv_heads], v[:, kv_heads], num_heads

    query = q.astype(mx.float32)
    if rope_freqs is not None:
        angles = rope_freqs.reshape(batch, 1, num_tokens, rope_freqs.shape[-1])
        query = _rotate(query, angles.astype(mx.float32))
    scores = _per_group(query * scale, num_kv_heads) @ k[:, :, None].swapaxes(-1, -2)
    scores = scores.reshape(attn_shape)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.astype(mx.float32)[:, None, None] * (key - position)
    if attn_mask is not None and attn_mask.dtype == mx.bool_:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask != -mx.inf)
        scores = scores + attn_mask.astype(mx.float32)

    weights = _softmax(scores, seen, sinks)
    per_group = _per_group(weights, num_kv_heads)
    attended = (per_group > 0).any(axis=(2, 3))[..., None]
    v = mx.where(attended, v, 0)[:, :, None]  # a weight of zero does not hide a NaN
    out = (per_group @ v).reshape(out_shape).astype(q.dtype)
    return (out, weights) if return_attn else out


def single_tokens(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    block_tables: mx.array,
    context_lens: mx.array,
    cu_seqlens: mx.array,
    *,
    causal: bool,
    window: int | None,
) -> tuple[mx.array, list[mx.array], list[mx.array], mx.array, mx.array]:
    """The arguments of ``mlx_paged.paged_attention`` for the tokens of
    ``mlx_paged.paged_attention_varlen``: each is a sequence of its own."""
    token, ends = mx.arange(q.shape[0]), cu_seqlens[1:]
    owner = mx.minimum((token[:, None] >= ends).sum(axis=1), ends.size - 1)
    context = mx.clip(context_lens, 0, block_tables.shape[1] * k_cache.shape[2])[owner]
    position = context - ends[owner] + token
    seen = context if window is None and not causal else position + 1
    is_of_one = (token >= cu_seqlens[0]) & (token < ends[-1]) & (position >= 0)
    rows = q.reshape(*q.shape[:2], 1, q.shape[-1])
    lens = mx.where(is_of_one, seen, 0)
    return rows, [k_cache], [v_cache], block_tables[owner], lens


def write_kv(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    **scales: mx.array,
) -> tuple[mx.array, ...]:
    """``mlx_paged.write_kv`` as a scatter into new arrays. MLX's scatter does not check indices, so
    the host reads the slots: it waits until `slot_mapping` is evaluated."""
    _, num_blocks, block_size, _ = k_cache.shape
    k, v = (x if x.ndim == 3 else x.swapaxes(1, 2).flatten(0, 1) for x in (k, v))
    slots = as_numpy(slot_mapping)
    rows = np.flatnonzero((slots >= 0) & (slots < num_blocks * block_size))
    caches = k_cache, v_cache, *scales.values()
    if not len(rows):
        return caches
    block, offset = (mx.array(a) for a in np.divmod(slots[rows], block_size))

    def written(cache: mx.array, x: mx.array) -> mx.array:
        kept = x if len(rows) == len(slots) else x[mx.array(rows)]
        updated = mx.array(cache)
        updated[:, block, offset] = kept.swapaxes(0, 1)
        return updated

    if scales:
        (k, k_row), (v, v_row) = quantized(k, format_of(k_cache)), quantized(v, format_of(v_cache))
        return tuple(map(written, caches, (k, v, k_row, v_row)))
    return written(k_cache, k), written(v_cache, v)


def row_indices(slots: mx.array, heads: int, num_blocks: int, block_size: int) -> mx.array:
    """Where the rows of each head are, ``[T, H_kv]``, in the rows of an array ``[num_blocks + 1,
    H_kv, S, D]``. Rows whose slot is outside ``[0, num_blocks * S)`` go to the last block. Nothing
    is read."""
    last = num_blocks * block_size
    slots = mx.where((slots >= 0) & (slots < last), slots, last)[:, None]
    block, offset = slots // block_size, slots % block_size
    return (block * heads + mx.arange(heads, dtype=mx.int32)) * block_size + offset


def scattered(cache: mx.array, rows: mx.array, indices: mx.array) -> mx.array:
    """A cache ``[H_kv, N, S, D]`` with `rows`, as ``write_kv`` takes them, at these indices. In
    memory the order is ``[N, H_kv, S, D]``, and MLX takes the memory if nothing else holds it."""
    if rows.dtype != cache.dtype:
        raise ValueError(
            f"[write_kv] rows have dtype {rows.dtype}: expected {cache.dtype}, as the cache"
        )
    rows = rows if rows.ndim == 3 else rows.swapaxes(1, 2).flatten(0, 1)
    blocks = in_blocks(cache)
    shape, flat = blocks.shape, blocks.reshape(-1, cache.shape[-1])
    del blocks
    flat[indices] = rows
    return flat.reshape(shape).transpose(1, 0, 2, 3)


def with_blocks(cache: mx.array, indices: mx.array, content: mx.array) -> mx.array:
    """A cache ``[H_kv, N, S, D]`` with the content ``[n, H_kv, S, D]`` in these blocks."""
    blocks = in_blocks(cache)
    blocks[indices] = content
    return blocks.transpose(1, 0, 2, 3)


def in_blocks(cache: mx.array) -> mx.array:
    """A view of a cache, ``[N, H_kv, S, D]``."""
    return cache.transpose(1, 0, 2, 3)


def origins(block_pairs: mx.array) -> tuple[mx.array, mx.array]:
    """Sources and destinations of copies that are performed all at once; waits for `block_pairs`,
    whose blocks exist."""
    origin: dict[int, int] = {}
    for source, destination in as_numpy(block_pairs).tolist():
        origin[destination] = origin.get(source, source)
    return mx.array(list(origin.values()), mx.int32), mx.array(list(origin), mx.int32)


def copy_blocks(
    k_cache: mx.array, v_cache: mx.array, block_pairs: mx.array
) -> tuple[mx.array, mx.array]:
    """``mlx_paged.copy_blocks`` as a scatter into new arrays; waits for `block_pairs`."""
    blocks = range(k_cache.shape[1])
    origin: dict[int, int] = {}  # by destination: the block whose old content it gets
    for source, destination in as_numpy(block_pairs).tolist():
        if source in blocks and destination in blocks:
            origin[destination] = origin.get(source, source)
    if not origin:
        return k_cache, v_cache
    sources, destinations = mx.array(list(origin.values())), mx.array(list(origin))

    def copied(cache: mx.array) -> mx.array:
        updated = mx.array(cache)
        updated[:, destinations] = cache[:, sources]
        return updated

    return copied(k_cache), copied(v_cache)


def _gather(cache: mx.array, blocks: mx.array, scales: mx.array | None) -> mx.array:
    """K or V of every sequence in logical order, ``[B, H_kv, M * S, D]`` float32."""
    num_keys = blocks.shape[1] * cache.shape[2]
    found = _ext.gather_blocks(cache, blocks, num_keys)
    if scales is None:
        return found.astype(mx.float32)
    return dequantized(found, _ext.gather_blocks(scales, blocks, num_keys), mx.float32)


def _per_group(x: mx.array, num_kv_heads: int) -> mx.array:
    """``[B, H, ...]`` as ``[B, H_kv, H / H_kv, ...]``: query heads that share a KV head."""
    return mx.unflatten(x, 1, (num_kv_heads, x.shape[1] // num_kv_heads))


def _rotate(query: mx.array, angles: mx.array) -> mx.array:
    """Rotate dims (i, i + R/2) of ``[B, H, L, D]`` by angle i of ``[B, 1, L, R/2]``."""
    half = angles.shape[-1]
    cosine, sine = mx.cos(angles), mx.sin(angles)
    first, second = query[..., :half], query[..., half : 2 * half]
    rotated = [first * cosine - second * sine, first * sine + second * cosine]
    return mx.concatenate([*rotated, query[..., 2 * half :]], axis=-1)


def _softmax(scores: mx.array, seen: mx.array, sinks: mx.array | None) -> mx.array:
    """Softmax over the keys seen, zeros elsewhere; a sink is only in the denominator."""
    scores = mx.where(seen, scores, -mx.inf)
    highest = scores.max(axis=-1, keepdims=True)
    highest = mx.where(highest == -mx.inf, 0, highest)
    weights = mx.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks.astype(mx.float32)[:, None, None] - highest)
    return weights / mx.where(total == 0, 1, total)

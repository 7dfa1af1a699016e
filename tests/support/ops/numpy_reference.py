"""The ops in float64 NumPy: one sequence, head and query at a time.

Dimensions: B sequences, L query tokens each, H query heads, H_kv KV heads, D key head dimension,
D_v value head dimension, N blocks in the pool, S = block_size tokens per block, M columns of a
block table, T rows to write, P block pairs, R rotated dimensions, n keys of a contiguous context.

K/V is gathered into a contiguous copy and the softmax is the plain one, not streamed. Paging only
permutes the rows of K/V in memory (Kwon et al. 2023, arXiv:2309.06180, section 4.3).
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


def build_slot_mapping(
    block_table: ArrayLike, block_size: int, start: int, num_tokens: int
) -> Int64Array:
    """Slots of the positions ``start`` to ``start + num_tokens - 1`` of one sequence.

    Position t lives in slot ``block_table[t // block_size] * block_size + t % block_size``.

    Args:
        block_table: ``[M]`` physical block of each logical block.

    Returns:
        ``[num_tokens]`` int64.

    Raises:
        ValueError: the table has no block for one of the positions.
    """
    table = np.asarray(block_table, np.int64)
    if start < 0 or num_tokens < 0 or start + num_tokens > len(table) * block_size:
        raise ValueError(
            f"[build_slot_mapping] positions {start} to {start + num_tokens - 1} do not fit"
            f" {len(table)} blocks of {block_size} tokens: expected 0 to"
            f" {len(table) * block_size - 1}"
        )
    positions = np.arange(start, start + num_tokens)
    return table[positions // block_size] * block_size + positions % block_size


def write_kv_numpy(
    k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: ArrayLike
) -> None:
    """Put ``k [T, H_kv, D]`` and ``v [T, H_kv, D_v]`` at their slots ``[T]``, in place.

    The caches are ``[H_kv, N, S, D]`` and ``[H_kv, N, S, D_v]``. Slots outside ``[0, N * S)`` are
    skipped; of rows with equal slots the last one stays.
    """
    _, num_blocks, block_size, _ = k_cache.shape
    for row, slot in enumerate(np.asarray(slot_mapping)):
        if 0 <= slot < num_blocks * block_size:
            block, offset = divmod(int(slot), block_size)
            k_cache[:, block, offset] = k[row]
            v_cache[:, block, offset] = v[row]


def copy_blocks_numpy(k_cache: Array, v_cache: Array, block_pairs: ArrayLike) -> None:
    """Copy the physical blocks (source, destination) of ``block_pairs [P, 2]``, in order and in
    place; pairs with an id outside ``[0, N)`` are skipped."""
    blocks = range(k_cache.shape[1])
    for source, destination in np.asarray(block_pairs):
        if source in blocks and destination in blocks:
            k_cache[:, destination] = k_cache[:, source]
            v_cache[:, destination] = v_cache[:, source]


def paged_attention_numpy(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    rope_freqs: Array | None = None,
    attn_mask: Array | None = None,
    return_attn: bool = False,
    **options: Any,
) -> Float64Array | tuple[Float64Array, Float64Array]:
    """``mlx_paged.paged_attention`` on one layer's pool, in float64.

    The arguments are those of that function; ``options`` go to ``attention_numpy``.

    Returns:
        ``[B, H, L, D_v]``; with return_attn a pair of it and the weights ``[B, H, L, M * S]``.
    """
    batch, num_heads, num_tokens, _ = q.shape
    max_keys = block_tables.shape[1] * k_cache.shape[2]
    bias = _mask_bias(attn_mask, (batch, num_heads, num_tokens, max_keys))
    angles = rope_freqs
    if angles is not None:
        angles = angles.reshape(batch, num_tokens, angles.shape[-1])
    out = np.zeros((batch, num_heads, num_tokens, v_cache.shape[3]))
    attn = np.zeros((batch, num_heads, num_tokens, max_keys))
    for b in range(batch):
        context = int(np.clip(context_lens[b], 0, max_keys))
        slots = build_slot_mapping(block_tables[b], k_cache.shape[2], 0, context)
        in_pool = (slots >= 0) & (slots < k_cache.shape[1] * k_cache.shape[2])
        bias[b, ..., :context][..., ~in_pool] = -np.inf
        out[b], attn[b, ..., :context] = attention_numpy(
            q[b],
            _gather(k_cache, slots, in_pool),
            _gather(v_cache, slots, in_pool),
            rope_freqs=None if angles is None else angles[b],
            attn_mask=bias[b, ..., :context],
            **options,
        )
    return (out, attn) if return_attn else out


def attention_numpy(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    causal: bool = True,
    kv_head_mapping: Array | None = None,
    rope_freqs: Array | None = None,
    attn_mask: Array | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Attention of one sequence over contiguous keys and values.

    Args:
        q: ``[H, L, D]``; query l sits at position ``n - L + l``.
        k, v: ``[H_kv, n, D]`` and ``[H_kv, n, D_v]``. Rows that no query sees may hold anything.
        rope_freqs: ``[L, R/2]``.
        attn_mask: broadcastable to ``[H, L, n]``.

    The other arguments are those of ``mlx_paged.paged_attention``.

    Returns:
        ``[H, L, D_v]`` and the softmax weights ``[H, L, n]``, zero where not attended.
    """
    num_heads, num_tokens, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    bias = _mask_bias(attn_mask, (num_heads, num_tokens, num_keys))
    out = np.zeros((num_heads, num_tokens, v.shape[2]))
    weights = np.zeros((num_heads, num_tokens, num_keys))
    for h in range(num_heads):
        kv_head = h * num_kv_heads // num_heads if kv_head_mapping is None else kv_head_mapping[h]
        if not 0 <= kv_head < num_kv_heads:
            continue
        for token in range(num_tokens):
            position = num_keys - num_tokens + token
            visible = _visible_keys(position, num_keys, causal, window)
            keys = visible[bias[h, token, visible] != -np.inf]
            query = np.asarray(q[h, token], np.float64)
            if rope_freqs is not None:
                query = _rotate(query, rope_freqs[token])
            scores = scale * (k[kv_head, keys].astype(np.float64) @ query)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores + float(alibi_slopes[h]) * (keys - position)
            scores = scores + bias[h, token, keys]
            weights[h, token, keys] = _softmax(scores, None if sinks is None else float(sinks[h]))
            out[h, token] = weights[h, token, keys] @ v[kv_head, keys].astype(np.float64)
    return out, weights


def _gather(cache: Array, slots: Int64Array, in_pool: NDArray[np.bool_]) -> Float64Array:
    """Rows of the slots, ``[H_kv, len(slots), D]``; zeros for slots outside the pool."""
    num_kv_heads, _, block_size, head_dim = cache.shape
    rows = np.zeros((num_kv_heads, len(slots), head_dim))
    rows[:, in_pool] = cache[:, slots[in_pool] // block_size, slots[in_pool] % block_size]
    return rows


def _mask_bias(mask: Array | None, shape: tuple[int, ...]) -> Float64Array:
    """The mask as numbers that are added to the scores; -inf hides a key."""
    if mask is None:
        return np.zeros(shape)
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
    return np.broadcast_to(bias, shape).copy()


def _visible_keys(position: int, num_keys: int, causal: bool, window: int | None) -> Int64Array:
    """Positions that a query sees, before any mask; a window ends at the query's own position."""
    if position < 0:
        return np.arange(0)
    first = 0 if window is None else max(0, position - window + 1)
    return np.arange(first, num_keys if window is None and not causal else position + 1)


def _rotate(query: Float64Array, angles: Array) -> Float64Array:
    """Rotate dims (i, i + R/2) by angle i."""
    half = len(angles)
    cosine, sine = np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))
    first, second = query[:half], query[half : 2 * half]
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return np.concatenate((*rotated, query[2 * half :]))


def _softmax(scores: Float64Array, sink: float | None) -> Float64Array:
    """Softmax with an optional extra logit in the denominator."""
    if not len(scores):
        return scores
    logits = scores if sink is None else np.append(scores, sink)
    highest = logits.max()
    weights: Float64Array = np.exp(scores - highest) / np.exp(logits - highest).sum()
    return weights

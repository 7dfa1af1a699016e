"""Paged attention in float64, computed in NumPy and without any code of the kernels."""

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    **options: Any,
) -> tuple[Array, Array]:
    """``mlx_paged.paged_attention`` with ``return_attn`` on one layer's pool of float64."""
    block_size = k_cache.shape[2]
    rope_freqs, attn_mask = options.pop("rope_freqs", None), options.pop("attn_mask", None)
    out = np.zeros((*q.shape[:3], v_cache.shape[3]))
    weights = np.zeros((*q.shape[:3], block_tables.shape[1] * block_size))
    for b, length in enumerate(context_lens):
        blocks, offsets = np.divmod(np.arange(length), block_size)
        blocks = block_tables[b, blocks]
        query = q[b] if rope_freqs is None else _rotated(q[b], rope_freqs[b])
        mask = None if attn_mask is None else attn_mask[b, ..., :length]
        k, v = k_cache[:, blocks, offsets], v_cache[:, blocks, offsets]
        out[b], weights[b, ..., :length] = _attend(query, k, v, mask=mask, **options)
    return out, weights


def _attend(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Array | None,
    causal: bool = True,
    kv_head_mapping: Array | None = None,
    window: int | None = None,
    sinks: Array | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
) -> tuple[Array, Array]:
    """One sequence: ``q [H, L, D]``, ``k [H_kv, n, D]``, ``v [H_kv, n, D_v]``."""
    (num_heads, num_tokens, head_dim), (num_kv_heads, num_keys, _) = q.shape, k.shape
    if kv_head_mapping is None:
        kv_head_mapping = np.arange(num_heads) // (num_heads // num_kv_heads)
    k, v = k[kv_head_mapping], v[kv_head_mapping]
    key, position = np.arange(num_keys), num_keys - num_tokens + np.arange(num_tokens)[:, None]
    seen = np.broadcast_to(position >= 0, (num_tokens, num_keys))
    if causal or window is not None:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (key > position - window)
    scores = q @ k.swapaxes(1, 2) * head_dim**-0.5
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * (key - position)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    scores = np.where(seen, scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    highest[highest == -np.inf] = 0
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    is_empty = total == 0
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - highest)
    weights = weights / np.where(is_empty, 1, total)
    # Values of keys that a query does not see may hold anything.
    of_query = np.where(seen[:, :, None], v[:, None], 0)
    return (weights[:, :, None] @ of_query)[:, :, 0], weights


def _rotated(query: Array, angles: Array) -> Array:
    """Dims (i, i + R/2) of ``[H, L, D]`` rotated by angle i of ``[L, R/2]``."""
    half = angles.shape[-1]
    first, second, rest = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
    cosine, sine = np.cos(angles), np.sin(angles)
    turned = first * cosine - second * sine, first * sine + second * cosine
    return np.concatenate((*turned, rest), axis=-1)


def worst_row(got: Array, want: Array, dtype: mx.Dtype = mx.float32) -> float:
    """Error of the worst row: ``|got - want| / |max(|want|, m)|``, where ``m`` is the smallest
    normal number of `dtype`, the maximum is that of each element, and ``|row|`` is the Euclidean
    norm. Rows that must be zero have no error or an infinite one.

    The bound for a right kernel is ``u + s``: ``u`` is half the eps of `dtype`, ``s`` the relative
    error of the row before it is rounded to `dtype`. Rounding moves a normal element ``x`` by
    ``u * |x|`` at most. It moves a subnormal element by half the distance of two subnormal numbers,
    which is ``u * m`` (``2**-25`` in float16). Both are ``u * max(|x|, m)``, so

        ``|got - want| <= s * |want| + u * |max(|want|, m)| <= (u + s) * |max(|want|, m)|``

    up to the term ``u * s * |want|``, which is left out. In a row without subnormal elements
    ``|max(|want|, m)|`` is ``|want|``.

    An element that is subnormal may also be zero: Metal allows a GPU to flush it. Its error
    ``|x|`` may be 2,048 times ``u * m``. :func:`flushed` counts such elements.

    Where `want` is NaN or infinite, `got` has to be the same; else the error is infinite."""
    least = mx.finfo(dtype).smallest_normal
    is_finite = np.isfinite(want)
    is_same = is_finite | (got == want) | (np.isnan(got) & np.isnan(want))
    if not is_same.all():
        return float("inf")
    got, want = np.where(is_finite, got, 0), np.where(is_finite, want, 0)
    size = np.linalg.norm(np.maximum(abs(want), least), axis=-1)
    may_be = np.where((got == 0) & (abs(want) < least), 0, want)
    difference = np.linalg.norm(got - may_be, axis=-1)
    of_zero = np.where(difference == 0, 0.0, np.inf) + 0 * difference
    return float(np.where((want == 0).all(axis=-1), of_zero, difference / size).max())


def flushed(got: Array, want: Array, dtype: mx.Dtype) -> int:
    """How many elements are zero that no rounding makes zero: `want` is subnormal in `dtype`, and
    not below the smallest subnormal number."""
    least = mx.finfo(dtype).smallest_normal
    smallest = least * mx.finfo(dtype).eps
    return int(((got == 0) & (abs(want) >= smallest) & (abs(want) < least)).sum())

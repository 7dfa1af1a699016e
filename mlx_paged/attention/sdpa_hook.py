"""The one place that diverts a model's attention to its cache.

Models of mlx-lm call ``mx.fast.scaled_dot_product_attention(q, k, v, ...)``. While the hook is
active, a call whose keys and values are the two handles of one cache goes to that cache. Every
other call goes to MLX unchanged.

Latent attention (MLA) passes a cache's latents as keys and as values. It passes the scores of the
rotary keys, another product with that cache, as the mask. Such a call goes to the cache too.
``mx.where`` is diverted only to check that these scores are masked by the causal mask and nothing
else.
"""

from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, NamedTuple, Self

import mlx.core as mx

from mlx_paged.attention.causal import FULL, Causal
from mlx_paged.ops import view_as

mlx_attention = mx.fast.scaled_dot_product_attention
mlx_where = mx.where


class UnknownAttentionError(ValueError):
    """A layer asks its cache for attention of a kind that the hook does not know."""


class Query(NamedTuple):
    """A layer's call of attention."""

    q: mx.array  # ``[B, H, L, D]``
    scale: float
    sees: Causal  # which keys a query sees
    sinks: mx.array | None  # ``[H]``, extra logits in the softmax denominator
    # ``[B, H, L, rope]``, scaled already, if latents are keys and values. The score of a token is
    # then ``scale * q . latent + rotary . rotary key``.
    rotary: mx.array | None = None


class AttendingCache:
    """What the hook asks of a cache that can attend without gathering its keys and values."""

    sees: Causal
    """Which keys a query of the layer sees."""

    def attend(self, query: Query) -> mx.array | None:
        """Attention over the cache's K/V; None: use the gathered arrays."""
        raise NotImplementedError

    def attend_again(self, q: mx.array, scale: float) -> mx.array | None:
        """As :meth:`attend`, of a call without sinks by which a query sees what the layer's see.
        None: ask :meth:`attend`."""
        return None

    def mask(self, columns: int, sees: Causal) -> mx.array | None:
        """The mask that attention of `columns` tokens over the gathered arrays needs; None: each
        token sees all of them."""
        raise NotImplementedError

    def make_mask(
        self, N: int, return_array: bool = False, **limits: int | None
    ) -> mx.array | str | None:
        """The mask of N tokens, as models ask for it; None, as in mlx-lm, if it hides nothing. By
        `limits`, arguments of :meth:`Causal.limited`, a query may see fewer keys than the layer's.
        """
        has_limits = set(limits.values()) != {None}
        sees = self.sees.limited(**limits) if has_limits else self.sees
        mask = self.mask(N, sees)
        return None if mask is None else CausalMask.of(mask, sees=sees)


class TaggedArray(mx.array):
    """A lazy array with attributes of its own."""

    @classmethod
    def of(cls, array: mx.array, **attributes: Any) -> Self:
        tagged = view_as(cls, array)
        vars(tagged).update(attributes)
        return tagged


class KVHandle(TaggedArray):
    """Keys or values as a lazy array. The hook recognises the handle and asks `cache`; the array is
    then never evaluated. Any other use of the handle gets the array."""

    cache: AttendingCache
    role: str  # "keys" or "values"


class KeysHandle(KVHandle):
    """Keys that a layer has just written; one call makes it and its :class:`ValuesHandle`."""

    role = "keys"


class ValuesHandle(KVHandle):
    """The values beside a :class:`KeysHandle`."""

    role = "values"


class CausalMask(TaggedArray):
    """A causal mask as a lazy array: the hook reads only `sees`."""

    sees: Causal

    def __getitem__(self, item: Any) -> mx.array:
        """Models of mlx-vlm take the columns of all keys, ``mask[..., :n]``: a causal mask, too,
        though padding has more columns."""
        found: mx.array = super().__getitem__(item)
        if isinstance(item, tuple) and len(item) == 2 and item[0] is Ellipsis:
            is_start = isinstance(item[1], slice) and (item[1].start, item[1].step) == (None, None)
            if is_start and (item[1].stop or 0) >= 0:
                return CausalMask.of(found, sees=self.sees)
        return found


class RotaryScores(TaggedArray):
    """Products of queries and a cache's rotary keys as a lazy array that keeps its factors."""

    cache: AttendingCache
    queries: mx.array  # ``[B, H, L, rope]``, scaled already
    sees: Causal = FULL  # by the causal mask that was applied to the scores


class _AttentionHook:
    """The context of :func:`attention_hook`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_active = 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_active += 1
            mx.fast.scaled_dot_product_attention = _attention
            mx.where = _where

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_active -= 1
            if self._num_active == 0:
                mx.fast.scaled_dot_product_attention = mlx_attention
                mx.where = mlx_where


_hook = _AttentionHook()


def attention_hook() -> AbstractContextManager[None]:
    """A context that diverts attention. It may nest, and overlap in several threads: MLX's
    functions return when all have left it."""
    return _hook


def _attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    stream: Any = None,
    **unknown: Any,
) -> mx.array:
    if type(k) is KeysHandle and type(v) is ValuesHandle:
        cache = k.cache
        if isinstance(mask, CausalMask):
            is_own = mask.sees is cache.sees
        else:
            is_own = mask is None or (isinstance(mask, str) and mask == "causal")
        if is_own and cache is v.cache and sinks is stream is None and not unknown:
            found = cache.attend_again(q, scale)
            if found is not None:
                return found
    if not isinstance(k, KVHandle):
        given = {"sinks": sinks, "stream": stream} | unknown
        return mlx_attention(q, k, v, scale=scale, mask=mask, **given)
    is_implied = mask is None or isinstance(mask, str)
    if unknown or (is_implied and mask is not None):
        _require_known(mask, unknown)
    if stream is None:
        out = _of_cache(q, k, v, scale, mask, sinks, is_implied)
    else:
        with mx.stream(stream):
            out = _of_cache(q, k, v, scale, mask, sinks, is_implied)
    if out is None and is_implied:
        mask = k.cache.make_mask(q.shape[2])
    if out is None:
        out = mlx_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream)
    return out


def _of_cache(
    q: mx.array,
    k: KVHandle,
    v: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    is_implied: bool,  # whether the mask is the layer's own
) -> mx.array | None:
    """The answer of the cache that the handles name; None: the gathered arrays have to be used."""
    if (is_implied or isinstance(mask, CausalMask)) and _is_pair(k, v):
        sees = k.cache.sees if is_implied else mask.sees
        return k.cache.attend(Query(q, scale, sees, sinks))
    if isinstance(mask, RotaryScores) and _is_latent(q, k, v, mask):
        return mask.cache.attend(Query(q, scale, mask.sees, sinks, mask.queries))
    return None


def _require_known(mask: Any, unknown: dict[str, Any]) -> None:
    """Raise UnknownAttentionError for a keyword or a mask's word that may change what a query sees:
    a cache would answer as if neither were given."""
    if unknown:
        raise UnknownAttentionError(
            f"scaled_dot_product_attention has the argument {next(iter(unknown))}: expected no "
            "others than scale, mask, sinks and stream"
        )
    if isinstance(mask, str) and mask != "causal":
        raise UnknownAttentionError(
            f"scaled_dot_product_attention has the mask {mask!r}: expected 'causal', an array or "
            "None"
        )


def _is_pair(k: KVHandle, v: mx.array) -> bool:
    """Whether these are the keys and the values of one cache, in these roles."""
    return isinstance(v, KVHandle) and k.cache is v.cache and (k.role, v.role) == ("keys", "values")


def _is_latent(q: mx.array, k: KVHandle, v: mx.array, scores: RotaryScores) -> bool:
    """Whether `k` is both keys and values, and `scores` belong to the same cache and queries."""
    is_latents = k is v and k.role == "keys" and k.cache is scores.cache
    return is_latents and q.shape[:3] == scores.queries.shape[:3]


def _where(condition: Any, x: Any, y: Any, /, **kwargs: Any) -> mx.array:
    result = mlx_where(condition, x, y, **kwargs)
    is_masking = isinstance(x, RotaryScores) and isinstance(condition, CausalMask)
    if is_masking and x.sees.is_full and _is_lowest(y, x.dtype):
        return RotaryScores.of(result, cache=x.cache, queries=x.queries, sees=condition.sees)
    return result


def _is_lowest(value: Any, dtype: mx.Dtype) -> bool:
    """Whether this number marks a score as "not attended"."""
    if isinstance(value, mx.array):
        if value.size != 1:
            return False
        value = value.item()
    return bool(value <= mx.finfo(dtype).min)


class RotaryHandle(KVHandle):
    """Rotary keys ``[B, 1, S, rope]``, which a layer caches as its values. Their product with
    queries is ``queries @ handle.swapaxes(-1, -2)``."""

    def swapaxes(self, axis1: int, axis2: int, **kwargs: Any) -> mx.array:
        swapped = mx.swapaxes(self, axis1, axis2, **kwargs)
        if {axis1 % self.ndim, axis2 % self.ndim} != {self.ndim - 1, self.ndim - 2}:
            return swapped
        return _RotaryColumns.of(swapped, cache=self.cache)


class _RotaryColumns(TaggedArray):
    """Rotary keys ``[B, 1, rope, S]``."""

    cache: AttendingCache

    def __rmatmul__(self, queries: mx.array) -> RotaryScores:
        """Python calls this before the left operand's own product: this is a subclass."""
        return RotaryScores.of(mx.matmul(queries, self), cache=self.cache, queries=queries)

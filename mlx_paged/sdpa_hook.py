"""The one place where a model's attention is diverted to its cache.

Models of mlx-lm end their attention in ``mx.fast.scaled_dot_product_attention(q, k, v, ...)``.
While the hook is in place, a call whose keys and values are the two handles of one cache goes to
that cache; any other call is MLX's own, unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol

import mlx.core as mx

mlx_attention = mx.fast.scaled_dot_product_attention


class AttendingCache(Protocol):
    """A cache that can attend without its keys and values being gathered."""

    def attend(
        self, q: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention of `q` over what the cache holds; None: use the gathered arrays."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> "CausalMask":
        """The mask that gathered arrays of several sequences cannot do without."""


class KVHandle(mx.array):
    """Keys or values as a lazy array with a tag.

    The hook sees the tag and asks `cache`; the array is then never evaluated. A model that does
    anything else with it gets the array.
    """

    cache: AttendingCache
    role: str  # "keys" or "values"

    @classmethod
    def of(cls, array: mx.array, cache: AttendingCache, role: str) -> "KVHandle":
        handle = cls(array)
        handle.cache = cache
        handle.role = role
        return handle


class CausalMask(mx.array):
    """A causal mask as a lazy array that says so: the hook reads only `window`."""

    window: int | None

    @classmethod
    def of(cls, array: mx.array, window: int | None) -> "CausalMask":
        mask = cls(array)
        mask.window = window
        return mask


_lock = Lock()
_active = 0


@contextmanager
def attention_hook() -> Iterator[None]:
    """Divert attention within this context.

    Contexts may nest and overlap in several threads; the last to leave restores MLX's function.
    """
    global _active
    with _lock:
        _active += 1
        mx.fast.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                mx.fast.scaled_dot_product_attention = mlx_attention


def _attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **kwargs: Any
) -> mx.array:
    if isinstance(k, KVHandle):
        if mask is None or isinstance(mask, str):
            mask = k.cache.make_mask(q.shape[2])
        if isinstance(mask, CausalMask) and _is_pair(k, v):
            out = k.cache.attend(q, scale, mask.window, kwargs.get("sinks"))
            if out is not None:
                return out
    return mlx_attention(q, k, v, scale=scale, mask=mask, **kwargs)


def _is_pair(k: KVHandle, v: mx.array) -> bool:
    """Whether these are the keys and the values of one cache, in these roles."""
    return isinstance(v, KVHandle) and k.cache is v.cache and (k.role, v.role) == ("keys", "values")

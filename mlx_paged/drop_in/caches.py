"""Prompt caches of paged caches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache

from mlx_paged.arguments import memory, optional_integer
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.kv_caches import PagedKVCache
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import PoolOptions, pool_of
from mlx_paged.kv.memory import device_memory
from mlx_paged.options import BLOCK_SIZE, KVBits, checked_bits
from mlx_paged.runner.model_probe import ONE_AT_A_TIME, REFUSED, leaves, model_type, require_model


def make_prompt_cache(
    model: nn.Module,
    max_kv_size: int | None = None,
    *,
    block_size: int = BLOCK_SIZE,
    kv_memory: int | None = None,
    kv_bits: KVBits = None,
) -> list[Any]:
    """mlx-lm's prompt cache for `model`, with a paged cache for every layer that can have one.

    K/V is in one pool per model, thread and window. It grows as needed; the last cache frees it.
    Without :func:`attention_hook` (or the patch) the caches work too: attention then gathers K/V.

    A layer keeps mlx-lm's cache where paging has no use or gives a wrong result: recurrent states,
    rotating caches that keep their first tokens (`max_kv_size`), chunked and quantized caches, and
    all layers of the few models that docs/drop-in.md names.

    Args:
        max_kv_size: as in mlx-lm.
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most; default what the device has left when the pool grows.
        kv_bits: 8, 6 or 4 to store K/V quantized. Such caches are saved as classes of this
            package, and :func:`mlx_lm.models.cache.load_prompt_cache` needs it to load them.

    Raises:
        ValueError: `model` is no model, `block_size` or `kv_memory` is below 1, the device cannot
            hold `kv_memory`, or there are no such `kv_bits`. Layers that cannot be quantized so
            raise it when they are written.
    """
    require_model("make_prompt_cache", "model", model)
    kv_bits = checked_bits("make_prompt_cache", kv_bits)
    check_options("make_prompt_cache", block_size, kv_memory)
    caches = unpaged_prompt_cache(model, max_kv_size)
    windows = [getattr(c, "max_size", None) for c in leaves(caches) if is_pageable(c)]
    if not windows or model_type(model) in {*REFUSED, *ONE_AT_A_TIME}:
        return caches
    empty = {}
    for window in set(windows):
        count = windows.count(window)
        share = kv_memory and max(1, kv_memory * count // len(windows))
        pool = pool_of(model, count, PoolOptions(block_size, share, window, kv_bits))
        rows, layers = [pool.new_sequence()], [layer_of(pool, i) for i in range(count)]
        empty[window] = iter([PagedKVCache.of(layer, rows, [0], window) for layer in layers])

    def paged(cache: Any) -> Any:
        return next(empty[getattr(cache, "max_size", None)]) if is_pageable(cache) else cache

    return _converted(paged, caches)


construction = threading.local()
"""`is_stock`: whether this thread's calls of mlx-lm's classes give its own caches, also patched."""


def unpaged_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's own prompt cache, also under the patch."""
    before, construction.is_stock = getattr(construction, "is_stock", False), True
    try:
        caches: list[Any] = stock_make_prompt_cache(model, max_kv_size)
    finally:
        construction.is_stock = before
    return caches


def check_options(where: str, block_size: int, kv_memory: int | None) -> None:
    """Raise ValueError if an option is no integer, below 1, or more than the device can hold."""
    for name, value in (("block_size", block_size), ("kv_memory", kv_memory)):
        optional_integer(where, name, value, 1)
    if kv_memory is not None and kv_memory > device_memory():
        raise ValueError(
            f"[{where}] kv_memory is {memory(kv_memory)}: expected at most "
            f"{memory(device_memory())}, what the device can hold"
        )


def is_pageable(cache: Any) -> bool:
    """Whether a paged cache can take the place of this cache of one layer."""
    kind = getattr(cache, "stock_class", type(cache))
    return kind is stock.KVCache or (kind is stock.RotatingKVCache and cache.keep == 0)


def as_paged(
    model: nn.Module, given: Sequence[Any], max_kv_size: int | None = None, **options: Any
) -> Sequence[Any]:
    """A prompt cache that can join a batch of caches that :func:`make_prompt_cache` makes. The K/V
    of mlx-lm's own caches in `given` is copied to the model's pool."""

    def is_foreign(cache: Any) -> bool:
        return is_pageable(cache) and not isinstance(cache, PagedCache)

    if not any(is_foreign(leaf) for leaf in leaves(given)):
        return given

    def filled(cache: Any, fresh: Any) -> Any:
        if not (isinstance(fresh, PagedKVCache) and is_foreign(cache)):
            return cache
        if cache.offset > 0:
            fresh.fill(cache)
        return fresh

    caches = _converted(filled, given, make_prompt_cache(model, max_kv_size, **options))
    mx.eval([cache.state for cache in caches])
    return caches


def _converted(convert: Callable[..., Any], *prompt_caches: Iterable[Any]) -> list[Any]:
    """A prompt cache of what `convert` makes of each layer's caches, within lists of caches too."""
    return [
        stock.CacheList(*_converted(convert, *(cache.caches for cache in caches)))
        if type(caches[0]) is stock.CacheList
        else convert(*caches)
        for caches in zip(*prompt_caches, strict=True)
    ]

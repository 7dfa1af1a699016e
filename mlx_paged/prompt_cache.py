"""Paged caches in place of mlx-lm's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache

from mlx_paged.arguments import optional_integer
from mlx_paged.batch_prompt_cache import BatchPagedKVCache
from mlx_paged.kv_memory import device_memory
from mlx_paged.model_probe import ONE_AT_A_TIME, REFUSED, leaves, model_type
from mlx_paged.paged_cache import PagedCache
from mlx_paged.shared_pool import BLOCK_SIZE, pool_of


class PagedKVCache(PagedCache):
    """One layer's K/V of one sequence, in place of mlx-lm's KVCache and RotatingKVCache.

    A forward of several rows makes it that of as many sequences of equal length.
    """

    @property
    def offset(self) -> int:
        """Tokens of the sequence."""
        return int(self.starts[0])

    @offset.setter
    def offset(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self.offset:
            raise ValueError(
                f"[PagedKVCache] offset is {num_tokens}: expected 0 to {self.offset}, the tokens "
                "there are"
            )
        self.trim(self.offset - num_tokens)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if len(self.rows) == 1 < keys.shape[0] and self.empty():
            self._show(self.rows[0].with_companions(keys.shape[0]), [0] * keys.shape[0])
        return super().update_and_fetch(keys, values)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Several sequences as a batch; they stay as they are."""
        return BatchPagedKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> stock.QuantizedKVCache:
        """mlx-lm's quantized cache with a copy of the K/V: contiguous, and shared with nobody.

        Raises:
            NotImplementedError: a sliding-window layer, as in mlx-lm.
        """
        return self.as_stock().to_quantized(group_size, bits)

    def as_stock(self) -> stock.KVCache | stock.RotatingKVCache:
        """mlx-lm's own cache with a copy of the K/V: all, or a sliding-window layer's last window.

        The copy is evaluated: this cache may be trimmed or die.
        """
        num_kept = min(self.size(), self.window or self.size())
        if self.window is None:
            cache = stock.KVCache()
        else:
            cache = stock.RotatingKVCache(self.window)
            cache._idx = num_kept
        cache.offset = self.size()
        if not self.empty():
            keys, values = self.keys_and_values()
            cache.keys, cache.values = keys[..., -num_kept:, :], values[..., -num_kept:, :]
            mx.eval(cache.keys, cache.values)
        return cache


BatchPagedKVCache.row_class = PagedKVCache


def make_prompt_cache(
    model: nn.Module,
    max_kv_size: int | None = None,
    *,
    block_size: int = BLOCK_SIZE,
    kv_memory: int | None = None,
) -> list[Any]:
    """mlx-lm's prompt cache for `model`, with every layer paged that can be.

    Its sequences live in one pool per model and thread, which grows as they do and dies with them.
    Outside :func:`attention_hook` (or the patch) the caches work too, through gathered K/V.

    Stock caches stay where paging has nothing to offer or would not be right: recurrent states,
    rotating caches that keep their first tokens (`max_kv_size`), chunked and quantized caches, and
    all caches of the few models for which docs/drop-in.md says so.

    Args:
        max_kv_size: as in mlx-lm.
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most; default what the device has left whenever the pool grows.

    Raises:
        ValueError: `block_size` or `kv_memory` is below 1, or the device cannot hold `kv_memory`.
    """
    check_options("make_prompt_cache", block_size, kv_memory)
    caches: list[Any] = stock_make_prompt_cache(model, max_kv_size)
    num_layers = sum(is_pageable(leaf) for leaf in leaves(caches))
    if num_layers == 0 or model_type(model) in {*REFUSED, *ONE_AT_A_TIME}:
        return caches
    pool = pool_of(model, num_layers, block_size, kv_memory)
    sequence, layers = pool.new_sequence(), map(pool.layer, range(num_layers))

    def paged(cache: Any) -> Any:
        if not is_pageable(cache):
            return cache
        window = cache.max_size if type(cache) is stock.RotatingKVCache else None
        return PagedKVCache(next(layers), [sequence], [0], window)

    return converted(caches, paged)


def check_options(where: str, block_size: int, kv_memory: int | None) -> None:
    """Raise ValueError if an option is no integer, below 1, or more than the device can hold."""
    for name, value in (("block_size", block_size), ("kv_memory", kv_memory)):
        optional_integer(where, name, value, 1)
    if kv_memory is not None and kv_memory > device_memory():
        raise ValueError(
            f"[{where}] kv_memory is {kv_memory} bytes: expected at most {device_memory()}, what "
            "the device can hold"
        )


def is_pageable(cache: Any) -> bool:
    """Whether a paged cache can take the place of this cache of one layer."""
    kind = type(cache)
    plain = kind in (stock.KVCache, stock.ConcatenateKVCache)
    return plain or (kind is stock.RotatingKVCache and cache.keep == 0)


def converted(caches: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """The caches of single layers converted, in lists of caches too."""
    return [
        stock.CacheList(*converted(cache.caches, convert))
        if type(cache) is stock.CacheList
        else convert(cache)
        for cache in caches
    ]

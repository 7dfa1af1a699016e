"""Paged caches in place of mlx-lm's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache

from mlx_paged.arguments import optional_integer
from mlx_paged.batch_prompt_cache import BatchPagedKVCache
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
        if self.window is not None:
            raise NotImplementedError(
                "[to_quantized] a sliding-window layer cannot be quantized: mlx-lm has no such "
                "cache either"
            )
        quantized = stock.QuantizedKVCache(group_size=group_size, bits=bits)
        quantized.offset = self.offset
        if not self.empty():
            keys, values = map(mx.array, self.keys_and_values())
            quantized.keys = mx.quantize(keys, group_size=group_size, bits=bits)
            quantized.values = mx.quantize(values, group_size=group_size, bits=bits)
        return quantized


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
    all caches of the models that the engine refuses or serves one at a time.

    Args:
        max_kv_size: as in mlx-lm.
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most; default what the device has left whenever the pool grows.

    Raises:
        ValueError: `block_size` or `kv_memory` is below 1.
    """
    check_options("make_prompt_cache", block_size, kv_memory)
    caches: list[Any] = stock_make_prompt_cache(model, max_kv_size)
    num_layers = sum(_is_pageable(leaf) for leaf in leaves(caches))
    if num_layers == 0 or model_type(model) in {*REFUSED, *ONE_AT_A_TIME}:
        return caches
    pool = pool_of(model, num_layers, block_size, kv_memory)
    sequence, layers = pool.new_sequence(), map(pool.layer, range(num_layers))

    def next_layer(window: int | None) -> PagedKVCache:
        return PagedKVCache(next(layers), [sequence], [0], window)

    return [_paged(cache, next_layer) for cache in caches]


def check_options(where: str, block_size: int, kv_memory: int | None) -> None:
    """Raise ValueError if an option is no integer or below 1."""
    for name, value in (("block_size", block_size), ("kv_memory", kv_memory)):
        optional_integer(where, name, value, 1)


def _is_pageable(cache: Any) -> bool:
    kind = type(cache)
    plain = kind in (stock.KVCache, stock.ConcatenateKVCache)
    return plain or (kind is stock.RotatingKVCache and cache.keep == 0)


def _paged(cache: Any, next_layer: Callable[[int | None], PagedKVCache]) -> Any:
    if type(cache) is stock.CacheList:
        return stock.CacheList(*(_paged(c, next_layer) for c in cache.caches))
    if not _is_pageable(cache):
        return cache
    return next_layer(cache.max_size if type(cache) is stock.RotatingKVCache else None)

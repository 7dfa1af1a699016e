"""Prompt caches in files: always mlx-lm's own format, whether the caches are paged or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import load_prompt_cache as stock_load_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as stock_save_prompt_cache

from mlx_paged.batch_prompt_cache import BatchPagedKVCache
from mlx_paged.model_probe import leaves
from mlx_paged.paged_cache import PagedCache
from mlx_paged.paged_sequence import PagedSequence
from mlx_paged.pool_layer import PoolLayer
from mlx_paged.prompt_cache import PagedKVCache, converted, is_pageable, window_of
from mlx_paged.shared_pool import BLOCK_SIZE, SharedPool

BATCHES = (stock.BatchKVCache, stock.BatchRotatingKVCache)


def save_prompt_cache(
    file_name: str, cache: Sequence[Any], metadata: dict[str, str] | None = None
) -> None:
    """mlx-lm's function, for paged caches too: their K/V is copied to mlx-lm's own caches first."""
    stock_save_prompt_cache(file_name, converted(cache, _as_stock), metadata)


def load_prompt_cache(
    file_name: str,
    return_metadata: bool = False,
    *,
    block_size: int = BLOCK_SIZE,
    kv_memory: int | None = None,
) -> Any:
    """mlx-lm's function, with every layer paged that can be.

    The K/V is copied to a pool of its own. Joining a batch copies it to the batch's pool.

    Raises:
        OutOfBlocksError: the K/V is larger than `kv_memory`.
    """
    caches, metadata = stock_load_prompt_cache(file_name, return_metadata=True)
    num_layers = sum(is_pageable(leaf) or type(leaf) in BATCHES for leaf in leaves(caches))
    pool = SharedPool(num_layers, block_size, kv_memory, is_loaded=True)
    caches = _paged(caches, pool)
    return (caches, metadata) if return_metadata else caches


def _as_stock(cache: Any) -> Any:
    return cache.as_stock() if isinstance(cache, PagedCache) else cache


def _paged(caches: Sequence[Any], pool: SharedPool) -> list[Any]:
    """The same caches with their K/V in `pool`, evaluated."""
    batch_size = max((c.offset.size for c in leaves(caches) if type(c) in BATCHES), default=1)
    sequences = [pool.new_sequence() for _ in range(batch_size)]
    layers = map(pool.layer, range(pool.num_layers))

    def paged(cache: Any) -> Any:
        if is_pageable(cache):
            return _filled(next(layers), sequences[0], cache)
        if type(cache) in BATCHES:
            layer, rows = next(layers), map(cache.extract, range(batch_size))
            filled = [_filled(layer, *row) for row in zip(sequences, rows, strict=True)]
            starts = [row.offset for row in filled]
            return BatchPagedKVCache(layer, sequences, starts, filled[0].window)
        return cache

    caches = converted(caches, paged)
    mx.eval([cache.state for cache in caches])
    return caches


def _filled(layer: PoolLayer, sequence: PagedSequence, cache: Any) -> PagedKVCache:
    """A paged cache with a copy of a stock cache's K/V.

    A rotating cache has forgotten what no query sees any more. Zeros take the place of these
    tokens, and the sequence can no longer be trimmed.
    """
    paged = PagedKVCache(layer, [sequence], [0], window_of(cache))
    if cache.offset > 0:
        keys, values = _in_order(cache)
        num_forgotten = cache.offset - keys.shape[2]
        padding = [(0, 0), (0, 0), (num_forgotten, 0), (0, 0)]
        paged.update_and_fetch(mx.pad(keys, padding), mx.pad(values, padding))
        for row in paged.rows:
            row.lacks_start |= num_forgotten > 0
    return paged


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    if isinstance(cache, stock.RotatingKVCache):
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    keys, values = cache.keys_and_values()
    return keys, values

"""What goes between paged caches and mlx-lm's own: saved files, and caches that join a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import save_prompt_cache as stock_save_prompt_cache

from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.caches import PagedKVCache, converted, is_pageable, make_prompt_cache
from mlx_paged.runner.model_probe import leaves


def save_prompt_cache(
    file_name: str, cache: Sequence[Any], metadata: dict[str, str] | None = None
) -> None:
    """mlx-lm's function, for paged caches too: their K/V is copied to mlx-lm's own caches first."""
    stock_save_prompt_cache(file_name, converted(cache, _as_stock), metadata)


def _as_stock(cache: Any) -> Any:
    return cache.as_stock() if isinstance(cache, PagedCache) else cache


def as_paged(
    model: nn.Module, given: Sequence[Any], max_kv_size: int | None = None, **options: Any
) -> Sequence[Any]:
    """A prompt cache that can join a batch of those that :func:`make_prompt_cache` makes.

    Where `given` has a stock cache and the model's own are paged, its K/V is copied to their pool.
    """
    if not any(is_pageable(leaf) for leaf in leaves(given)):
        return given
    caches = _joined(make_prompt_cache(model, max_kv_size, **options), given)
    mx.eval([cache.state for cache in caches])
    return caches


def _joined(fresh: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    return [_one_joined(*pair) for pair in zip(fresh, given, strict=True)]


def _one_joined(fresh: Any, given: Any) -> Any:
    if isinstance(given, stock.CacheList):
        return stock.CacheList(*_joined(fresh.caches, given.caches))
    if not (isinstance(fresh, PagedKVCache) and is_pageable(given)):
        return given
    if given.offset > 0:
        _fill(fresh, given)
    return fresh


def _fill(paged: PagedKVCache, given: Any) -> None:
    """Copy a stock cache's K/V to an empty paged one.

    A rotating cache has forgotten what no query sees any more. Zeros take the place of these
    tokens, and the sequence can no longer be trimmed.
    """
    keys, values = _in_order(given)
    num_forgotten = given.offset - keys.shape[2]
    padding = [(0, 0), (0, 0), (num_forgotten, 0), (0, 0)]
    paged.update_and_fetch(mx.pad(keys, padding), mx.pad(values, padding))
    for row in paged.rows:
        row.lacks_start |= num_forgotten > 0


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    if isinstance(cache, stock.RotatingKVCache):
        return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)
    keys, values = cache.keys_and_values()
    return keys, values

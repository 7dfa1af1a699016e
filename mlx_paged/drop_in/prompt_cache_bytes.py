"""What the entries of mlx-lm's LRUPromptCache hold."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from mlx_lm.models.cache import LRUPromptCache

from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.pool_layer import PagedSequence
from mlx_paged.drop_in.shared_pool import SharedPool
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import block_bytes
from mlx_paged.runner.model_probe import leaves

stock_insert_cache = LRUPromptCache.insert_cache
stock_trim_to = LRUPromptCache.trim_to


def insert_cache(self: LRUPromptCache, *args: Any, **options: Any) -> None:
    """Replaces mlx-lm's method, which evicts by what each entry held when it was inserted."""
    limit, self.max_bytes = self.max_bytes, 1 << 63
    try:
        stock_insert_cache(self, *args, **options)
    finally:
        self.max_bytes = limit
    trim_to(self, n_bytes=limit)


def trim_to(
    self: LRUPromptCache, *, n_sequences: int | None = None, n_bytes: int | None = None
) -> None:
    """Replaces mlx-lm's method, as :func:`insert_cache`."""
    stock_trim_to(self, n_sequences=n_sequences)
    _count(self)
    while n_bytes is not None and self.nbytes > max(n_bytes, 0):
        stock_trim_to(self, n_sequences=len(self) - 1)
        _count(self)


def _count(lru: Any) -> None:
    """Let each entry count 1/n of a block that n entries hold. What else shares a block does not
    matter, so the sum stays what the entries hold, until one comes or goes."""
    keys = [(kind, key) for kind, known in lru._lru._lrus.items() for key in known]
    entries = [(kind, lru._trie.get(*key)) for kind, key in keys]
    found = [_Held(entry.prompt_cache) for _, entry in entries]
    tables: dict[SharedPool, list[Int32Array]] = defaultdict(list)
    for held in found:
        for row, table in held.tables.items():
            tables[row.pool].append(table)
    sharers = {pool: np.bincount(np.concatenate(parts)) for pool, parts in tables.items()}
    lru._n_bytes_by_type = dict.fromkeys(lru._n_bytes_by_type, 0)
    for (kind, entry), held in zip(entries, found, strict=True):
        shares = (
            size * (1 / sharers[row.pool][held.tables[row]]).sum()
            for row, size in held.block_bytes.items()
        )
        entry.nbytes = held.unpaged + math.ceil(sum(shares))
        lru._n_bytes_by_type[kind] += entry.nbytes
    lru._n_bytes = sum(lru._n_bytes_by_type.values())


class _Held:
    """The blocks of a prompt cache, by sequence; the bytes of a block in all layers that show it;
    and the bytes of mlx-lm's own caches."""

    def __init__(self, prompt_cache: list[Any]) -> None:
        self.unpaged = 0
        self.block_bytes = Counter[PagedSequence]()
        self.tables: dict[PagedSequence, Int32Array] = {}
        for cache in leaves(prompt_cache):
            if not isinstance(cache, PagedCache):
                self.unpaged += cache.nbytes
                continue
            layer, allocator = cache.layer, cache.layer.pool.allocator
            shapes = [] if layer.shape is None else [layer.shape]
            for row in cache.rows:
                self.block_bytes[row] += block_bytes(shapes, layer.pool.block_size)
                self.tables[row] = layer.blocks(row, allocator.num_tokens(row.id))

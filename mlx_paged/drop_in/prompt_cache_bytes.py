"""What the entries of mlx-lm's LRUPromptCache hold."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import chain
from typing import Any

import numpy as np
from mlx_lm.models.cache import LRUPromptCache

from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.shared_pool import PagedSequence, SharedPool
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.shapes import block_bytes
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
    """Let each entry count 1/n of a block that n entries hold. Caches outside of the entries do not
    count as sharers. So the sum changes only when an entry comes or goes."""
    keys = [(kind, key) for kind, known in lru._lru._lrus.items() for key in known]
    entries = [(kind, lru._trie.get(*key)) for kind, key in keys]
    held = [_blocks(entry.prompt_cache) for _, entry in entries]
    tables: dict[SharedPool, list[Int32Array]] = defaultdict(list)
    for row, (table, _) in chain.from_iterable(blocks.items() for blocks in held):
        tables[row.pool].append(table)
    sharers = {pool: np.bincount(np.concatenate(parts)) for pool, parts in tables.items()}
    lru._n_bytes_by_type = dict.fromkeys(lru._n_bytes_by_type, 0)
    for (kind, entry), blocks in zip(entries, held, strict=True):
        shares = [size / sharers[row.pool][table] for row, (table, size) in blocks.items()]
        unpaged = [c.nbytes for c in leaves(entry.prompt_cache) if not isinstance(c, PagedCache)]
        entry.nbytes = sum(unpaged) + math.ceil(sum(share.sum() for share in shares))
        lru._n_bytes_by_type[kind] += entry.nbytes
    lru._n_bytes = sum(lru._n_bytes_by_type.values())


def _blocks(prompt_cache: list[Any]) -> dict[PagedSequence, tuple[Int32Array, int]]:
    """Each sequence's blocks, and the bytes of a block in all layers that show the sequence."""
    found: dict[PagedSequence, tuple[Int32Array, int]] = {}
    for cache in leaves(prompt_cache):
        if isinstance(cache, PagedCache) and cache.layer.shape is not None:
            layer, allocator = cache.layer, cache.layer.pool.allocator
            size = block_bytes([cache.layer.shape], layer.pool.block_size)
            for row in cache.rows:
                table = layer.blocks(row, allocator.num_tokens(row.id))
                found[row] = table, size + (found[row][1] if row in found else 0)
    return found

"""The paged caches of one sequence and of a batch, and prompt caches made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as stock_save_prompt_cache

from mlx_paged.arguments import optional_integer
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.shared_pool import BLOCK_SIZE, pool_of
from mlx_paged.kv.memory import device_memory
from mlx_paged.kv.pool import as_int32
from mlx_paged.runner.model_probe import ONE_AT_A_TIME, REFUSED, leaves, model_type


class PagedKVCache(PagedCache):
    """One layer's K/V of one sequence, in place of mlx-lm's KVCache and RotatingKVCache.

    If its first forward has several rows, it holds as many sequences, all of equal length.
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
                "of the sequence"
            )
        self.trim(self.offset - num_tokens)

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        if len(self.rows) == 1 < keys.shape[0]:
            self._set_rows(self.rows[0].with_companions(keys.shape[0]), [0] * keys.shape[0])
        super()._begin(keys, values)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Forks of several sequences as a batch."""
        return BatchPagedKVCache.merge(caches)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> stock.QuantizedKVCache:
        """mlx-lm's quantized cache with a contiguous copy of the K/V.

        Raises:
            NotImplementedError: the layer has a sliding window; mlx-lm raises the same.
        """
        return self.as_stock().to_quantized(group_size, bits)

    def as_stock(self) -> stock.KVCache | stock.RotatingKVCache:
        """mlx-lm's own cache with a copy of the K/V: all, or a sliding-window layer's last window.

        The copy is evaluated, so that this cache may be trimmed or deleted.
        """
        num_kept = self.size()
        if self.window is None:
            cache = stock.KVCache()
        else:
            cache = stock.RotatingKVCache(self.window)
            cache._idx = num_kept
        cache.offset = self.offset
        if not self.empty():
            keys, values = self.keys_and_values()
            cache.keys, cache.values = keys[..., -num_kept:, :], values[..., -num_kept:, :]
            mx.eval(cache.keys, cache.values)
        return cache

    def fill(self, cache: Any) -> None:
        """Copy the K/V of mlx-lm's own cache to this empty one; of a rotating cache, its last
        window."""
        if isinstance(cache, stock.RotatingKVCache):
            keys, values = map(cache._temporal_order, (cache.keys, cache.values))
        else:
            keys, values = cache.keys_and_values()
        self._begin(keys, values)
        self.layer.write_last(self.rows, keys, values, cache.offset)
        self.starts = np.full_like(self.starts, cache.offset)


class BatchPagedKVCache(PagedCache):
    """One layer's K/V of the rows of a batch, each with a context length of its own.

    It takes the place of mlx-lm's BatchKVCache and BatchRotatingKVCache. Padding is not stored:
    the padding columns of a forward have no slots.
    """

    @property
    def offset(self) -> mx.array:
        """``[B]`` int32, position of each row's next token."""
        return self._latest.forward.next_offset if self._latest else as_int32(self.starts)

    # Padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say which columns of the next forwards are padding.

        Args:
            left_padding: columns before each row's first token; only for an empty cache.
            lengths: tokens of each row before its right padding begins.
            right_padding: columns after these tokens; it needs `lengths`.
        """
        if left_padding is not None:
            if not self.empty():
                raise ValueError(
                    "[prepare] left_padding is given, but the cache has tokens: expected an "
                    "empty one"
                )
            self._set_rows(self.rows, self.starts - np.array(left_padding, np.int32))
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[prepare] right_padding is given without lengths: expected both")
            self._remaining = np.array(lengths, np.int32)

    def finalize(self) -> None:
        """End the right padding."""
        self._remaining = None

    # Rows

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the rows with these indices, in this order; a repeated index forks its row."""
        indices: list[int] = np.array(batch_indices).tolist()
        seen: set[int] = set()
        rows = []
        for i in indices:
            row = self.rows[i]
            rows.append(row.fork_for(self.layer) if row.id in seen else row)
            seen.add(row.id)
        if self._remaining is not None:
            self._remaining = self._remaining[indices]
        self._set_rows(rows, self.starts[indices])

    def extend(self, other: BatchPagedKVCache) -> None:
        """Add forks of the rows of another paged cache with the same window."""
        if not isinstance(other, PagedCache):
            raise ValueError(
                f"[extend] other is a {type(other).__name__}: expected a {type(self).__name__}; "
                "paged and stock caches cannot share a batch"
            )
        if other.window != self.window:
            raise ValueError(
                f"[extend] other has window {other.window}: expected {self.window} as here"
            )
        rows = [*self.rows, *other.rows_in(self.layer)]
        self._set_rows(rows, np.concatenate([self.starts, other.starts]))

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one row as a cache of its own."""
        row = self.rows[idx].fork_for(self.layer)
        return PagedKVCache(self.layer, [row], self.starts[[idx]], self.window)

    def as_stock(self) -> stock.BatchKVCache | stock.BatchRotatingKVCache:
        """A copy of the K/V in mlx-lm's own batch cache."""
        rows = [self.extract(i).as_stock() for i in range(len(self.rows))]
        return type(rows[0]).merge(rows)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Forks of the rows of several paged caches with one window, in the first one's pool."""
        for cache in caches:
            if not isinstance(cache, PagedCache):
                raise ValueError(
                    f"[merge] caches has a {type(cache).__name__} among paged ones: expected "
                    "paged caches only"
                )
            if cache.window != caches[0].window:
                raise ValueError(
                    f"[merge] caches have windows {caches[0].window} and {cache.window}: "
                    "expected the same"
                )
        layer = caches[0].layer
        rows = [row for cache in caches for row in cache.rows_in(layer)]
        return cls(layer, rows, np.concatenate([c.starts for c in caches]), caches[0].window)


def make_prompt_cache(
    model: nn.Module,
    max_kv_size: int | None = None,
    *,
    block_size: int = BLOCK_SIZE,
    kv_memory: int | None = None,
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

    Raises:
        ValueError: `block_size` or `kv_memory` is below 1, or the device cannot hold `kv_memory`.
    """
    check_options("make_prompt_cache", block_size, kv_memory)
    caches: list[Any] = stock_make_prompt_cache(model, max_kv_size)
    windows = [getattr(c, "max_size", None) for c in leaves(caches) if is_pageable(c)]
    if not windows or model_type(model) in {*REFUSED, *ONE_AT_A_TIME}:
        return caches
    empty = {}
    for window in set(windows):
        count = windows.count(window)
        share = kv_memory and max(1, kv_memory * count // len(windows))
        pool = pool_of(model, count, block_size, share, window)
        rows, layers = [pool.new_sequence()], map(pool.layer, range(count))
        empty[window] = iter([PagedKVCache(layer, rows, [0], window) for layer in layers])

    def paged(cache: Any) -> Any:
        return next(empty[getattr(cache, "max_size", None)]) if is_pageable(cache) else cache

    return _converted(paged, caches)


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


def save_prompt_cache(
    file_name: str, cache: Sequence[Any], metadata: dict[str, str] | None = None
) -> None:
    """mlx-lm's function; the K/V of paged caches is copied to mlx-lm's own caches first."""

    def as_stock(cache: Any) -> Any:
        return cache.as_stock() if isinstance(cache, PagedCache) else cache

    stock_save_prompt_cache(file_name, _converted(as_stock, cache), metadata)


def as_paged(
    model: nn.Module, given: Sequence[Any], max_kv_size: int | None = None, **options: Any
) -> Sequence[Any]:
    """A prompt cache that can join a batch of caches that :func:`make_prompt_cache` makes.

    The K/V of mlx-lm's own caches in `given` is copied to the model's pool.
    """
    if not any(is_pageable(leaf) for leaf in leaves(given)):
        return given

    def filled(cache: Any, fresh: Any) -> Any:
        if not (isinstance(fresh, PagedKVCache) and is_pageable(cache)):
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

"""A batch's paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import make_prompt_cache as stock_make_prompt_cache

from mlx_paged.arguments import optional_integer
from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.padded_batch import PaddedSpans
from mlx_paged.drop_in.pool_layer import PoolLayer
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.drop_in.shared_pool import BLOCK_SIZE, pool_of
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.memory import device_memory
from mlx_paged.kv.pool import as_int32
from mlx_paged.runner.model_probe import ONE_AT_A_TIME, REFUSED, leaves, model_type


class BatchPagedKVCache(PagedCache):
    """One layer's K/V of the rows of a batch, each at a position of its own.

    It takes the place of mlx-lm's BatchKVCache and BatchRotatingKVCache. No row is padded: padding
    columns of a forward are written nowhere.
    """

    row_class: ClassVar[type[PagedCache]]
    """What a row is extracted as; set by the module of that class, which lies above."""

    def __init__(
        self,
        layer: PoolLayer,
        rows: Sequence[PagedSequence],
        starts: Int32Array | Sequence[int],
        window: int | None = None,
    ) -> None:
        super().__init__(layer, rows, starts, window)
        self._remaining: Int32Array | None = None  # tokens before each row's right padding
        self._offset: tuple[Int32Array, mx.array] | None = None  # of these starts

    def _spans(self, columns: int) -> PaddedSpans:
        return PaddedSpans.of(self.starts, columns, self._remaining)

    @property
    def offset(self) -> mx.array:
        """``[B]`` int32, position of each row's next token."""
        if self._offset is None or self._offset[0] is not self.starts:
            self._offset = self.starts, as_int32(self.starts)
        return self._offset[1]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        handles = super().update_and_fetch(keys, values)
        assert self._latest is not None
        self._offset = self.starts, self._latest.step.next_offset
        if self._remaining is not None:
            self._remaining = self._remaining - np.int32(keys.shape[2])
        return handles

    # Padding

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say which columns of the coming forwards are padding.

        Args:
            left_padding: columns before each row's first token; only for an empty cache.
            lengths: tokens of each row before its right padding begins.
            right_padding: columns after them; with any, `lengths` is needed.
        """
        if left_padding is not None:
            if not self.empty():
                raise ValueError(
                    "[prepare] left_padding is given, but the cache has tokens: expected an "
                    "empty one"
                )
            self._show(self.rows, self.starts - np.array(left_padding, np.int32))
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[prepare] right_padding is given without lengths: expected both")
            self._remaining = np.array(lengths, np.int32)

    def finalize(self) -> None:
        """The right padding is over."""
        self._remaining = None

    # Membership

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the rows with these indices, in this order; an index that comes again forks."""
        indices = _as_list(batch_indices)
        seen: set[int] = set()
        rows = []
        for i in indices:
            row = self.rows[i]
            rows.append(self.layer.adopt(row, self.layer, 0) if row.id in seen else row)
            seen.add(row.id)
        if self._remaining is not None:
            self._remaining = self._remaining[indices]
        self._show(rows, self.starts[indices])

    def extend(self, other: BatchPagedKVCache) -> None:
        """Add forks of another batch's rows.

        Raises:
            ValueError: `other` is no paged cache, or its window differs.
        """
        if not isinstance(other, PagedCache):
            raise ValueError(
                f"[extend] other is a {type(other).__name__}: expected a {type(self).__name__}; "
                "paged and stock caches cannot share a batch"
            )
        if other.window != self.window:
            raise ValueError(
                f"[extend] other has window {other.window}: expected {self.window} as here"
            )
        rows = [*self.rows, *adopted(other, self.layer)]
        self._show(rows, np.concatenate([self.starts, other.starts]))

    def extract(self, idx: int) -> PagedCache:
        """A fork of one row as a cache of its own."""
        row = self.layer.adopt(self.rows[idx], self.layer, 0)
        return self.row_class(self.layer, [row], self.starts[[idx]], self.window)

    def as_stock(self) -> stock.BatchKVCache | stock.BatchRotatingKVCache:
        """A copy of the K/V in mlx-lm's own batch cache."""
        rows = [self.extract(i).as_stock() for i in range(len(self.rows))]
        return type(rows[0]).merge(rows)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Forks of the rows of several caches as one batch, in the first one's pool.

        Raises:
            ValueError: they are not all paged, or their windows differ.
        """
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
        rows = [row for cache in caches for row in adopted(cache, layer)]
        return cls(layer, rows, np.concatenate([c.starts for c in caches]), caches[0].window)


def adopted(cache: PagedCache, layer: PoolLayer) -> list[PagedSequence]:
    """The rows of a cache, forked into `layer`."""
    starts = cache.starts.tolist()
    return [layer.adopt(r, cache.layer, n) for r, n in zip(cache.rows, starts, strict=True)]


def _as_list(indices: Sequence[int] | mx.array) -> list[int]:
    values: list[int] = np.array(indices).tolist()
    return values


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

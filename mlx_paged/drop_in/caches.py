"""A batch's paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock

from mlx_paged.drop_in.base_cache import PagedCache
from mlx_paged.drop_in.pool_layer import PoolLayer
from mlx_paged.drop_in.row_spans import RowSpans
from mlx_paged.drop_in.sequence import PagedSequence
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import as_int32


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

    def _spans(self, columns: int) -> RowSpans:
        return RowSpans.of(self.starts, columns, self._remaining)

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

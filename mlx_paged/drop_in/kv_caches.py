"""The paged caches of one sequence and of a batch, which are mlx-lm's cache classes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock

from mlx_paged.attention.sdpa_hook import CausalMask
from mlx_paged.drop_in.base_cache import PagedCache, stored
from mlx_paged.drop_in.pool_layer import loose_layer
from mlx_paged.drop_in.shared_pool import PagedSequence
from mlx_paged.drop_in.stored_arrays import StoredArray
from mlx_paged.kv.pool import as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.formats import dims_of
from mlx_paged.options import checked_bits

DTYPES = {str(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16)}
ROTATED = " rotated"  # behind kv_bits in a saved state


class PagedKVCache(PagedCache):
    """One layer's K/V of one sequence, in place of mlx-lm's KVCache and RotatingKVCache.

    If its first forward has several rows, it holds as many sequences, all of equal length.
    """

    stock_names: ClassVar[tuple[str, ...]] = "keys", "values", "offset"

    @property
    def offset(self) -> int:
        """Tokens of the sequence."""
        return self.starts[0]

    @offset.setter
    def offset(self, num_tokens: int) -> None:
        if 0 <= num_tokens <= self.offset and self.is_trimmable():
            self.trim(self.offset - num_tokens)
        elif num_tokens != self.offset:
            self.become_stock()
            self.offset = num_tokens

    @property
    def state(self) -> Any:
        """mlx-lm's state. If it is set, its K/V is copied to the pool."""
        return self.stock_class.state.fget(self)

    @state.setter
    def state(self, state: Any) -> None:
        given = self.stock_class.from_state(state)
        window = getattr(given, "max_size", None)
        if not vars(self):
            self._start_alone(window, [0])
        if window != self.window or not _is_storable(given):
            self.become_stock()
            self.__dict__.update(vars(given))
            return
        keys = [(row.pool, row.id, row.version) for row in self.rows[:1]]
        layer, self._is_begun = self.layer, False
        self._set_rows([layer.pool.sequence_for(key, layer.index) for key in keys], [0])
        if given.keys is not None:
            self.fill(given)

    def make_mask(  # type: ignore[override]  # there is no other limit
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As in mlx-lm: an array only if there is a window or `return_array` asks for one."""
        if self.window is None and window_size is None and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        mask = super().make_mask(N, return_array, window_size=window_size)
        if isinstance(mask, CausalMask):  # one for all rows, which have equal lengths
            mask = CausalMask.of(mask[0, 0], sees=mask.sees)
        return mask

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        if len(self.rows) == 1 < keys.shape[0]:
            pool, num_rows = self.layer.pool, keys.shape[0]
            keyed = [(pool, self.rows[0].id, "row", i) for i in range(1, num_rows)]
            rows = [pool.sequence_for(key, self.layer.index) for key in keyed]
            self._set_rows([*self.rows, *rows], [0] * num_rows)
        super()._begin(keys, values)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Forks of several sequences as a batch."""
        return BatchPagedKVCache.merge(caches)

    def fill(self, cache: Any) -> None:
        """Copy the K/V of mlx-lm's own cache to this empty one; of a rotating cache, its last
        window."""
        if isinstance(cache, stock.RotatingKVCache):
            keys, values = map(cache._temporal_order, (cache.keys, cache.values))
        else:
            keys, values = cache.keys_and_values()
        self._begin(keys, values)
        self.layer.write_last(self.rows, (keys, values), cache.offset)
        self._set_rows(self.rows, [cache.offset] * len(self.rows))


class BatchPagedKVCache(PagedCache):
    """One layer's K/V of the rows of a batch, each with a context length of its own.

    It takes the place of mlx-lm's BatchKVCache and BatchRotatingKVCache. Padding is not stored:
    the padding columns of a forward have no slots.
    """

    stock_names: ClassVar[tuple[str, ...]] = "keys", "values", "offset", "left_padding", "_idx"
    _right_padding = _lengths = None  # what `prepare` gives is kept elsewhere

    @stored
    def offset(self) -> mx.array:
        """``[B]`` int32, position of each row's next token."""
        return self._latest.forward.next_offset if self._latest else as_int32(self.starts)

    @stored
    def left_padding(self) -> mx.array:
        """``[B]`` int32, columns of `keys` before each row's first token; below 0: tokens that a
        window has left."""
        return as_int32([self.size() - start for start in self.starts])

    @stored
    def _idx(self) -> int:
        return self.size()

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
            starts = zip(self.starts, left_padding, strict=True)
            self._set_rows(self.rows, [start - padding for start, padding in starts])
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[prepare] right_padding is given without lengths: expected both")
            self._remaining = tuple(lengths)

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
            rows.append(self.layer.fork_of(row) if row.id in seen else row)
            seen.add(row.id)
        if self._remaining is not None:
            self._remaining = tuple(self._remaining[i] for i in indices)
        self._set_rows(rows, [self.starts[i] for i in indices])

    def extend(self, other: Any) -> None:
        """Add forks of the rows of another cache with the same window, or copies of the rows of
        mlx-lm's own."""
        if self.size() == 0 and isinstance(other, PagedCache) and self.layer.pool.is_loose:
            self._move_to(other.layer)
        rows, starts = _joined("extend", self, [other])
        self._set_rows([*self.rows, *rows], [*self.starts, *starts])

    def extract(self, idx: int) -> PagedKVCache:
        """A fork of one row as a cache of its own."""
        row = self.layer.fork_of(self.rows[idx])
        return PagedKVCache.of(self.layer, [row], [self.starts[idx]], self.window)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchPagedKVCache:
        """Forks of the rows of several caches with one window, in the first one's pool; copies of
        mlx-lm's own."""
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        first = next((c for c in paged if c.size() or not c.layer.pool.is_loose), paged[0])
        rows, starts = _joined("merge", first, caches)
        return cls.of(first.layer, rows, starts, first.window)


class KVCache(PagedKVCache, stock.KVCache):
    """A paged cache that is mlx-lm's KVCache."""

    stock_class = stock.KVCache

    def __init__(self) -> None:
        self._start_alone(None, [0])


class RotatingKVCache(PagedKVCache, stock.RotatingKVCache):
    """A paged cache that is mlx-lm's RotatingKVCache, in temporal order."""

    stock_class = stock.RotatingKVCache
    stock_names = *PagedKVCache.stock_names, "keep", "max_size", "_idx"

    def __init__(self, max_size: int, keep: int = 0) -> None:
        if keep == 0:
            self._start_alone(max_size, [0])
        else:  # the first tokens stay, which a paged cache cannot do
            self.become_stock()
            stock.RotatingKVCache.__init__(self, max_size, keep)

    @stored
    def keep(self) -> int:
        return 0

    @stored
    def max_size(self) -> int:
        assert self.window is not None
        return self.window

    _idx = BatchPagedKVCache._idx


class BatchKVCache(BatchPagedKVCache, stock.BatchKVCache):
    """A paged cache that is mlx-lm's BatchKVCache."""

    stock_class = stock.BatchKVCache
    stock_names = *BatchPagedKVCache.stock_names, "_right_padding"

    def __init__(self, left_padding: Sequence[int]) -> None:
        self._start_alone(None, [-int(n) for n in left_padding])


class BatchRotatingKVCache(BatchPagedKVCache, stock.BatchRotatingKVCache):
    """A paged cache that is mlx-lm's BatchRotatingKVCache, in temporal order."""

    stock_class = stock.BatchRotatingKVCache
    stock_names = *BatchPagedKVCache.stock_names, "max_size", "_offset", "rotated", "_lengths"
    max_size = RotatingKVCache.max_size

    def __init__(self, max_size: int, left_padding: Sequence[int]) -> None:
        self._start_alone(max_size, [-int(n) for n in left_padding])

    @stored
    def _offset(self) -> int:
        return max((0, *self.starts))

    @stored
    def rotated(self) -> bool:
        return False


class _Quantized(PagedKVCache):
    """Caches of quantized K/V, whose states are what the pool stores.

    mlx-lm has no class with such states. Saved caches name these classes: ``load_prompt_cache``
    finds them once this package is imported, and raises a KeyError with the name elsewhere.
    """

    @property
    def state(self) -> Any:
        """kv_bits and whether K/V is rotated, the model's type, the number of tokens, the window,
        and the stored elements and scales of keys and values, ``[1, H_kv, T, C]`` each; None if
        there are none."""
        shape = self.layer.shape
        if shape is None or not self._is_begun:
            return [f"{self.layer.pool.kv_bits}{ROTATED}", None, 0, self.window, *[None] * 4]
        about = {"layer": ref(self.layer), "starts": self.starts, "dependencies": []}
        reads = [lambda gather, i=i: gather(self.layer.arrays[i]) for i in range(4)]
        arrays = [StoredArray.of(self._gathered(read), role="stored", **about) for read in reads]
        kind = f"{shape.kv_bits}{ROTATED if shape.rotates else ''}"
        return [kind, str(shape.dtype), self.offset, self.window, *arrays]

    @state.setter
    def state(self, state: Any) -> None:
        kind, dtype, offset, window, *arrays = state
        kv_bits = checked_bits("load_prompt_cache", kind.removesuffix(ROTATED))
        shape = None
        if dtype is not None:
            k, v = arrays[:2]
            plain = KVShape(k.shape[1], dims_of(k), dims_of(v), DTYPES[dtype])
            shape = plain.quantized("load_prompt_cache", kv_bits, rotates=kind.endswith(ROTATED))
        options = {**self.loose_options, "kv_bits": kv_bits}
        layer = loose_layer(window=window, shape=shape, **options)
        self._is_begun = shape is not None
        PagedKVCache.__init__(self, layer, [layer.pool.new_sequence()], [0], window)
        if shape is not None:
            layer.shape = shape
            layer.write_last(self.rows, arrays, offset)
            self._set_rows(self.rows, [offset])


class QuantizedPagedKVCache(_Quantized, KVCache):
    """A paged cache of quantized K/V."""


class QuantizedPagedRotatingKVCache(_Quantized, RotatingKVCache):
    """A paged cache of quantized K/V that a window limits."""


CLASSES = KVCache, RotatingKVCache, BatchKVCache, BatchRotatingKVCache
"""The paged classes, which have the names of mlx-lm's."""

_QUANTIZED = QuantizedPagedKVCache, QuantizedPagedRotatingKVCache
# Where mlx-lm looks for the class of a saved cache.
vars(stock).update((kind.__name__, kind) for kind in _QUANTIZED)

PagedKVCache.kinds = {False: CLASSES[:2], True: _QUANTIZED}
BatchPagedKVCache.kinds = dict.fromkeys((False, True), CLASSES[2:])


def _is_storable(cache: Any) -> bool:
    """Whether a pool can hold what this cache of mlx-lm holds."""
    keys, values = cache.keys, cache.values
    if getattr(cache, "keep", 0):
        return False
    if keys is None or values is None:
        return keys is values and cache.offset == 0
    num_tokens = min(cache.offset, getattr(cache, "max_size", cache.offset))
    is_alike = keys.dtype == values.dtype and keys.shape[:3] == values.shape[:3]
    return bool(is_alike) and keys.ndim == 4 and num_tokens <= keys.shape[2]


def _joined(
    where: str, one: PagedCache, caches: Sequence[Any]
) -> tuple[list[PagedSequence], list[int]]:
    """The rows of these caches as sequences of the layer of one of them, and their lengths."""
    layer, window = one.layer, one.window
    rows: list[PagedSequence] = []
    starts: list[int] = []
    for cache in caches:
        _check_joins(where, window, cache)
        if isinstance(cache, PagedCache):
            rows += cache.rows_in(layer)
            starts += cache.starts
            continue
        for row in _stock_rows(cache):
            # All layers ask for their rows one by one and get the same sequences.
            key = "joined", len(rows), *((known.id, known.version) for known in one.rows)
            copy = PagedKVCache.of(
                layer, [layer.pool.sequence_for(key, layer.index)], [min(0, row.offset)], window
            )
            if row.offset > 0:
                copy.fill(row)
            rows += copy.rows
            starts += copy.starts
    return rows, starts


def _stock_rows(cache: Any) -> list[Any]:
    """The rows of mlx-lm's own cache, each as a cache of one sequence."""
    if not hasattr(cache, "extract"):
        return [cache]
    offsets = cache.offset.tolist()
    if cache.empty():
        return [SimpleNamespace(offset=offset) for offset in offsets]
    return [cache.extract(i) for i in range(len(offsets))]


def _check_joins(where: str, window: int | None, cache: Any) -> None:
    """Raise ValueError if a paged batch with this window cannot take the cache's rows."""
    if isinstance(cache, PagedCache):
        found, fits = cache.window, True
    else:
        found = getattr(cache, "max_size", None)
        fits = isinstance(cache, tuple(kind.stock_class for kind in CLASSES))
        if isinstance(cache, stock.KVCache | stock.RotatingKVCache):
            fits = _is_storable(cache)
    if not fits or found != window:
        raise ValueError(
            f"[{where}] a cache is a {type(cache).__name__} with window {found}: expected K/V that "
            f"a batch with window {window} can hold"
        )

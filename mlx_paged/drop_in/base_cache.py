"""The part that the paged caches of one sequence and of a batch share."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self
from weakref import ref

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache

from mlx_paged import ops
from mlx_paged.attention.causal import Causal, causal
from mlx_paged.attention.forward import LayerView, causal_mask
from mlx_paged.attention.sdpa_hook import AttendingCache, KVHandle, Query
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.pool_layer import PoolLayer, loose_layer
from mlx_paged.drop_in.shared_pool import PagedSequence
from mlx_paged.drop_in.stored_arrays import StoredArray, held_until_evaluated
from mlx_paged.kv.pool import as_int32


class StepView(LayerView):
    """One layer's K/V at the end of a step."""

    forward: PaddedBatch

    def __init__(self, layer: PoolLayer, step: PaddedBatch, sees: Causal) -> None:
        super().__init__(layer.kv, 0, sees, step.max_paged_queries, step, layer.backend)

    @classmethod
    def of(cls, layer: PoolLayer, step: PaddedBatch, sees: Causal) -> StepView:
        """The view of a layer with or without a window."""
        return (cls if sees.is_full else WindowView)(layer, step, sees)


class WindowView(StepView):
    """One layer's K/V behind a window, which notes what reads it: the next step may write to blocks
    that a window leaves and these arrays read."""

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        handles = super().keys_and_values()
        self._note_reads(*handles)
        return handles

    def append(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle] | None:
        handles = super().append(keys, values)
        if handles is not None:
            self._note_reads(*handles)
        return handles

    def attend(self, query: Query) -> mx.array | None:
        out = super().attend(query)
        if out is not None:
            self._note_reads(out)
        return out

    def attend_again(self, q: mx.array, scale: float) -> mx.array | None:
        out = super().attend_again(q, scale)
        if out is not None:
            self._note_reads(out)
        return out

    def _note_reads(self, *arrays: mx.array) -> None:
        if not ops.is_transforming():
            self.forward.reads = arrays


def stored(read: Callable[[Any], Any]) -> property:
    """An attribute of mlx-lm's cache. If it is assigned, the cache becomes mlx-lm's own."""

    def assign(cache: PagedCache, value: Any) -> None:
        cache.become_stock()
        setattr(cache, read.__name__, value)

    return property(read, assign)


def _all_of(role: str) -> property:
    """The keys or values, ``[B, H_kv, T, D]``, gathered when evaluated; None if there are none.
    Rows of a batch end at the same column and begin with zeros as padding. Layers with a window
    show the last window. The array keeps its content whatever becomes of the cache."""
    return property(lambda cache: cache._shown(role), lambda cache, a: cache._assign(role, a))


class PagedCache(AttendingCache, _BaseCache):
    """One layer's K/V of some sequences, with the cache protocol of mlx-lm 0.32.

    Merging, extending, filtering, extracting, copying and trimming change block tables. K/V is
    copied only when a shared block is written (the tail block of a fork) and when caches of
    different pools join (made in another thread, or for K/V of another type).

    Evaluate a forward's result, or begin its evaluation, before its cache is trimmed or deleted:
    other sequences may then write to the blocks.

    Args:
        layer: the layer that holds the K/V.
        rows: the sequences, none twice.
        starts: tokens of each sequence in this layer.
        window: tokens that a query sees at most, itself included (sliding-window layers).
    """

    stock_class: ClassVar[type[Any]]
    stock_names: ClassVar[tuple[str, ...]]  # attributes of mlx-lm's cache
    kinds: ClassVar[dict[bool, tuple[type[Any], ...]]]  # without and with a window, if quantized
    loose_options: ClassVar[dict[str, Any]] = {}
    starts: tuple[int, ...]  # a new one whenever the content changes
    _is_begun = False
    _remaining: tuple[int, ...] | None = None  # tokens before each row's right padding

    def __init__(
        self,
        layer: PoolLayer,
        rows: Sequence[PagedSequence],
        starts: Sequence[int],
        window: int | None = None,
    ) -> None:
        self.layer = layer
        self.window = window
        self._set_rows(rows, starts)

    @property
    def sees(self) -> Causal:  # type: ignore[override]  # it follows `window`
        """Which keys a query sees."""
        return causal(self.window)

    @classmethod
    def of(cls, layer: PoolLayer, rows: Any, starts: Any, window: int | None = None) -> Self:
        """The cache of this layer, rows, starts and window, of the class for them."""
        kind = cls.kinds[layer.pool.kv_bits is not None][window is not None]
        cache: Self = object.__new__(kind)
        PagedCache.__init__(cache, layer, rows, starts, window)
        return cache

    def _start_alone(self, window: int | None, starts: Sequence[int]) -> None:
        """Be an empty cache that belongs to no model's list of caches."""
        layer = loose_layer(window=window, **self.loose_options)
        rows = [layer.pool.new_sequence() for _ in starts]
        PagedCache.__init__(self, layer, rows, starts, window)

    def _set_rows(self, rows: Sequence[PagedSequence], starts: Sequence[int]) -> None:
        for row in rows:
            row.layers.add(self.layer.index)
        self.rows = tuple(rows)
        self.ids = tuple(row.id for row in rows)
        self.starts = (*starts,)
        self._latest: StepView | None = None
        self._views: dict[str, ref[StoredArray]] = {}
        self._is_begun = self._is_begun or any(start > 0 for start in self.starts)

    def __copy__(self) -> Self:
        """A fork, so that the writes of one cache never change the other."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A fork. The layers that are copied with one `memo` share its rows."""
        fork = type(self).__new__(type(self))
        fork.__dict__.update(vars(self))
        fork._set_rows([copy.deepcopy(row, memo) for row in self.rows], self.starts)
        return fork

    # A forward

    def _step_of_layers_before(self, columns: int) -> PaddedBatch | None:
        """The step of a forward of so many columns without right padding, if another layer has
        begun it. Its starts are then the same tuple as this layer's, not an equal one."""
        step = self.rows[0].step if self.rows and self._remaining is None else None
        if step is None or step.spans.starts is not self.starts or not step.valid:
            return None
        is_same = step.spans.columns == columns and step.spans.is_full and step.ids == self.ids
        return step if is_same else None

    def _spans(self, columns: int) -> PaddedSpans:
        """The positions that a forward of so many columns computes."""
        step = self._step_of_layers_before(columns)
        return step.spans if step else PaddedSpans.of(self.starts, columns, self._remaining)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write a forward's K/V, ``[B, H_kv, N, D]``; return lazy handles of all K/V.

        The first K/V of a cache may have any shape and type; later K/V is cast to that type. If a
        pool cannot hold the first K/V, mlx-lm's own cache does.

        Raises:
            ValueError: the number of rows, heads or dimensions is not that of before.
            OutOfBlocksError: the pool is full and may not grow; nothing was written.
        """
        if self._latest is None and self.size() == 0:
            is_poolable = mx.issubdtype(keys.dtype, mx.floating) and keys.size and values.size
            if not is_poolable and not self._is_begun and self._remaining is None:
                self.become_stock()
                kept: tuple[mx.array, mx.array] = self.update_and_fetch(keys, values)
                return kept
            self._begin(keys, values)
        num_rows, _, columns, _ = keys.shape
        if num_rows != len(self.rows):
            raise ValueError(
                f"[update_and_fetch] keys have {num_rows} rows: expected {len(self.rows)}"
            )
        with self.layer.pool.lock:
            step = self._step_of_layers_before(columns)
            if step is None or self._latest is None:
                self.layer.check(keys, values)
            if step is None:
                spans = PaddedSpans.of(self.starts, columns, self._remaining)
                step = self.layer.pool.step(self.rows, self.ids, spans)
            view = self._latest = self._view_of(step)
            handles = view.append(keys, values)
            if handles is None:
                self.layer.write(step, keys, values)
                handles = view.keys_and_values()
        self.starts = step.spans.stops  # one tuple for all layers
        if self._remaining is not None:
            self._remaining = tuple(length - columns for length in self._remaining)
        return handles

    def _view_of(self, step: PaddedBatch) -> StepView:
        """The view of the layer in a step: the latest one's, where nothing else has changed."""
        latest, pool = self._latest, self.layer.kv
        if (
            latest is None
            or latest.pool is not pool
            or latest.forward.max_paged_queries != step.max_paged_queries
        ):
            return StepView.of(self.layer, step, self.sees)
        return latest.in_forward(step)

    def _begin(self, keys: mx.array, values: mx.array) -> None:
        """Let the layer for this first K/V hold it."""
        self._move_to(self.layer.layer_for(keys, values))
        self._is_begun = True

    def _move_to(self, layer: PoolLayer) -> None:
        """Let another layer hold what comes; there is nothing yet."""
        if layer is not self.layer:
            self.layer = layer
            self._set_rows([layer.fork_of(row) for row in self.rows], self.starts)

    def rows_in(self, layer: PoolLayer) -> list[PagedSequence]:
        """Forks of the rows into another layer, with their K/V."""
        contents = zip(self.rows, self.starts, strict=True)
        return [layer.fork_from(row, self.layer, start) for row, start in contents]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Handles of all K/V, ``[B, H_kv, S, D]``, for a layer that reuses this layer's K/V."""
        if self.size() == 0:
            raise ValueError("the cache is empty: expected one with tokens")
        if self._latest is None:
            step = self.layer.pool.step(self.rows, self.ids, PaddedSpans.of(self.starts, 0))
            self._latest = StepView.of(self.layer, step, self.sees)
        return self._latest.keys_and_values()

    def mask(self, columns: int, sees: Causal) -> mx.array:
        spans = self._spans(columns)
        positions = as_int32(np.array(spans.starts, np.int32)[:, None] + np.arange(columns))
        return causal_mask(positions[:, None, :, None], spans.max_context, sees)

    # The attributes of mlx-lm's cache

    keys = _all_of("keys")
    values = _all_of("values")

    def _assign(self, name: str, array: mx.array | None) -> None:
        """Add dependencies to the present array, or become mlx-lm's own cache with this array."""
        if isinstance(array, StoredArray) and array.starts is vars(self).get("starts"):
            if array.role == name and array.dependencies:
                self.layer.depend_on(array.dependencies)
                self._views = {}
                return
            if array.role == "cleared" and name == "values":
                return
        self.become_stock()
        setattr(self, name, array)

    def _shown(self, role: str) -> StoredArray | None:
        """The keys or values: the array that somebody has already, or a new one."""
        if not self._is_begun:
            return None
        array = self._views[role]() if role in self._views else None
        if array is None or array.starts is not self.starts:
            kv, index = self.layer.kv, role == "values"
            array = StoredArray.of(
                self._gathered(lambda gather: kv.read(0, gather, as_written=True)[index]),
                role=role,
                layer=ref(self.layer),
                starts=self.starts,
                dependencies=[],
            )
            self._views = {**self._views, role: ref(array)}
        return array

    def _gathered(self, read: Callable[[Callable[[mx.array], mx.array]], mx.array]) -> mx.array:
        """A lazy copy of the last `size()` tokens of each row. `read` chooses what: it gets a
        function that gathers these tokens from an array of the pool."""
        width, pool = self.size(), self.layer.pool
        if width == 0:
            rows = len(self.rows)
            return read(lambda a: mx.zeros((rows, a.shape[0], 0, a.shape[3]), a.dtype))
        lengths = np.maximum(np.array(self.starts, np.int32), 0)
        skipped = np.maximum(lengths - width, 0) // pool.block_size
        lengths = lengths - skipped * pool.block_size  # in blocks from the first one that is shown
        num_blocks = -(-lengths // pool.block_size)
        tables = np.zeros((len(self.rows), num_blocks.max()), np.int32)
        for row, first, count, table in zip(self.rows, skipped, num_blocks, tables, strict=True):
            table[:count] = pool.allocator.table(row.id)[first : first + count]
        found = read(lambda a: ops.gather_blocks(a, mx.array(tables), int(lengths.max())))
        if not ops.is_transforming():
            forks = [self.layer.fork_of(row, is_frozen=True) for row in self.rows]
            found = held_until_evaluated(found, forks)
        first = lengths - width  # column of the gathered array that comes first; below 0: padding
        if np.all(first == first[0]):
            return found[:, :, int(first[0]) :]
        columns = (mx.array(first)[:, None] + mx.arange(width))[:, None, :, None]
        found = mx.take_along_axis(found, mx.maximum(columns, 0), axis=2)
        return mx.where(columns >= 0, found, mx.zeros((), found.dtype))

    def stock_attributes(self) -> dict[str, Any]:
        """What mlx-lm's own cache with this content has."""
        return {name: getattr(self, name) for name in self.stock_names}

    def become_stock(self) -> None:
        """Be mlx-lm's own cache, with a lazy copy of the K/V, from now on."""
        attributes = self.stock_attributes() if vars(self) else {}
        self.__dict__.clear()
        self.__class__ = self.stock_class
        self.__dict__.update(attributes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as mlx-lm's own cache."""
        make = copyreg._reconstructor  # type: ignore[attr-defined]
        return make, (self.stock_class, object, None), self.stock_attributes()

    # Content

    def is_trimmable(self) -> bool:
        """Whether no window has left a token, as in mlx-lm."""
        return self.window is None or max(self.starts, default=0) < self.window

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row, at most what the shortest row has; returns how
        many."""
        n = max(0, min(n, *self.starts)) if self.rows else 0
        if n > 0 and not self.is_trimmable():
            raise ValueError(f"[trim] n is {n}: expected 0 where a row fills its window")
        self.starts = tuple(start - n for start in self.starts)
        self._latest = None
        for row, start in zip(self.rows, self.starts, strict=True):
            row.rewound[self.layer.index] = start
        return n

    def size(self) -> int:
        """Tokens of the longest row, at most the window."""
        longest = max((0, *self.starts))
        return min(longest, self.window or longest)

    def empty(self) -> bool:
        """Whether nothing was written, as in mlx-lm."""
        return not self._is_begun

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that these rows hold: of a block with n sharers, each holds 1/n."""
        return self.layer.held_bytes(self.rows)

"""One layer of the pool as an mlx-lm cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from mlx_paged.attention.causal import FULL, Causal
from mlx_paged.attention.forward import Forward, LayerView
from mlx_paged.attention.paths import max_paged_queries
from mlx_paged.attention.sdpa_hook import KVHandle
from mlx_paged.kv.layer_groups import LayerPlace
from mlx_paged.kv.pool import KVPool


def storable(values: mx.array) -> mx.array:
    """Values that the pool can hold: layers that cache only keys pass ``[B, H_kv, L, 0]``."""
    if values.shape[-1]:
        return values
    return mx.zeros((*values.shape[:-1], 1), values.dtype)


class UntrimmedCache(_BaseCache):
    """A cache that keeps the tokens before the chunk that llama4 attends to.

    The model hides these tokens by its own mask, whose columns begin at `start_position`.
    """

    start_position = 0
    _idx = 0  # mlx-vlm would compute it of all offsets, on the device

    def maybe_trim_front(self) -> None:
        """Keep all tokens."""


class PagedLayerCache(LayerView, UntrimmedCache):
    """The K/V cache of one layer, as the model sees it: the sequences of the bound forward.

    It follows the cache protocol of mlx-lm 0.32: ``offset``, ``update_and_fetch``, ``make_mask``,
    ``keys``, ``values``, ``keys_and_values``. Bind every forward before it.

    Attributes:
        forward: the bound one, or its sampled rows, which the last layer computes alone.
        offset: position of the next token: ``[T]`` int32 for rows, an int for a chunk.
    """

    offset: int | mx.array

    def __init__(self, pool: KVPool, place: LayerPlace | None, sees: Causal = FULL) -> None:
        """The cache of a layer at `place` in the pool; None: of a layer that stores nothing."""
        self.stores = place is not None
        self.place = place or LayerPlace(0, 0, 0)
        super().__init__(pool, self.place.array, sees, max_paged_queries())
        self._is_written = False
        self._was_written = False  # before the call that only stored
        self.kept: list[mx.array] | None = None  # where `kept_handle` wants the next handle

    def bind(self, forward: Forward) -> None:
        """The next forward of the model is this one."""
        self.forward = forward
        self.offset = forward.offset
        self._is_written = False

    def store_only(self) -> None:
        """The next call of the layer only stores K/V; its output is not used."""
        self.forward.is_read = False
        self._was_written = self._is_written

    def attend_only(self, rows: Forward) -> None:
        """The next call computes `rows`. Their K/V is stored already."""
        self.forward = rows
        self._is_written = self._was_written
        self.offset = rows.next_offset if self._is_written else rows.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Write the step's K/V, ``[T, H_kv, 1, D]`` or ``[1, H_kv, L, D]``; return lazy handles."""
        assert self.stores, "this layer stored nothing when the model was traced"
        forward, handles = self.forward, None
        if forward.slot_mapping is not None:
            handles = self.append(keys, values)
            if handles is None:
                self.pool.write(self.layer, keys, storable(values), forward.slot_mapping)
        self._is_written = True
        self.offset = forward.next_offset
        if self.kept is not None:
            self.kept.append(self.keys)
        return self.keys_and_values() if handles is None else handles

    @property
    def keys(self) -> mx.array:
        """The pool's keys. Pipeline-parallel models set a handle that depends on other arrays."""
        return self.pool.k[self.layer]

    @keys.setter
    def keys(self, handle: mx.array) -> None:
        self.pool.set_keys(self.layer, handle)

    @property
    def values(self) -> mx.array:
        """The pool's values. Setting them changes nothing: deepseek_v32 sets zeros to clear values
        that it never reads, and these would replace the whole pool."""
        return self.pool.v[self.layer]

    @values.setter
    def values(self, handle: mx.array) -> None:
        pass


@contextmanager
def kept_handle(layer: PagedLayerCache | None) -> Iterator[list[mx.array]]:
    """A list of the handles that forwards within this context make of the layer's keys, when they
    have written them; empty if there is no layer. Layers that share arrays replace the pool's."""
    kept: list[mx.array] = []
    if layer is None:
        yield kept
        return
    layer.kept = kept
    try:
        yield kept
    finally:
        layer.kept = None

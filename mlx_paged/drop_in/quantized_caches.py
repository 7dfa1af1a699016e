"""Caches of quantized K/V, whose states are what the pool stores.

mlx-lm has no class with such states. Saved caches name these classes: ``load_prompt_cache`` finds
them once this package is imported, and raises a KeyError with the name elsewhere.
"""

from functools import partial
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx_lm.models import cache as stock

from mlx_paged.drop_in.kv_caches import KVCache, PagedKVCache, RotatingKVCache
from mlx_paged.drop_in.shared_pool import loose_layer
from mlx_paged.drop_in.stored_arrays import StoredArray
from mlx_paged.kv.pool import KVShape
from mlx_paged.ops.formats import dims_of

DTYPES = {str(dtype): dtype for dtype in (mx.float32, mx.float16, mx.bfloat16)}


class _Quantized(PagedKVCache):
    """What both classes share."""

    @property
    def state(self) -> Any:
        """kv_bits, the model's type, the number of tokens, the window, and the stored elements and
        scales of keys and values, ``[1, H_kv, T, C]`` each; None if there are none."""
        shape = self.layer.shape
        if shape is None or not self._is_begun:
            return [str(self.layer.pool.kv_bits), None, 0, self.window, *[None] * 4]
        about = {"layer": ref(self.layer), "starts": self.starts, "dependencies": []}
        arrays = [
            StoredArray.of(self._gathered(partial(self._stored, i)), role="stored", **about)
            for i in range(4)
        ]
        return [str(shape.kv_bits), str(shape.dtype), self.offset, self.window, *arrays]

    @state.setter
    def state(self, state: Any) -> None:
        kv_bits, dtype, offset, window, *arrays = state
        kv_bits = int(kv_bits) if kv_bits == "8" else kv_bits
        shape = None
        if dtype is not None:
            k, v = arrays[:2]
            shape = KVShape(k.shape[1], dims_of(k), dims_of(v), DTYPES[dtype], kv_bits=kv_bits)
        options = {**self.loose_options, "kv_bits": kv_bits}
        layer = loose_layer(window, shape=shape, **options)
        self._is_begun = shape is not None
        PagedKVCache.__init__(self, layer, [layer.pool.new_sequence()], [0], window)
        if shape is not None:
            layer.shape = shape
            layer.write_last(self.rows, arrays, offset)
            self._set_rows(self.rows, [offset])

    def _stored(self, index: int, gather: Any) -> mx.array:
        gathered: mx.array = gather(self.layer.arrays[index])
        return gathered


class QuantizedPagedKVCache(_Quantized, KVCache):
    """A paged cache of quantized K/V."""


class QuantizedPagedRotatingKVCache(_Quantized, RotatingKVCache):
    """A paged cache of quantized K/V that a window limits."""


def register_classes() -> None:
    """Let pools with kv_bits make these classes, and mlx-lm load them."""
    PagedKVCache.kinds[True] = QuantizedPagedKVCache, QuantizedPagedRotatingKVCache
    for kind in PagedKVCache.kinds[True]:
        setattr(stock, kind.__name__, kind)

"""One layer of a shared pool."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.attention.backend import AttentionBackend
from mlx_paged.drop_in.layer_arrays import LayerArrays
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.shared_pool import PagedSequence, PoolOptions, SharedPool, loose_pool
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.shapes import KVShape
from mlx_paged.options import BLOCK_SIZE, KVBits


class PoolLayer(LayerArrays):
    """K/V of one layer of a shared pool.

    The first K/V written determine its shape: under tensor parallelism only the layer knows it.
    """

    def __init__(self, pool: SharedPool, index: int) -> None:
        super().__init__(pool.allocator, pool.max_blocks)
        self.pool = pool  # the pool whose blocks all layers share
        self.index = index  # which layer it is
        self.backend = AttentionBackend()

    def held_bytes(self, rows: Sequence[PagedSequence]) -> int:
        """Bytes of the blocks that the rows hold: of a block with n sharers, each holds 1/n."""
        if not self.is_written:
            return 0
        self.pool.release_dropped()
        allocator = self.pool.allocator
        counts = allocator.store.counts
        tables = [self.blocks(row, allocator.num_tokens(row.id)).tolist() for row in rows]
        held: float = sum(1 / counts[block] for table in tables for block in table)
        return round(held * self.kv.block_bytes)

    def layer_for(self, keys: mx.array, values: mx.array) -> PoolLayer:
        """The layer for the first K/V of a sequence: this one, or the same layer of another pool if
        this one holds K/V of another shape or type."""
        shape, layer = self._shape_of(keys, values), self
        if self.pool.is_loose:
            return layer_of(loose_pool(shape, self.pool.options), 0)
        while layer.shape not in (None, shape):
            layer = layer_of(layer.pool.successor(), self.index)
        return layer

    def write(self, step: PaddedBatch, keys: mx.array, values: mx.array) -> None:
        """Write a step's K/V, ``[B, H_kv, N, D]`` each. Raises ValueError as :meth:`check`."""
        dtype = self.check(keys, values).dtype
        k, v = (_token_rows(x.astype(dtype)) for x in (keys, values))
        self.kv.write(0, k, v, step.slot_mapping)

    def check(self, keys: mx.array, values: mx.array) -> KVShape:
        """How this K/V is stored; the first one decides. Raises ValueError if keys and values have
        different types, or another shape than before."""
        if keys.dtype != values.dtype:
            raise ValueError(
                f"[update_and_fetch] keys are {keys.dtype} but values {values.dtype}: "
                "expected one type"
            )
        if self.shape is None:
            self.shape = self._shape_of(keys, values)
        dims = keys.shape[1], keys.shape[3], values.shape[3]
        expected = self.shape.n_kv_heads, *self.shape.row_dims
        if dims != expected:
            raise ValueError(
                f"[update_and_fetch] K/V have (heads, head_dim, v_head_dim) = {dims}: "
                f"expected {expected} as before"
            )
        return self.shape

    def _shape_of(self, keys: mx.array, values: mx.array) -> KVShape:
        """How K/V is stored: one head, but different widths, are latents and rotary keys."""
        heads, k_dim, v_dim = keys.shape[1], keys.shape[3], values.shape[3]
        if heads == 1 and k_dim != v_dim and k_dim and v_dim:
            shape = KVShape(1, k_dim + v_dim, k_dim, keys.dtype, latent=True)
        else:
            shape = KVShape(heads, k_dim, v_dim, keys.dtype)
        return shape.quantized("make_prompt_cache", self.pool.kv_bits)

    def write_last(
        self, rows: Sequence[PagedSequence], arrays: Sequence[mx.array], stop: int
    ) -> None:
        """Write the tokens of empty sequences up to position `stop`. The arrays are K and V,
        ``[B, H_kv, N, D]``, or what a pool with this layer's shape stores. Tokens that a window has
        left may be missing in them."""
        num_kept = min(arrays[0].shape[2], self.pool.window or stop)
        rest = (stop - num_kept) % self.pool.block_size
        padding = [(0, 0), (0, 0), (rest, 0), (0, 0)]
        padded = [mx.pad(x[..., -num_kept:, :], padding) for x in arrays]
        count = num_kept + rest
        spans = PaddedSpans.of([stop - count] * len(rows), count)
        with self.pool.lock:
            is_stored = len(padded) > 2
            if not is_stored:
                self.check(*padded)
            step = self.pool.step(rows, tuple(row.id for row in rows), spans)
            if is_stored:
                self.kv.write_stored(0, [*map(_token_rows, padded)], step.slot_mapping)
            else:
                self.write(step, *padded)

    def blocks(self, row: PagedSequence, num_tokens: int) -> Int32Array:
        """The blocks that a sequence holds of its first tokens."""
        allocator = self.pool.allocator
        first = row.first_held // self.pool.block_size
        return np.array(allocator.table(row.id)[first : allocator.blocks_needed(num_tokens)])

    def fork_of(self, row: PagedSequence, is_frozen: bool = False) -> PagedSequence:
        """A fork of `row` in this layer's pool; the caches of all layers get the same fork. A fork
        into another pool has no content yet: each layer copies its own K/V."""
        parent = row if row.pool is self.pool else None
        key = row.pool, row.id, row.version, is_frozen
        fork = self.pool.sequence_for(key, self.index, parent)
        fork.is_frozen = is_frozen
        if is_frozen:
            self.pool.frozen.add(fork)
        return fork

    def fork_from(self, row: PagedSequence, source: PoolLayer, num_tokens: int) -> PagedSequence:
        """A sequence of this layer's pool with the content of `row` in layer `source`. In the same
        pool it shares every block; from another pool the K/V is copied."""
        child = self.fork_of(row)
        if source.pool is not self.pool and num_tokens > 0:
            blocks = mx.array(source.blocks(row, num_tokens))
            num_held = num_tokens - row.first_held

            def gathered(array: mx.array) -> mx.array:
                return ops.gather_blocks(array, blocks[None], num_held)

            if self.pool.kv_bits == source.pool.kv_bits and self.shape in (None, source.shape):
                self.shape = source.shape
                arrays = [gathered(array) for array in source.arrays]
            else:
                arrays = [*source.kv.read(0, gathered, as_written=True)]
            # Before any later write to these blocks: no graph would order the two.
            mx.eval(arrays)
            self.write_last([child], arrays, num_tokens)
        return child


def layer_of(pool: SharedPool, index: int) -> PoolLayer:
    """A layer of a pool; its K/V exists as long as caches refer to it."""
    layer = pool.layers.get(index)
    if layer is None:
        layer = pool.layers[index] = PoolLayer(pool, index)
    assert isinstance(layer, PoolLayer)
    return layer


def loose_layer(
    block_size: int = BLOCK_SIZE,
    kv_memory: int | None = None,
    window: int | None = None,
    kv_bits: KVBits = None,
    shape: KVShape | None = None,
) -> PoolLayer:
    """The one layer of this thread's pool for caches that were made without a model: all of them
    with K/V of one shape are sequences of it, so that no batch needs a copy. Without a shape: the
    layer of caches that have nothing yet."""
    return layer_of(loose_pool(shape, PoolOptions(block_size, kv_memory, window, kv_bits)), 0)


def _token_rows(x: mx.array) -> mx.array:
    """K or V ``[B, H_kv, N, D]`` as ``write_kv`` takes it."""
    return x if 1 in (x.shape[0], x.shape[2]) else x.swapaxes(1, 2).flatten(0, 1)

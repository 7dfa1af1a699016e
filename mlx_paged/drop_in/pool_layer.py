"""One layer of a shared pool."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.sequence import ContentKey, PagedSequence, SequencePool
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import KVPool, KVShape, block_bytes


class LayeredPool(SequencePool, Protocol):
    """What a layer asks of its pool."""

    allocator: BlockAllocator
    lock: RLock

    @property
    def block_size(self) -> int:
        """Token slots in a block."""

    def step(
        self, rows: Sequence[PagedSequence], ids: tuple[int, ...], spans: PaddedSpans
    ) -> PaddedBatch:
        """Let the rows write their spans."""

    def named(self, key: ContentKey, layer: int) -> PagedSequence:
        """An empty sequence, the same one for each layer that asks with this key once."""

    def layer(self, index: int) -> PoolLayer:
        """A layer."""

    def successor(self) -> LayeredPool:
        """The pool for K/V of another shape."""


class PoolLayer:
    """K/V of one layer. Its shape is that of the first K/V written, which under tensor parallelism
    only the layer itself knows.

    Attributes:
        pool: whose blocks it shares with the other layers.
        index: which layer it is.
        shape: None until it is known.
    """

    def __init__(self, pool: LayeredPool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.shape: KVShape | None = None
        self._kv: KVPool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PoolLayer:
        return self

    @property
    def is_written(self) -> bool:
        return self._kv is not None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer; 0 if that is not known yet."""
        return block_bytes([self.shape] if self.shape else [], self.pool.block_size)

    @property
    def kv(self) -> KVPool:
        """The arrays, with as many blocks as the pool has."""
        assert self.shape is not None, "a layer is read before it is written"
        num_blocks = self.pool.allocator.num_blocks
        if self._kv is None:
            self._kv = KVPool([self.shape], num_blocks, self.pool.block_size)
        elif self._kv.num_blocks < num_blocks:
            self._kv.grow(num_blocks)
        return self._kv

    def fitting(self, keys: mx.array, values: mx.array) -> PoolLayer:
        """Where the first K/V of a sequence goes: here, or to the same layer of another pool if
        K/V of another shape or type is here."""
        shape, layer = _shape_of(keys, values), self
        while layer.shape not in (None, shape):
            layer = layer.pool.successor().layer(self.index)
        return layer

    def write(
        self,
        rows: Sequence[PagedSequence],
        ids: tuple[int, ...],
        spans: PaddedSpans,
        keys: mx.array,
        values: mx.array,
    ) -> PaddedBatch:
        """Write K/V, ``[B, H_kv, N, D]`` each, of the rows' spans.

        Raises:
            ValueError: keys and values of different types, or not of the shape written before.
            OutOfBlocksError: the pool is full and may not grow; nothing was written.
        """
        with self.pool.lock:
            shape = self._checked(keys, values)
            step = self.pool.step(rows, ids, spans)
            k = keys.astype(shape.dtype).transpose(0, 2, 1, 3).flatten(0, 1)
            v = values.astype(shape.dtype).transpose(0, 2, 1, 3).flatten(0, 1)
            self.kv.write(0, k, v, step.slots)
        return step

    def _checked(self, keys: mx.array, values: mx.array) -> KVShape:
        if keys.dtype != values.dtype:
            raise ValueError(
                f"[update_and_fetch] keys are {keys.dtype} but values {values.dtype}: "
                "expected one type"
            )
        shape = _shape_of(keys, values)
        if self.shape is None:
            self.shape = shape
        known = self.shape
        if _dims(shape) != _dims(known):
            raise ValueError(
                f"[update_and_fetch] K/V have (heads, head_dim, v_head_dim) = {_dims(shape)}: "
                f"expected {_dims(known)} as before"
            )
        return known

    def gather(self, row: PagedSequence, num_tokens: int) -> tuple[mx.array, mx.array]:
        """A copy of one sequence's K and V, ``[1, H_kv, num_tokens, D]`` each."""
        return self.kv.gather(0, mx.array(self._blocks(row, num_tokens)), num_tokens)

    def runs(self, row: PagedSequence, num_tokens: int) -> tuple[list[mx.array], list[mx.array]]:
        """The same K and V as views of the pool, each ``[n, H_kv, tokens, D]``: one for every run
        of adjacent blocks and one for a last block that is not full. Evaluating them copies
        nothing.
        """
        size = self.pool.block_size
        full, rest = divmod(num_tokens, size)
        blocks = self._blocks(row, num_tokens)
        breaks = np.flatnonzero(np.diff(blocks[:full]) != 1) + 1
        spans = [
            (int(run[0]), int(run[-1]) + 1, size)
            for run in np.split(blocks[:full], breaks)
            if run.size
        ]
        if rest:
            spans.append((int(blocks[full]), int(blocks[full]) + 1, rest))
        return _views(self.kv.k[0], spans), _views(self.kv.v[0], spans)

    def _blocks(self, row: PagedSequence, num_tokens: int) -> Int32Array:
        allocator = self.pool.allocator
        return np.array(allocator.table(row.id)[: allocator.blocks_needed(num_tokens)])

    def nbytes(self, ids: Sequence[int], num_tokens: Sequence[int]) -> int:
        """Bytes of the blocks that hold these sequences' first tokens, a shared block once."""
        allocator = self.pool.allocator
        held: set[int] = set()
        for seq_id, count in zip(ids, num_tokens, strict=True):
            held.update(allocator.table(seq_id)[: allocator.blocks_needed(count)].tolist())
        return len(held) * self.block_bytes

    def adopt(self, row: PagedSequence, source: PoolLayer, num_tokens: int) -> PagedSequence:
        """`row` of layer `source` as a sequence of its own in this layer's pool. In the same pool
        it shares every block; from another one its K/V is copied."""
        child = row.fork_for(self.pool, self.index)
        if source.pool is not self.pool and num_tokens > 0:
            keys, values = source.gather(row, num_tokens)
            # Before any later write to these blocks: no graph would order the two.
            mx.async_eval(keys, values)  # type: ignore[no-untyped-call]
            self.write([child], (child.id,), PaddedSpans.of([0], num_tokens), keys, values)
        return child


def _shape_of(keys: mx.array, values: mx.array) -> KVShape:
    return KVShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _dims(shape: KVShape) -> tuple[int, int, int]:
    return shape.n_kv_heads, shape.head_dim, shape.v_head_dim


def _views(cache: mx.array, spans: list[tuple[int, int, int]]) -> list[mx.array]:
    blocks = cache.transpose(1, 0, 2, 3)
    return [blocks[first:stop, :, :tokens] for first, stop, tokens in spans]

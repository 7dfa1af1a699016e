"""The blocks of all paged caches of one model, in a pool that grows with them."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet, WeakValueDictionary, ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.pool_layer import PagedSequence, PoolLayer
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array, renumbered
from mlx_paged.kv.blocks import BlockCopy, OutOfBlocksError
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.memory import longest_pool, spare_memory
from mlx_paged.kv.pool import KVShape, block_bytes
from mlx_paged.ops.formats import KVBits
from mlx_paged.runner.compiled_decode import free_graphs_with_thread

FEWEST_NEW_BLOCKS = 16
BLOCK_SIZE = 16
Options = tuple[int, int | None, int | None, KVBits]  # block_size, kv_memory, window, kv_bits


class SharedPool:
    """Sequences of K/V whose layers are written one after the other, as mlx-lm's caches are.

    Its memory follows the blocks in use: it holds at most 1.5 times their bytes and 16 blocks more.
    It grows by a quarter, and shrinks by moving the blocks in use to smaller arrays. Only one
    thread may use it at a time, because MLX evaluates a graph only on the thread that made it.
    """

    def __init__(
        self,
        num_layers: int,  # how many layers will be written
        block_size: int = BLOCK_SIZE,  # token slots in a block
        # Bytes of K/V at most; default what the device has left when the pool grows.
        kv_memory: int | None = None,
        # Of its layers; sequences let go of the blocks behind it. None: they keep all.
        window: int | None = None,
        kv_bits: KVBits = None,  # how K/V is stored
        model: ref[nn.Module] | None = None,  # whose pool it is
    ) -> None:
        self._options = block_size, kv_memory, window, kv_bits
        self.allocator = BlockAllocator(1, block_size, [LayerGroup(window)])
        self.num_layers = num_layers
        self.block_size = block_size
        self.kv_memory = kv_memory
        self.model = model
        self.window = window
        self.kv_bits = kv_bits
        self.is_loose = False
        self.lock = threading.RLock()
        self._layers: WeakValueDictionary[int, PoolLayer] = WeakValueDictionary()
        self._by_key: WeakValueDictionary[tuple[object, ...], PagedSequence]
        self._by_key = WeakValueDictionary()
        self._new_ids = itertools.count()
        self.dropped: deque[int] = deque()  # ids of deleted sequences that still hold blocks
        self.frozen: WeakSet[PagedSequence] = WeakSet()  # whose blocks a state shows
        self.reads: list[mx.array] = []  # of blocks that the next step may write
        self._steps: WeakSet[PaddedBatch] = WeakSet()
        self._thread = 0  # that evaluates: the one of the latest step
        self._successor: ref[SharedPool] | None = None

    def layer(self, index: int) -> PoolLayer:
        """A layer; its K/V exists as long as caches refer to it."""
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = PoolLayer(self, index)
        return layer

    def loose_layer(self, shape: KVShape) -> PoolLayer:
        """The layer of this thread for this K/V of caches with the pool's options."""
        return loose_layer(*self._options, shape)

    def successor(self) -> SharedPool:
        """The pool for K/V of another shape. The model's new caches begin in it from now on."""
        with self.lock:
            pool = self._successor() if self._successor else None
            if pool is None:
                pool = SharedPool(self.num_layers, *self._options, self.model)
                self._successor = ref(pool)
                for key in [key for key, known in _thread.pools.items() if known is self]:
                    _thread.pools[key] = pool
        return pool

    def _written_layers(self) -> list[PoolLayer]:
        return [layer for layer in list(self._layers.values()) if layer.is_written]

    # Sequences

    def new_sequence(self) -> PagedSequence:
        with self.lock:
            sequence = PagedSequence(self, next(self._new_ids))
            self.allocator.admit(sequence.id, 0)
        return sequence

    def sequence_for(
        self, key: tuple[object, ...], layer: int, parent: PagedSequence | None = None
    ) -> PagedSequence:
        """A fork of `parent`, or an empty sequence. Layers that ask with one key get the same one;
        a layer that asks again gets another."""
        number = 0
        while (sequence := self._by_key.get((*key, number))) and layer in sequence.layers:
            number += 1
        if sequence is None:
            sequence = self.new_sequence() if parent is None else self.fork(parent)
            self._by_key[(*key, number)] = sequence
        sequence.layers.add(layer)
        return sequence

    def fork(self, parent: PagedSequence) -> PagedSequence:
        """A sequence that shares every block of its parent until one of them writes."""
        with self.lock:
            child = PagedSequence(self, next(self._new_ids))
            self.allocator.fork(parent.id, child.id)
            child.first_held = parent.first_held
            if parent.step is not None:
                parent.step.valid = False
        return child

    def release_dropped(self) -> None:
        """Give back the blocks of the deleted sequences."""
        with self.lock:
            while self.dropped:
                seq_id = self.dropped.popleft()
                if seq_id in self.allocator:
                    self.allocator.free(seq_id)

    # Steps

    def step(
        self, rows: Sequence[PagedSequence], ids: tuple[int, ...], spans: PaddedSpans
    ) -> PaddedBatch:
        """Let the rows, each once, write their spans; the layers of one forward get the same step.
        Raises OutOfBlocksError if the pool is full and may not grow; no token is lost."""
        latest = rows[0].step if rows else None
        if latest is not None and latest.serves(ids, spans):
            return latest
        with self.lock:
            return self._new_step(rows, ids, spans)

    def _new_step(
        self, rows: Sequence[PagedSequence], ids: tuple[int, ...], spans: PaddedSpans
    ) -> PaddedBatch:
        self._thread = threading.get_ident()
        free_graphs_with_thread()
        self.release_dropped()
        copies: list[BlockCopy] = []
        try:
            for row, start, stop in zip(rows, spans.starts, spans.stops, strict=True):
                if stop > max(start, 0):
                    copies += self._make_writable(row, max(start, 0), stop)
        finally:
            for layer in self._written_layers() if copies else []:
                if self.reads:
                    layer.depend_on(self.reads)
                layer.kv.copy_blocks(copies)
            self.allocator.store.copies_done()
        self._shrink()
        tables = self.allocator.block_tables.tables(), self.block_size
        firsts = [row.first_held for row in rows]
        step = PaddedBatch(ids, spans, *tables, self.allocator.table_rows(ids).tolist(), firsts)
        self._steps.add(step)
        if self.reads and not ops.is_transforming():
            step.slot_mapping = mx.depends([step.slot_mapping], self.reads)[0]
            self.reads = [step.slot_mapping]
        for row in rows:
            row.step = step
        return step

    def _make_writable(self, row: PagedSequence, start: int, stop: int) -> list[BlockCopy]:
        kept = row.begin_step(start)
        if kept is not None:
            self.allocator.truncate(row.id, kept)
        if self.window is not None:
            self._let_go(row, start, self.window)
        return self._append(row, start, stop)

    def _append(self, row: PagedSequence, start: int, stop: int) -> list[BlockCopy]:
        try:
            return self.allocator.make_writable(row.id, start, stop)
        except OutOfBlocksError as error:
            self._grow(error)
            return self.allocator.make_writable(row.id, start, stop)

    def _let_go(self, row: PagedSequence, start: int, window: int) -> None:
        """Release the blocks that no query from `start` on sees."""
        size, stop = self.block_size, self.allocator.num_tokens(row.id)
        while stop < start:  # an empty sequence, whose start was let go elsewhere
            self._append(row, stop, min(start, stop + FEWEST_NEW_BLOCKS * size))
            row.first_held = stop = min(start, stop + FEWEST_NEW_BLOCKS * size)
            self.allocator.trim(row.id, stop + window)
        first = max(0, start - window + 1) // size * size
        if first < row.first_held != start:
            raise ValueError(
                f"[update_and_fetch] a layer is at position {start}, but others of its window let "
                f"go of what is before {row.first_held}: expected layers that go on together"
            )
        self.allocator.trim(row.id, start + 1)
        row.first_held = max(row.first_held, first)

    # Memory

    def _grow(self, error: OutOfBlocksError) -> None:
        """Add a growth step, or more if that is not enough, within what memory allows."""
        have = self.allocator.num_blocks
        needed = have + error.needed - error.available
        max_blocks = max(have, self.max_blocks())
        if needed > max_blocks:
            raise OutOfBlocksError(error.needed, error.available + max_blocks - have)
        self.allocator.grow(min(max_blocks, max(needed, _with_room(have))))

    def settle(self) -> None:
        """Release what deleted sequences hold, and the memory that is too much then. Does nothing
        on another thread than that of the latest step: MLX would not evaluate there."""
        if self._thread != threading.get_ident() or sys.is_finalizing():
            return
        if self.lock.acquire(blocking=False):
            try:
                self.release_dropped()
                self._shrink()
            finally:
                self.lock.release()

    def _shrink(self) -> None:
        """Move the held blocks to smaller arrays if too few are held. A state shows blocks where
        they are: until it is deleted, the old arrays would stay too."""
        have, held = self.allocator.num_blocks, self.allocator.blocks_in_use
        is_small = have <= 1.5 * held + FEWEST_NEW_BLOCKS
        if is_small or self.frozen or self.allocator.store.origins or ops.is_transforming():
            return
        layers = self._written_layers()
        for layer in layers:
            assert layer.kv.num_blocks == have  # it may have grown now
        num_blocks = _with_room(held) if held else 1
        kept = self.allocator.compact(num_blocks)
        for layer in layers:
            layer.moves.append((kept, num_blocks))
        for step in self._steps:
            _renumber(step, kept)
        for layer in layers:
            layer.move()

    def max_blocks(self) -> int:
        """How many blocks memory allows."""
        shapes = [layer.shape for layer in list(self._layers.values()) if layer.shape is not None]
        if not shapes:
            return 1 << 62
        of_known = block_bytes(shapes, self.block_size)
        one_block = of_known * max(self.num_layers, len(shapes)) // len(shapes)
        budget = self.nbytes + spare_memory() if self.kv_memory is None else self.kv_memory
        return min(budget // one_block, longest_pool(shapes, self.block_size))

    @property
    def nbytes(self) -> int:
        return sum(layer.kv.nbytes for layer in self._written_layers())


def _with_room(num_blocks: int) -> int:
    """So many blocks and one growth step."""
    return num_blocks + max(num_blocks // 4, FEWEST_NEW_BLOCKS)


def _renumber(step: PaddedBatch, kept: Int32Array) -> None:
    """Let what a step wrote be read where it is now. A layer that did not write yet begins a step
    of its own."""

    def moved(blocks: mx.array) -> mx.array:
        return mx.array(renumbered(np.array(blocks), kept))

    step.valid = False
    step.reads = ()  # they are of the arrays before, which nothing writes any more
    step.block_tables = moved(step.block_tables)
    step.row_chunks = [c and replace(c, block_ids=moved(c.block_ids)) for c in step.row_chunks]


class _Thread(threading.local):
    """A thread's pools, by the model's address or the shape of loose caches, and the options."""

    def __init__(self) -> None:
        self.pools: WeakValueDictionary[tuple[object, ...], SharedPool] = WeakValueDictionary()


_thread = _Thread()


def pool_of(model: nn.Module, num_layers: int, options: Options) -> SharedPool:
    """This thread's pool for new caches of `model` with these options; it lives as long as they
    do."""
    key = id(model), *options
    pool = _thread.pools.get(key)
    if pool is None or pool.model is None or pool.model() is not model:
        pool = _thread.pools[key] = SharedPool(num_layers, *options, ref(model))
    return pool


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
    key = "loose", shape, block_size, kv_memory, window, kv_bits
    pool = _thread.pools.get(key)
    if pool is None:
        pool = _thread.pools[key] = SharedPool(1, block_size, kv_memory, window, kv_bits)
        pool.is_loose = True
    return pool.layer(0)

"""The blocks behind all paged caches of one model, in as much memory as they take."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from weakref import WeakValueDictionary, ref

import mlx.nn as nn

from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.drop_in.pool_layer import PoolLayer
from mlx_paged.drop_in.sequence import ContentKey, PagedSequence
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy, OutOfBlocksError
from mlx_paged.kv.memory import longest_pool, spare_memory
from mlx_paged.kv.pool import block_bytes

FIRST_BLOCKS = 16
BLOCK_SIZE = 16


class SharedPool:
    """Sequences of K/V whose layers are written one after the other, as mlx-lm's caches are.

    It begins small and doubles whenever it is full; growing copies it once. It is for one thread at
    a time, because MLX evaluates a graph only on the thread that made it.

    Args:
        num_layers: layers that are going to be written.
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most; default what the device has left when it grows.
    """

    def __init__(
        self, num_layers: int, block_size: int = BLOCK_SIZE, kv_memory: int | None = None
    ) -> None:
        self.allocator = BlockAllocator(1, block_size)
        self.num_layers = num_layers
        self.kv_memory = kv_memory
        self.lock = threading.RLock()
        self._layers: WeakValueDictionary[int, PoolLayer] = WeakValueDictionary()
        self._named: WeakValueDictionary[ContentKey, PagedSequence] = WeakValueDictionary()
        self._new_ids = itertools.count()
        self._dropped: deque[int] = deque()
        self._successor: ref[SharedPool] | None = None

    def layer(self, index: int) -> PoolLayer:
        """A layer; its K/V lives as long as the caches that hold it."""
        layer = self._layers.get(index)
        if layer is None:
            layer = self._layers[index] = PoolLayer(self, index)
        return layer

    def successor(self) -> SharedPool:
        """The pool for K/V of another shape, in which the model's new caches begin from now on."""
        with self.lock:
            pool = self._successor() if self._successor else None
            if pool is None:
                pool = SharedPool(self.num_layers, self.block_size, self.kv_memory)
                self._successor = ref(pool)
                _pools.replace(self, pool)
        return pool

    def _written_layers(self) -> list[PoolLayer]:
        return [layer for layer in list(self._layers.values()) if layer.is_written]

    # Sequences

    def named(self, key: ContentKey, layer: int) -> PagedSequence:
        """An empty sequence, the same one for each layer that asks with this key once."""
        sequence = self._named.get(key)
        if sequence is None or layer in sequence.layers:
            sequence = self._named[key] = self.new_sequence()
        sequence.layers.add(layer)
        return sequence

    def new_sequence(self) -> PagedSequence:
        """An empty sequence."""
        with self.lock:
            sequence = PagedSequence(self, next(self._new_ids))
            self.allocator.admit(sequence.id, 0)
        return sequence

    def fork(self, parent: PagedSequence) -> PagedSequence:
        """A sequence that shares every block of its parent until one of them writes."""
        with self.lock:
            child = PagedSequence(self, next(self._new_ids))
            self.allocator.fork(parent.id, child.id)
            child.lacks_start = parent.lacks_start
            if parent.step is not None:
                parent.step.valid = False
        return child

    def release_later(self, seq_id: int) -> None:
        """The sequence is dead. Its blocks are free from the next operation on: objects die at any
        moment, also in the midst of the pool's own work."""
        self._dropped.append(seq_id)

    def release_dropped(self) -> None:
        """Give back the blocks of the sequences that died."""
        with self.lock:
            while self._dropped:
                seq_id = self._dropped.popleft()
                if seq_id in self.allocator:
                    self.allocator.free(seq_id)

    # Steps

    def step(
        self, rows: Sequence[PagedSequence], ids: tuple[int, ...], spans: PaddedSpans
    ) -> PaddedBatch:
        """Let the rows write their spans; the layers of one forward get the same step.

        Args:
            rows: sequences of this pool, each once.
            ids: their ids.

        Raises:
            OutOfBlocksError: the pool is full and may not grow; no token is lost.
        """
        latest = rows[0].step if rows else None
        if latest is not None and latest.serves(ids, spans):
            return latest
        with self.lock:
            return self._new_step(rows, ids, spans)

    def _new_step(
        self, rows: Sequence[PagedSequence], ids: tuple[int, ...], spans: PaddedSpans
    ) -> PaddedBatch:
        self.release_dropped()
        copies: list[BlockCopy] = []
        try:
            for row, start, stop in zip(
                rows, spans.starts.tolist(), spans.stops.tolist(), strict=True
            ):
                if stop > max(start, 0):
                    copies += self._make_writable(row, max(start, 0), stop)
        finally:
            self._copy_blocks(copies)
        step = PaddedBatch(ids, spans, self.allocator.tables(ids), self.block_size)
        for row in rows:
            row.step = step
        return step

    def _make_writable(self, row: PagedSequence, start: int, stop: int) -> list[BlockCopy]:
        kept = row.begin(start)
        if kept is not None:
            self.allocator.truncate(row.id, kept)
        try:
            return self.allocator.make_writable(row.id, start, stop)
        except OutOfBlocksError as error:
            self._grow(error)
            return self.allocator.make_writable(row.id, start, stop)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for layer in self._written_layers() if copies else []:
            layer.kv.copy_blocks(copies)
        self.allocator.copies_done()

    # Memory

    def _grow(self, error: OutOfBlocksError) -> None:
        """Add the blocks that are missing, and as many as there are if memory allows."""
        have = self.allocator.num_blocks
        needed = have + error.needed - error.available
        most = max(have, self._most_blocks())
        if needed > most:
            raise OutOfBlocksError(error.needed, error.available + most - have)
        self.allocator.grow(min(most, max(needed, 2 * have, FIRST_BLOCKS)))

    def _most_blocks(self) -> int:
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
        """Bytes of K/V that the pool takes."""
        return sum(layer.kv.nbytes for layer in self._written_layers())

    @property
    def block_size(self) -> int:
        return self.allocator.block_size

    @property
    def blocks_in_use(self) -> int:
        """Blocks that living sequences hold."""
        self.release_dropped()
        return self.allocator.blocks_in_use

    @property
    def cow_clones(self) -> int:
        """Blocks copied on write so far."""
        return self.allocator.cow_clones

    def check_integrity(self) -> None:
        """Assert that every block is free or held and that nothing leaks."""
        self.release_dropped()
        self.allocator.check_integrity()


class _Pools(threading.local):
    """The living pools of one thread, by model and options."""

    def __init__(self) -> None:
        self.of_models: dict[tuple[int, int, int | None], tuple[ref[nn.Module], ref[SharedPool]]]
        self.of_models = {}

    def replace(self, old: SharedPool, new: SharedPool) -> None:
        """Let a model have another pool."""
        for key, (its_model, its_pool) in self.of_models.items():
            if its_pool() is old:
                self.of_models[key] = its_model, ref(new)


_pools = _Pools()


def pool_of(
    model: nn.Module, num_layers: int, block_size: int = BLOCK_SIZE, kv_memory: int | None = None
) -> SharedPool:
    """The pool that this thread's new caches of `model` share; it lives as long as they do."""
    key = (id(model), block_size, kv_memory)
    if key in _pools.of_models:
        its_model, its_pool = (reference() for reference in _pools.of_models[key])
        if its_model is model and isinstance(its_pool, SharedPool):
            return its_pool
    pool = SharedPool(num_layers, block_size, kv_memory)
    living = {k: refs for k, refs in _pools.of_models.items() if refs[1]() is not None}
    _pools.of_models = living | {key: (ref(model), ref(pool))}
    return pool

"""The blocks of all paged caches of one model, in a pool that grows with them."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_paged import ops
from mlx_paged.arguments import GB
from mlx_paged.drop_in.layer_arrays import LayerArrays
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array, renumbered
from mlx_paged.kv.blocks import BlockCopy, OutOfBlocksError
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.memory import longest_pool, spare_memory
from mlx_paged.kv.shapes import KVShape, block_bytes
from mlx_paged.options import BLOCK_SIZE, KVBits
from mlx_paged.runner.device_errors import noted
from mlx_paged.runner.thread_graphs import free_graphs_with_thread

FEWEST_NEW_BLOCKS = 16


class PoolOptions(NamedTuple):
    """The options of a pool; caches with other options get another pool.

    Attributes:
        block_size: token slots in a block.
        kv_memory: bytes of K/V at most; None: what the device has left when the pool grows.
        window: of the pool's layers, whose sequences let go of the blocks behind the window; None:
            the sequences keep all blocks.
        kv_bits: how K/V is stored.
    """

    block_size: int = BLOCK_SIZE
    kv_memory: int | None = None
    window: int | None = None
    kv_bits: KVBits = None


# The last key says whether Python's garbage collector runs, in any thread. The callback is not a
# Python function: that would swallow a Ctrl-C that comes during a collection. The collector gives a
# phase and a dict, which is not empty: so the phase moves to the end.
_phases: OrderedDict[str, None] = OrderedDict(start=None, stop=None)
gc.callbacks.append(_phases.move_to_end)  # type: ignore[arg-type]


class PagedSequence:
    """A block table that the caches of all layers of one sequence share.

    The pool frees it when the last of these caches is deleted. Every layer writes through it to the
    same positions, each in its own K/V arrays.
    """

    def __init__(self, pool: SharedPool, seq_id: int) -> None:
        self.pool = pool  # the pool that has the blocks
        self.id = seq_id  # of the sequence in the pool's allocator
        self.layers: set[int] = set()  # the layers whose caches show it
        self.step: PaddedBatch | None = None  # the forward that wrote it last
        self.version = 0  # how often it was written
        self.is_frozen = False  # whether a state keeps it; no cache may write it then
        self.first_held = 0  # the first position that it holds, a multiple of the block size
        # By layer: to how many tokens its cache was trimmed since the sequence was written.
        self.rewound: dict[int, int] = {}

    def __del__(self) -> None:
        self.pool.dropped.append(self.id)
        # Python's collector may call this at any moment, also within an operation of the pool. MLX
        # calls it for a state's sequence while it evaluates, and may not evaluate again then.
        if self.is_frozen:
            self.pool.frozen.discard(self)
        elif [*_phases][-1] == "stop":  # an iterator may start a collection, which moves a phase
            try:
                self.pool.settle()
            except Exception as error:  # which Python would only print
                self.pool.error = noted(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        return self.pool.fork(self)

    def begin_step(self, start: int) -> int | None:
        """Begin a step that writes from `start`. The step before becomes invalid, and the pool's
        next writes wait for what that step reads. Returns `start` if every layer was trimmed to
        `start` or less: the sequence is to be cut there. Else None."""
        if self.step is not None:
            self.step.valid = False
            self.pool.reads += self.step.reads
            self.step.reads = ()
        rewound, self.rewound = self.rewound, {}
        self.version += 1
        if self.layers <= rewound.keys() and max(rewound.values(), default=start + 1) <= start:
            return start
        return None


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
        self.options = PoolOptions(block_size, kv_memory, window, kv_bits)
        self.allocator = BlockAllocator(1, block_size, [LayerGroup(window)])
        self.num_layers = num_layers
        self.block_size = block_size
        self.kv_memory = kv_memory
        self.model = model
        self.window = window
        self.kv_bits = kv_bits
        self.is_loose = False
        self.lock = threading.RLock()
        self.layers: WeakValueDictionary[int, LayerArrays] = WeakValueDictionary()
        self._by_key: WeakValueDictionary[tuple[object, ...], PagedSequence]
        self._by_key = WeakValueDictionary()
        self._new_ids = itertools.count()
        self.dropped: deque[int] = deque()  # ids of deleted sequences that still hold blocks
        self.frozen: WeakSet[PagedSequence] = WeakSet()  # sequences whose blocks a state shows
        self.reads: list[mx.array] = []  # of blocks that the next step may write
        self._steps: WeakSet[PaddedBatch] = WeakSet()
        self._thread = 0  # the thread of the latest step, which evaluates
        self.error: Exception | None = None  # that the next step raises
        self._successor: ref[SharedPool] | None = None

    def successor(self) -> SharedPool:
        """The pool for K/V of another shape. The model's new caches begin in it from now on."""
        with self.lock:
            pool = self._successor() if self._successor else None
            if pool is None:
                pool = SharedPool(self.num_layers, *self.options, self.model)
                self._successor = ref(pool)
                for key in [key for key, known in _thread.pools.items() if known is self]:
                    _thread.pools[key] = pool
        return pool

    def _written_layers(self) -> list[LayerArrays]:
        return [layer for layer in list(self.layers.values()) if layer.is_written]

    # Sequences

    def new_sequence(self) -> PagedSequence:
        with self.lock:
            sequence = PagedSequence(self, next(self._new_ids))
            self.allocator.admit(sequence.id, 0)
        return sequence

    def sequence_for(
        self, key: tuple[object, ...], layer: int, parent: PagedSequence | None = None
    ) -> PagedSequence:
        """A fork of `parent`, or an empty sequence. Layers that ask with one key get the same
        sequence. A layer that asks again with that key gets another sequence."""
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
        error, self.error = self.error, None
        if error is not None:
            raise error
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
        step = PaddedBatch(
            ids,
            spans,
            self.allocator.block_tables.tables(),
            self.block_size,
            self.allocator.table_rows(ids).tolist(),
            [row.first_held for row in rows],
        )
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
            available = error.available + max_blocks - have
            raise OutOfBlocksError(error.needed, available, self._larger())
        self.allocator.grow(min(max_blocks, max(needed, _with_room(have))))

    def _larger(self) -> str:
        """What a user can do about a pool that is full."""
        if self.kv_memory is None:
            return ": the device has no memory left: expected fewer or shorter sequences"
        given = f"kv_memory is {self.kv_memory / GB:g} GB"
        return f" of {self.block_size} tokens: {given}: expected more, or shorter sequences"

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
        """Move the held blocks to smaller arrays if few blocks are held. While there are frozen
        sequences nothing is moved: their states would keep the old arrays too."""
        have, held = self.allocator.num_blocks, self.allocator.store.blocks_in_use
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
        shapes = [layer.shape for layer in list(self.layers.values()) if layer.shape is not None]
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
    """`num_blocks` and one growth step more."""
    return num_blocks + max(num_blocks // 4, FEWEST_NEW_BLOCKS)


def _renumber(step: PaddedBatch, kept: Int32Array) -> None:
    """Let a step read what it wrote where the blocks are now. Layers that did not write yet begin a
    step of their own."""

    def moved(blocks: mx.array) -> mx.array:
        return mx.array(renumbered(np.array(blocks), kept))

    step.valid = False
    step.reads = ()  # of the old arrays, which nothing writes any more
    step.replace_tables(moved(step.block_tables))
    step.row_chunks = [c and replace(c, block_ids=moved(c.block_ids)) for c in step.row_chunks]


class _Thread(threading.local):
    """A thread's pools, by the model's address or the shape of loose caches, and the options."""

    def __init__(self) -> None:
        self.pools: WeakValueDictionary[tuple[object, ...], SharedPool] = WeakValueDictionary()


_thread = _Thread()


def pool_of(model: nn.Module, num_layers: int, options: PoolOptions) -> SharedPool:
    """This thread's pool for new caches of `model` with these options; they keep it alive."""
    key = id(model), *options
    pool = _thread.pools.get(key)
    if pool is None or pool.model is None or pool.model() is not model:
        pool = _thread.pools[key] = SharedPool(num_layers, *options, ref(model))
    return pool


def loose_pool(shape: KVShape | None, options: PoolOptions) -> SharedPool:
    """This thread's pool for caches that were made without a model, with K/V of this shape."""
    key = "loose", shape, *options
    pool = _thread.pools.get(key)
    if pool is None:
        pool = _thread.pools[key] = SharedPool(1, *options)
        pool.is_loose = True
    return pool

"""A sequence of a shared pool, and one layer of it."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import KVPool, KVShape

if TYPE_CHECKING:
    from mlx_paged.drop_in.shared_pool import SharedPool


class _Collector:
    """Whether Python's garbage collector runs, in any thread."""

    is_running = False

    def note(self, phase: str, info: dict[str, int]) -> None:
        self.is_running = phase == "start"


_collector = _Collector()
gc.callbacks.append(_collector.note)


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
        # By layer, to how many tokens it was trimmed since the sequence was written.
        self.rewound: dict[int, int] = {}

    def __del__(self) -> None:
        self.pool.dropped.append(self.id)
        # Python's collector may call this at any moment, also within an operation of the pool. MLX
        # calls it for a state's sequence while it evaluates, and may not evaluate again then.
        if self.is_frozen:
            self.pool.frozen.discard(self)
        elif not _collector.is_running:
            self.pool.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        return self.pool.fork(self)

    def fork_for(self, layer: PoolLayer, is_frozen: bool = False) -> PagedSequence:
        """A sequence of the layer's pool with the same content, one for the caches of all layers. A
        fork into another pool has no content yet: each layer copies its own."""
        parent = self if layer.pool is self.pool else None
        key = self.pool, self.id, self.version, is_frozen
        fork = layer.pool.sequence_for(key, layer.index, parent)
        fork.is_frozen = is_frozen
        if is_frozen:
            fork.pool.frozen.add(fork)
        return fork

    def begin_step(self, start: int) -> int | None:
        """Begin a step that writes from `start`; the step before becomes invalid, and what it reads
        comes before the pool's next writes. Returns the length to cut the sequence to if every
        layer was trimmed at least that far."""
        if self.step is not None:
            self.step.valid = False
            self.pool.reads += self.step.reads
            self.step.reads = ()
        rewound, self.rewound = self.rewound, {}
        self.version += 1
        if self.layers <= rewound.keys() and max(rewound.values(), default=start + 1) <= start:
            return start
        return None


class PoolLayer:
    """K/V of one layer.

    The first K/V written determine its shape: under tensor parallelism only the layer knows it.
    """

    def __init__(self, pool: SharedPool, index: int) -> None:
        self.pool = pool  # the pool whose blocks all layers share
        self.index = index  # which layer it is
        self.shape: KVShape | None = None  # None until it is known
        self._kv: KVPool | None = None
        # To arrays of so many blocks that begin with these blocks, in order; to none, if there are
        # no blocks.
        self.moves: deque[tuple[Int32Array, int]] = deque()

    @property
    def is_written(self) -> bool:
        return self._kv is not None

    @property
    def kv(self) -> KVPool:
        """The arrays, with as many blocks as the pool has."""
        assert self.shape is not None, "a layer is read before it is written"
        self.move()
        num_blocks = self.pool.allocator.num_blocks
        if self._kv is None:
            shapes, capacity = [self.shape], self.pool.max_blocks()
            self._kv = KVPool(shapes, num_blocks, self.pool.block_size, capacity=capacity)
        elif self._kv.num_blocks < num_blocks:
            self._kv.grow(num_blocks)
        return self._kv

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What is written, ``[H_kv, num_blocks, block_size, columns]`` each."""
        return self.kv.targets(0)

    def move(self) -> None:
        """Perform the moves. If memory runs out, the move stays for the next use of the arrays."""
        while self.moves:
            blocks, num_blocks = self.moves[0]
            if self._kv is not None and len(blocks):
                self._kv.keep(blocks, num_blocks)
            else:
                self._kv = None
            self.moves.popleft()

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

    def depend_on(self, arrays: list[mx.array]) -> None:
        """Evaluate `arrays` before what is read or written from now on."""
        self.kv.set_keys(0, mx.depends([self.kv.k[0]], arrays)[0])

    def layer_for(self, keys: mx.array, values: mx.array) -> PoolLayer:
        """The layer for the first K/V of a sequence: this one, or the same layer of another pool if
        this one holds K/V of another shape or type."""
        shape, layer = self._shape_of(keys, values), self
        if self.pool.is_loose:
            return self.pool.loose_layer(shape)
        while layer.shape not in (None, shape):
            layer = layer.pool.successor().layer(self.index)
        return layer

    def write(self, step: PaddedBatch, keys: mx.array, values: mx.array) -> None:
        """Write K/V, ``[B, H_kv, N, D]`` each, of a step's rows. Raises ValueError as
        :meth:`check`."""
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
        """How K/V is stored: arrays of one head but different widths are latents and rotary
        keys."""
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
        ``[B, H_kv, N, D]``, or what a pool with this layer's shape stores. They may lack what a
        window has left."""
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

    def fork_from(self, row: PagedSequence, source: PoolLayer, num_tokens: int) -> PagedSequence:
        """A sequence of this layer's pool with the content of `row` in layer `source`. In the same
        pool it shares every block; from another pool the K/V is copied."""
        child = row.fork_for(self)
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


def _token_rows(x: mx.array) -> mx.array:
    """K or V ``[B, H_kv, N, D]`` as ``write_kv`` takes it."""
    return x if 1 in (x.shape[0], x.shape[2]) else x.swapaxes(1, 2).flatten(0, 1)

"""The K/V arrays of one layer, which grow and shrink with the pool."""

from collections import deque
from collections.abc import Callable

import mlx.core as mx

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import Int32Array
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape


class LayerArrays:
    """K/V of one layer, in arrays with as many blocks as an allocator has.

    Args:
        max_blocks: how many blocks memory allows; called when the arrays are made.
    """

    def __init__(self, allocator: BlockAllocator, max_blocks: Callable[[], int]) -> None:
        self.shape: KVShape | None = None  # None until it is known
        self._allocator = allocator
        self._max_blocks = max_blocks
        self._kv: KVPool | None = None  # None until something is written
        # Each move: the blocks that new arrays begin with, in order, and how many blocks these
        # arrays have. No blocks: the arrays are given up.
        self.moves: deque[tuple[Int32Array, int]] = deque()

    @property
    def is_written(self) -> bool:
        return self._kv is not None

    @property
    def kv(self) -> KVPool:
        """The arrays, with as many blocks as the pool has."""
        assert self.shape is not None, "a layer is read before it is written"
        if self.moves:
            self.move()
        num_blocks = self._allocator.num_blocks
        if self._kv is None:
            size, capacity = self._allocator.block_size, self._max_blocks()
            self._kv = KVPool([self.shape], num_blocks, size, capacity=capacity)
        elif self._kv.num_blocks < num_blocks:
            self._kv.grow(num_blocks)
        return self._kv

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What is written, ``[H_kv, num_blocks, block_size, columns]`` each."""
        return self.kv.targets(0).arrays

    def move(self) -> None:
        """Perform the moves. If memory runs out, the move stays for the next use of the arrays."""
        while self.moves:
            blocks, num_blocks = self.moves[0]
            if self._kv is not None and len(blocks):
                self._kv.keep(blocks, num_blocks)
            else:
                self._kv = None
            self.moves.popleft()

    def depend_on(self, arrays: list[mx.array]) -> None:
        """Evaluate `arrays` before what is read or written from now on."""
        self.kv.set_keys(0, mx.depends([self.kv.k[0]], arrays)[0])

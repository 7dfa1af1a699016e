"""One sequence of a shared pool, which exists as long as caches refer to it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_paged.drop_in.padded_batch import PaddedBatch
    from mlx_paged.drop_in.pool_layer import PoolLayer
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

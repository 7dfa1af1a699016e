"""One sequence of a shared pool, which lives as long as the caches that show it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_paged.drop_in.padded_batch import PaddedBatch


class SequencePool(Protocol):
    """What a sequence asks of its pool."""

    def new_sequence(self) -> PagedSequence:
        """An empty sequence."""

    def fork(self, parent: PagedSequence) -> PagedSequence:
        """A sequence that shares every block of its parent."""

    def release_later(self, seq_id: int) -> None:
        """The sequence is dead."""


@dataclass(frozen=True, slots=True)
class ContentKey:
    """Identifies what a sequence holds at one time. It is not written to a file: mlx-lm's own
    `save_prompt_cache` refuses the state that it is part of."""

    pool: SequencePool
    seq_id: int
    version: int


class PagedSequence:
    """A block table that the caches of all layers of one sequence share.

    It ends when the last of these caches dies. Every layer writes the same positions through it,
    each into its own K/V arrays.

    Attributes:
        pool: where the blocks are.
        id: of the sequence in the pool's allocator.
        layers: layers whose caches show it.
        step: the forward that wrote it last.
        version: how often it was written.
        is_frozen: whether a state keeps it, and no cache may write it.
        lacks_start: whether layers with a window hold zeros for tokens that no query sees any more.
    """

    def __init__(self, pool: SequencePool, seq_id: int) -> None:
        self.pool = pool
        self.id = seq_id
        self.layers: set[int] = set()
        self.step: PaddedBatch | None = None
        self.version = 0
        self.is_frozen = False
        self.lacks_start = False
        self._forks: list[weakref.ref[PagedSequence]] = []
        self._forked_version = 0
        self._rewound: dict[int, int] = {}
        self._companions: list[PagedSequence] = []

    def __del__(self) -> None:
        self.pool.release_later(self.id)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedSequence:
        return self.pool.fork(self)

    @property
    def key(self) -> ContentKey:
        return ContentKey(self.pool, self.id, self.version)

    def fork_for(self, pool: SequencePool, layer: int, is_frozen: bool = False) -> PagedSequence:
        """A sequence of `pool` with the same content, one for the caches of all layers.

        Caches are forked layer by layer: the first one to ask makes the fork and those of other
        layers get the same. A layer that asks again gets another. A fork into another pool has no
        content yet; each layer copies its own.
        """
        if self._forked_version != self.version:
            self._forks, self._forked_version = [], self.version
        living = [(ref, fork) for ref in self._forks if (fork := ref()) is not None]
        self._forks = [ref for ref, _ in living]
        for _, fork in living:
            is_alike = fork.pool is pool and fork.is_frozen == is_frozen
            if is_alike and layer not in fork.layers:
                fork.layers.add(layer)
                return fork
        fork = pool.fork(self) if pool is self.pool else pool.new_sequence()
        fork.is_frozen = is_frozen
        fork.lacks_start = self.lacks_start
        fork.layers.add(layer)
        self._forks.append(weakref.ref(fork))
        return fork

    def with_companions(self, count: int) -> tuple[PagedSequence, ...]:
        """Itself and empty sequences up to `count`, the same ones at every call."""
        while len(self._companions) < count - 1:
            self._companions.append(self.pool.new_sequence())
        return self, *self._companions[: count - 1]

    def rewind(self, layer: int, num_tokens: int) -> None:
        """This layer will overwrite what comes after its first `num_tokens`."""
        self._rewound[layer] = num_tokens

    def begin(self, start: int) -> int | None:
        """A step is going to write from `start`: outdate the one before.

        Returns:
            The length to cut the sequence to, as every layer has gone back at least so far.
        """
        if self.step is not None:
            self.step.valid = False
        rewound, self._rewound = self._rewound, {}
        self.version += 1
        if self.layers <= rewound.keys() and max(rewound.values(), default=start + 1) <= start:
            return start
        return None

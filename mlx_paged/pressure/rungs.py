"""What an engine can give back beside MLX's cache, in this order: what is only kept for later, the
memory of a step, the pool."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from mlx_paged.pressure.ladder import LEAST, Ladder, Rung
from mlx_paged.pressure.system import Level, System
from mlx_paged.pressure.watch import Clocks, Watch, Wired

SAVE_S = 1.0
"""Seconds at most in which known blocks are copied to a disk before the pool shrinks."""
LEAST_CHUNK = 64
"""Prompt tokens that a step computes at least, however short memory is."""


class Size(Protocol):
    """The size of an engine's pool."""

    @property
    def now(self) -> int: ...

    @property
    def largest(self) -> int: ...

    @property
    def held(self) -> int:
        """Blocks that running requests hold, and need for their next tokens."""

    def change(self, num_blocks: int) -> bool:
        """Let the pool have about so many blocks; returns whether its size has changed."""


class Chunks(Protocol):
    """How many prompt tokens a step computes at most."""

    def shorten_chunks(self, least: int) -> bool:
        """Halve the prompt tokens of a step if `least` or more are left; returns whether it did."""

    def lengthen_chunks(self) -> None:
        """Take one halving back, if there is one."""


class Kept:
    """What is only kept for later prompts, in arrays of its own: snapshots of recurrent states, and
    features of pictures. Each function forgets some, and returns whether there was anything."""

    name = "snapshots and features of pictures"
    is_late = repeats = False

    def __init__(self, forget: Sequence[Callable[[], bool]]) -> None:
        self._forget = forget

    def act(self, level: Level) -> bool:
        return any([forget() for forget in self._forget])

    def undo(self) -> None:
        pass


class SmallerChunk:
    """Halves the prompt tokens of a step. Its memory comes back with the steps that follow."""

    name = "a smaller chunk"
    is_late, repeats = True, False

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def act(self, level: Level) -> bool:
        return self._chunks.shorten_chunks(LEAST_CHUNK)

    def undo(self) -> None:
        self._chunks.lengthen_chunks()


class SmallerPool:
    """Halves the pool. Known blocks that nobody holds go first, to a disk if there is one. Only at
    a critical level running requests lose their blocks."""

    name = "the pool"
    is_late, repeats = False, True

    def __init__(self, size: Size, save: Callable[[], bool]) -> None:
        self._size, self._save = size, save

    def act(self, level: Level) -> bool:
        wanted = self._size.now // 2
        if level < Level.CRITICAL:
            wanted = max(wanted, self._size.held)
        if wanted >= self._size.now:
            return False
        stop = time.monotonic() + SAVE_S
        while self._save() and time.monotonic() < stop:
            pass
        return self._size.change(wanted)

    def undo(self) -> None:
        self._size.change(2 * self._size.now)


class _Grown:
    """Takes back half of the memory that was given back."""

    def __init__(self, chunk: SmallerChunk, pool: SmallerPool | None) -> None:
        self._chunk, self._pool = chunk, pool

    def grow(self) -> None:
        self._chunk.undo()
        if self._pool is not None:
            self._pool.undo()


def watch(
    system: System,
    forget: Sequence[Callable[[], bool]],
    chunks: Chunks,
    size: Size | None,
    save: Callable[[], bool],
    wired: Wired,
    clocks: Clocks | None = None,
    least: int = LEAST,
) -> Watch:
    """What watches an engine's memory.

    Args:
        forget: see :class:`Kept`.
        size: of the pool; None: it cannot change.
        save: copies some known blocks to a disk; returns whether there are more.
        clocks: None: those of the machine.
        least: bytes that a rung has to bring.
    """

    def flush() -> None:
        mx.synchronize()
        mx.clear_cache()
        system.trim()

    smaller, pool = SmallerChunk(chunks), None if size is None else SmallerPool(size, save)
    rungs: list[Rung] = [Kept(forget), smaller, *([] if pool is None else [pool])]
    ladder = Ladder(flush, rungs, system, least)
    return Watch(system, ladder, _Grown(smaller, pool), wired, clocks)

"""MLX's limits of wired and of cached memory, held while engines live."""

import os
import threading
from weakref import finalize

import mlx.core as mx
import numpy as np

from mlx_paged.kv.memory import working_set

VARIABLE = "MLX_PAGED_WIRED"
"""1: engines raise the wired limit unless their option says otherwise."""


def is_wired(wired: bool | None) -> bool:
    """The value of the option `wired`; None: what the environment says."""
    return os.environ.get(VARIABLE) == "1" if wired is None else wired


class _Limits:
    """MLX's limits, one of each for the process, and what their holders ask for: the largest cache
    limit counts, but never more than the former limit; the wired limit is raised while any holder
    asks for that. The garbage collector may release a holder during :meth:`hold` on the same
    thread: the lock is reentrant, and the new holder is counted before a limit changes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: dict[int, tuple[int, bool]] = {}  # a cache limit, and whether to wire
        self._resting = set[int]()  # those of them that compute nothing at present
        self._num_holders = 0
        self._cache = 0  # the limit that is set, while `_before` is
        self._before: int | None = None  # the cache limit to restore
        self._wired: tuple[int, int] | None = None  # the wired limit that is set; that before it

    def hold(self, cache: int, wired: bool) -> tuple[int, int]:
        """The number of a new holder, and the limit that `cache` gets by itself."""
        with self._lock:
            self._num_holders += 1
            self._asked[holder := self._num_holders] = cache, wired
            if self._before is None:
                self._cache = cache
                self._before = mx.set_cache_limit(cache)
            self._follow()
            self._wire()
            return holder, min(cache, self._before)

    def rest(self, holder: int, rests: bool) -> None:
        """Whether a holder computes nothing at present, so that nothing is wired for it."""
        with self._lock:
            if holder not in self._asked:
                return
            (self._resting.add if rests else self._resting.discard)(holder)
            self._wire()
            if self._wired is not None and not self._wires:
                mx.synchronize()
                self._unwire()

    @property
    def _wires(self) -> bool:
        """Whether a holder that computes wants memory wired."""
        return any(wired for each, (_, wired) in self._asked.items() if each not in self._resting)

    def _wire(self) -> None:
        if self._wires and self._wired is None and (size := working_set()) is not None:
            self._wired = size, mx.set_wired_limit(size)

    def _unwire(self) -> None:
        if self._wired is None:
            return
        (ours, others), self._wired = self._wired, None
        if (now := mx.set_wired_limit(others)) != ours:
            mx.set_wired_limit(now)  # somebody else's, such as mlx-lm's

    def release(self, holder: int) -> None:
        with self._lock:
            del self._asked[holder]
            self._resting.discard(holder)
            self._follow()
            is_last = not self._asked and self._before is not None
            unwires = self._wired is not None and not self._wires
            if not (is_last or unwires):
                return
            before, self._before = self._before, None if is_last else self._before
            try:
                mx.synchronize()  # do not lower a limit while the device computes
            finally:
                if is_last and before is not None:
                    mx.set_cache_limit(before)
                if unwires:
                    self._unwire()
                if is_last:
                    mx.clear_cache()

    def clear(self) -> None:
        """Let MLX give back what it keeps, unless others hold limits: they may compute with it."""
        with self._lock:
            if not self._asked:
                try:
                    mx.synchronize()
                finally:
                    mx.clear_cache()

    def _follow(self) -> None:
        if self._before is None or not self._asked:
            return
        limit = min(max(cache for cache, _ in self._asked.values()), self._before)
        if limit != self._cache:
            self._cache = limit
            mx.set_cache_limit(limit)


_limits = _Limits()


class HeldLimits:
    """Limits of MLX, until `holder` dies or :attr:`release` is called.

    MLX keeps at most `cache` bytes of freed buffers, and no more than before: :attr:`cache` is
    ``min(cache, former limit)``. If `wired`, the wired limit is what Metal recommends. The release
    of the last object of this class restores both limits.

    When the last `holder` dies, MLX gives back the freed buffers that it keeps. An owner has
    `holder` as the last attribute, so that `holder` dies after the owner's arrays. `holder` is an
    array of numpy, because the garbage collector does not track arrays of numpy and so cannot free
    `holder` earlier."""

    def __init__(self, cache: int, wired: bool = False) -> None:
        self._number, self.cache = _limits.hold(cache, wired)
        self.holder = np.empty(0)
        self.release = finalize(self.holder, _limits.release, self._number)
        for each in (self.release, finalize(self.holder, _limits.clear)):
            each.atexit = False

    def rest(self) -> None:
        """Nothing is computed at present: for this holder nothing has to be wired."""
        _limits.rest(self._number, True)

    def work(self) -> None:
        """Something is about to be computed."""
        _limits.rest(self._number, False)

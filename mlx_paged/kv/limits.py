"""MLX's limits of wired and of cached memory, held while engines live."""

import threading
from weakref import finalize

import mlx.core as mx
import numpy as np

from mlx_paged.kv.memory import working_set


class _Limits:
    """MLX's limits, one of each for the process, and the cache limits that their holders ask for:
    the largest one counts, but never more than the former limit. The garbage collector may release
    a holder during :meth:`hold` on the same thread: the lock is reentrant, and the new holder is
    counted before a limit changes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: list[int] = []
        self._wired: int | None = None  # the limits that are set, while `_before` is
        self._cache = 0
        self._before: tuple[int | None, int] | None = None  # the limits to restore

    def hold(self, cache: int) -> int:
        """The limit that `cache` gets by itself."""
        with self._lock:
            self._asked.append(cache)
            if self._before is None:
                self._wired, self._cache = working_set(), cache
                wired = None if self._wired is None else mx.set_wired_limit(self._wired)
                self._before = wired, mx.set_cache_limit(cache)
            self._follow()
            return min(cache, self._before[1])

    def release(self, cache: int) -> None:
        with self._lock:
            self._asked.remove(cache)
            if self._asked or self._before is None:
                self._follow()
                return
            wired, cached = self._before
            self._before = None
            try:
                mx.synchronize()  # do not lower the limit while the device computes
            finally:
                mx.set_cache_limit(cached)
                if wired is not None and (now := mx.set_wired_limit(wired)) != self._wired:
                    mx.set_wired_limit(now)  # somebody else's, such as mlx-lm's
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
        if self._before is None:
            return
        limit = min(max(self._asked), self._before[1])
        if limit != self._cache:
            self._cache = limit
            mx.set_cache_limit(limit)


_limits = _Limits()


class HeldLimits:
    """Limits of MLX, until `holder` dies or :attr:`release` is called.

    The wired limit is what Metal recommends, and MLX keeps at most `cache` bytes of freed buffers.
    The release of the last object of this class restores both limits. When the last `holder` dies,
    MLX gives back the freed buffers that MLX keeps. An owner has `holder` as the last attribute, so
    that `holder` dies after the owner's arrays. `holder` is an array of numpy, because the garbage
    collector does not track arrays of numpy and so cannot free `holder` earlier. :attr:`cache` is
    ``min(cache, former limit)``."""

    def __init__(self, cache: int) -> None:
        self.cache = _limits.hold(cache)
        self.holder = np.empty(0)
        self.release = finalize(self.holder, _limits.release, cache)
        for each in (self.release, finalize(self.holder, _limits.clear)):
            each.atexit = False

"""MLX's limits of wired and of cached memory, held while engines live."""

import threading
from collections.abc import Callable
from weakref import finalize

import mlx.core as mx

from mlx_paged.kv.memory import working_set


class _Limits:
    """MLX's limits, one of each for the process, and the cache limits that their holders ask for:
    the largest one counts. The garbage collector may release a holder during :meth:`hold` on the
    same thread: the lock is reentrant, and the new holder is counted before a limit changes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: list[int] = []
        self._cache = 0  # the limit of the cache, while `_before` is set
        self._before: tuple[int | None, int] | None = None  # the limits to restore

    def hold(self, cache: int) -> None:
        with self._lock:
            self._asked.append(cache)
            if self._before is None:
                recommended, self._cache = working_set(), cache
                wired = None if recommended is None else mx.set_wired_limit(recommended)
                self._before = wired, mx.set_cache_limit(cache)
            self._follow()

    def release(self, cache: int) -> None:
        with self._lock:
            self._asked.remove(cache)
            if self._asked or self._before is None:
                self._follow()
                return
            wired, cached = self._before
            self._before = None
            mx.set_cache_limit(cached)
            if wired is not None:
                try:
                    mx.synchronize()  # do not lower the limit while the device computes
                finally:
                    mx.set_wired_limit(wired)

    def _follow(self) -> None:
        if self._before is not None and self._cache != (largest := max(self._asked)):
            self._cache = largest
            mx.set_cache_limit(largest)


_limits = _Limits()


def hold_limits(owner: object, cache: int | None) -> Callable[[], object] | None:
    """Raise MLX's wired limit to what Metal recommends, and let MLX keep at most `cache` bytes of
    freed buffers, until `owner` dies or the returned function is called; the last of several owners
    restores both. Where `cache` is None, on a CPU, do nothing; return None."""
    if cache is None:
        return None
    _limits.hold(cache)
    release = finalize(owner, _limits.release, cache)
    release.atexit = False
    return release

"""Memory that the system may not page out while engines live."""

import threading
from collections.abc import Callable
from weakref import finalize

import mlx.core as mx

from mlx_paged.kv.memory import working_set


class _WiredLimit:
    """MLX's wired limit, one for the process, and how many hold it up.

    A holder can die, and release its hold, in the midst of :meth:`hold` on the same thread. So
    that thread can take the lock again, and the new holder is counted before the limit changes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._before: int | None = None  # the limit to restore; None: it is not raised

    def hold(self, recommended: int) -> None:
        with self._lock:
            self._holders += 1
            if self._before is None:
                self._before = mx.set_wired_limit(recommended)

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._before is not None:
                try:
                    mx.synchronize()  # the limit must not sink while the device computes
                finally:
                    mx.set_wired_limit(self._before)
                    self._before = None


_limit = _WiredLimit()


def hold_wired_limit(owner: object) -> Callable[[], object] | None:
    """Let MLX keep as much memory wired as Metal recommends, until `owner` dies or the function
    that this returns is called. When the last of several owners is gone, the limit is again what it
    was before the first. On a CPU nothing happens, and None is returned.
    """
    recommended = working_set()
    if recommended is None:
        return None
    _limit.hold(recommended)
    release = finalize(owner, _limit.release)
    release.atexit = False
    return release

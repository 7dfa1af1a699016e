"""How long Python's garbage collector holds a thread up. Knows no mlx."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class GcPauses:
    """Adds up the time of garbage collections, as `clock` sees it, while this object lives.

    Attributes:
        seconds: collections on the thread that called :meth:`watch` last.
        elsewhere: those on other threads.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.elsewhere = 0.0
        self._clock = clock
        self._thread = threading.get_ident()
        self._started: float | None = None
        callback = _callback(weakref.ref(self))
        gc.callbacks.append(callback)
        self.close = weakref.finalize(self, gc.callbacks.remove, callback)
        self.close.atexit = False

    def watch(self) -> None:
        """From now on, this thread is the one that matters."""
        self._thread = threading.get_ident()

    def working(self) -> float:
        """The clock without the collections on the watched thread."""
        return self._clock() - self.seconds

    def _note(self, phase: str) -> None:
        if phase == "start":
            self._started = self._clock()
        elif self._started is not None:
            pause, self._started = self._clock() - self._started, None
            if threading.get_ident() == self._thread:
                self.seconds += pause
            else:
                self.elsewhere += pause


def _callback(pauses: "weakref.ref[GcPauses]") -> Callable[[str, dict[str, int]], Any]:
    """For ``gc.callbacks``, which would keep the object itself alive."""

    def note(phase: str, info: dict[str, int]) -> None:
        alive = pauses()
        if alive is not None:
            alive._note(phase)

    return note


class PhaseTimes:
    """Adds up the time of each phase, without that of the phases within it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner = 0.0  # of phases within the one under way

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """What happens in this context is `phase`."""
        started, outer = self._clock(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            elapsed = self._clock() - started
            own = elapsed - self._inner
            self._seconds[phase] = self._seconds.get(phase, 0.0) + own
            self._inner = outer + elapsed

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

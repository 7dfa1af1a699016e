"""Times of the garbage collector and of the phases of a profiled step. Knows no mlx."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GcPauses:
    """Measures garbage collections with `clock` while this object lives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0  # on the watched thread
        self.elsewhere = 0.0  # seconds on other threads
        self._clock = clock
        self._thread = threading.get_ident()
        self._started: float | None = None
        note = weakref.WeakMethod(self._note)  # a bound method would keep this object alive

        def callback(phase: str, info: dict[str, int]) -> None:
            if (alive := note()) is not None:
                alive(phase)

        gc.callbacks.append(callback)
        self.close = weakref.finalize(self, gc.callbacks.remove, callback)
        self.close.atexit = False

    def watch(self) -> None:
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


class PhaseTimes:
    """Sums the time of each phase, without the time of phases nested in it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner = 0.0  # of phases nested in the current one

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time in this context as `phase`."""
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

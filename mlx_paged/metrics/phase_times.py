"""Time by phase, where phases may lie within each other. Knows no mlx."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

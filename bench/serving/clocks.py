"""Time as a run sees it: the wall clock, or one that only steps move."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since it was made.

    Attributes:
        is_virtual: it says nothing about how long anything took.
    """

    @property
    def is_virtual(self) -> bool: ...

    def now(self) -> float: ...

    def wait_until(self, time_s: float) -> None:
        """Return when it is at least `time_s`."""

    def after_step(self) -> None:
        """The engine has computed a step."""


class WallClock:
    is_virtual = False

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))

    def after_step(self) -> None:
        pass


class StepClock:
    """Every step takes as long, so that nothing depends on how fast the machine is."""

    is_virtual = True

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def after_step(self) -> None:
        self._now += self._step_s

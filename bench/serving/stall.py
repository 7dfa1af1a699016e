"""A stall on purpose, to see that it is found: a hook for tests."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Stall:
    """Take `seconds` in the tick with number `tick`, from 0."""

    seconds: float
    tick: int

    @classmethod
    def parse(cls, text: str) -> "Stall":
        """From ``MILLISECONDS@TICK``.

        Raises:
            ValueError: it is something else.
        """
        ms, _, tick = text.partition("@")
        try:
            stall = cls(float(ms) / 1000, int(tick))
        except ValueError:
            stall = cls(-1.0, 0)
        if not (0 < stall.seconds < 3600 and stall.tick >= 0):
            raise ValueError(f"expected MILLISECONDS@TICK, e.g. 300@20, got {text!r}")
        return stall

    def strike(self, tick: int) -> float:
        """Returns the seconds it took: 0 in all ticks but one."""
        if tick != self.tick:
            return 0.0
        start = time.perf_counter()
        time.sleep(self.seconds)
        return time.perf_counter() - start

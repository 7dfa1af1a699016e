"""Limits on latency, and a stall, as arguments name them."""

import re
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.serving.run import Stream

LIMIT = re.compile(r"(ttft|itl|tpot)=(\d+\.?\d*|\.\d+)(ms|s)?")


@dataclass(frozen=True)
class Slo:
    """Service level objectives: limits on what the client of each stream sees, in seconds."""

    ttft: float | None = None  # from the scheduled arrival to the first token
    itl: float | None = None  # between any two consecutive tokens
    tpot: float | None = None  # mean time between tokens

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From e.g. ``ttft=500ms,itl=0.1s``; a bare number is milliseconds.

        Raises:
            ValueError: anything else.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            found = LIMIT.fullmatch(part.strip())
            if found is None or found[1] in limits or not float(found[2]):
                raise ValueError(
                    f"expected limits on ttft, itl or tpot, e.g. ttft=500ms,itl=100ms, got {text!r}"
                )
            limits[found[1]] = float(found[2]) / (1 if found[3] == "s" else 1000)
        return cls(**limits)

    def holds(self, stream: "Stream") -> bool:
        """Whether a stream has ended and kept every limit."""
        if not stream.is_done:
            return False
        gaps = [after - before for before, after in pairwise(stream.times_s)]
        seen = {
            "ttft": stream.times_s[0] - stream.arrival_s,
            "itl": max(gaps, default=0.0),
            "tpot": fmean(gaps) if gaps else 0.0,
        }
        return all((limit := getattr(self, name)) is None or seen[name] <= limit for name in seen)


@dataclass(frozen=True)
class Stall:
    """Sleep for `seconds` in the tick with the number `tick`, from 0: for tests."""

    seconds: float
    tick: int

    @classmethod
    def parse(cls, text: str) -> "Stall":
        """From ``MILLISECONDS@TICK``; anything else is a ValueError."""
        found = re.fullmatch(r"(\d{1,6}(?:\.\d*)?)@(\d+)", text)
        if found is None or not float(found[1]):
            raise ValueError(f"expected MILLISECONDS@TICK, e.g. 300@20, got {text!r}")
        return cls(float(found[1]) / 1000, int(found[2]))

    def sleep(self, tick: int) -> float:
        """Returns the seconds that it took: 0 in all ticks but one."""
        if tick != self.tick:
            return 0.0
        start = time.perf_counter()
        time.sleep(self.seconds)
        return time.perf_counter() - start

"""The highest rate at which an engine keeps its objectives."""

from collections.abc import Callable
from dataclasses import dataclass

GROWTH = 1.6
MOST_STEPS = 4
"""Up or down from where the search starts."""

BISECTIONS = 2


@dataclass(frozen=True)
class Probe:
    """One run at one rate.

    Attributes:
        rate: requests a second.
        attainment: part of the streams that kept every objective.
        tokens_per_sec: output tokens.
        good_tokens_per_sec: those of the streams that kept them.
    """

    rate: float
    attainment: float
    tokens_per_sec: float
    good_tokens_per_sec: float


def search(probe: Callable[[float], Probe], start: float, attainment: float) -> float | None:
    """Step up or down from `start` until the objectives fail or hold, then halve the gap.

    Args:
        probe: runs the trace at a rate.
        attainment: part of the streams that must keep the objectives.

    Returns:
        The highest rate that was seen to hold; None if none was.
    """

    def holds(rate: float) -> bool:
        return probe(rate).attainment >= attainment

    low, high = _bracket(holds, start)
    for _ in range(BISECTIONS):
        if low is None or high is None:
            break
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(holds: Callable[[float], bool], start: float) -> tuple[float | None, float | None]:
    """A rate that holds and a higher one that fails; None where the steps did not find one."""
    if holds(start):
        low = start
        for _ in range(MOST_STEPS):
            if not holds(low * GROWTH):
                return low, low * GROWTH
            low *= GROWTH
        return low, None
    high = start
    for _ in range(MOST_STEPS):
        if holds(high / GROWTH):
            return high / GROWTH, high
        high /= GROWTH
    return None, high

"""Percentiles of a Prometheus histogram over the last minutes."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from prometheus_client import Histogram

WINDOW_S = 300.0
PIECE_S = 30.0  # between two copies of the counts: the window is up to so much shorter
PERCENTILES = {"p50": 0.5, "p99": 0.99}

Counts = Mapping[str, Sequence[float]]
"""Cumulative counts of the buckets, by the value of the histogram's label."""


class Recent:
    """Percentiles of the observations of the last :data:`WINDOW_S` seconds.

    Args:
        histogram: has one label.
        bounds: upper bounds of its buckets; the last bucket has none.
    """

    def __init__(
        self,
        histogram: Histogram,
        bounds: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._clock = clock
        self._before = deque[tuple[float, Counts]]()  # counts before the observations at a time

    def note(self) -> None:
        """Call this before each observation."""
        now = self._clock()
        if self._before and now < self._before[-1][0] + PIECE_S:
            return
        self._before.append((now, self._counts()))
        while self._before[0][0] < now - WINDOW_S:
            self._before.popleft()

    def percentiles(self, label: str) -> dict[str, float | None]:
        """Seconds by the names of :data:`PERCENTILES`; None without observations. A value between
        two bounds is interpolated, as Prometheus does; one above the last bound is that bound."""
        counts, since = self._counts(), self._clock() - WINDOW_S
        before = next((found for at, found in self._before if at >= since), counts)
        none = [0.0] * (len(self._bounds) + 1)
        pairs = zip(counts.get(label, none), before.get(label, none), strict=True)
        sums = [now - then for now, then in pairs]
        if not sums[-1]:
            return dict.fromkeys(PERCENTILES)
        return {name: self._quantile(sums, part) for name, part in PERCENTILES.items()}

    def _quantile(self, sums: Sequence[float], part: float) -> float:
        rank = part * sums[-1]
        place = bisect_left(sums, rank)
        if place == len(self._bounds):
            return self._bounds[-1]
        (below, above), (low, high) = (
            [*pairwise([0.0, *values])][place] for values in (sums, self._bounds)
        )
        return low + (high - low) * (rank - below) / (above - below)

    def _counts(self) -> Counts:
        found: dict[str, list[float]] = {}
        for family in self._histogram.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    labels = dict(sample.labels)
                    del labels["le"]
                    [label] = labels.values()
                    found.setdefault(label, []).append(sample.value)
        return found

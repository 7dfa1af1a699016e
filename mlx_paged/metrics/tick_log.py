"""The latest ticks of an engine and their summary. Knows no mlx."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from mlx_paged.metrics.spikes import Spike, SpikeDetector
from mlx_paged.metrics.tick import PHASES, TIMES, Tick

CAPACITY = 8192
NUM_SPIKES = 1000

BUCKETS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
"""Upper bounds of the histograms' buckets; the last bucket has no bound."""

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}


class TimeHistogram:
    """How many times fell into each bucket since the engine was made."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_MS) + 1)
        self.sum_ms = 0.0

    def add(self, ms: float) -> None:
        self.counts[bisect_left(BUCKETS_MS, ms)] += 1
        self.sum_ms += ms


class TickLog(deque[Tick]):
    """A ring buffer of ticks, newest last. Ticks longer than `spike_ms` are spikes; None: see
    :class:`SpikeDetector`. An engine that profiles has slower ticks."""

    def __init__(
        self, capacity: int = CAPACITY, spike_ms: float | None = None, profile: bool = False
    ) -> None:
        super().__init__(maxlen=capacity)
        self.profile = profile
        self.spikes: deque[Spike] = deque(maxlen=NUM_SPIKES)  # newest last
        self.causes: Counter[str] = Counter()  # spikes by first cause, since the engine was made
        self.decode = TimeHistogram()  # of all ticks without prompt tokens
        self.prefill = TimeHistogram()  # of all other ticks
        self.num_ticks = 0
        self._names = [name for name in TIMES if profile or name not in PHASES]
        self._times = attrgetter(*self._names)
        self._totals = [0.0] * len(self._names)
        self._detector = SpikeDetector(spike_ms)

    def add(self, tick: Tick) -> None:
        """Append a tick and set its index."""
        tick.index = self.num_ticks
        self.num_ticks += 1
        self.append(tick)
        for index, ms in enumerate(self._times(tick)):
            self._totals[index] += ms
        is_decode = not (tick.prefill_tokens or tick.launched_prefill_tokens)
        (self.decode if is_decode else self.prefill).add(tick.tick_ms)
        for spike in self._detector.add(tick):
            self.spikes.append(spike)
            self.causes[spike.causes[0]] += 1

    @property
    def total_ms(self) -> dict[str, float]:
        """The sum of each measured time since the engine was made."""
        return dict(zip(self._names, self._totals, strict=True))

    def summary(self) -> dict[str, Any]:
        """Percentiles of each time over the held ticks, and the spikes, as JSON values. Times that
        are not measured are None."""
        found: dict[str, Any] = {name: self._percentiles(name, self) for name in TIMES}
        decodes = [tick for tick in self if not tick.has_prompt_tokens]
        prefills = [tick for tick in self if tick.has_prompt_tokens]
        found["decode_tick_ms"] = self._percentiles("tick_ms", decodes)
        found["prefill_chunk_ms"] = self._percentiles("tick_ms", prefills)
        return found | {
            "spikes": [asdict(spike) | {"causes": list(spike.causes)} for spike in self.spikes],
            "spike_causes": dict(self.causes),
            "ticks": self.num_ticks,
            "profile": self.profile,
        }

    def _percentiles(self, name: str, ticks: Iterable[Tick]) -> dict[str, float] | None:
        if name not in self._names:
            return None
        values = np.array([getattr(tick, name) for tick in ticks])
        if not values.size:
            return {"count": 0} | dict.fromkeys(PERCENTILES, 0.0)
        found = np.percentile(values, list(PERCENTILES.values())).tolist()
        return {"count": values.size} | dict(zip(PERCENTILES, found, strict=True))

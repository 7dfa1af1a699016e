"""The times and counts of an engine's steps: the latest ones, which of them took far too long and
why, and their summary. Knows no mlx."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np

CAPACITY = 8192
NUM_SPIKES = 1000

BUCKETS_MS = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
"""Upper bounds of the histograms' buckets; the last bucket has no bound."""

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}

FLOOR_MS = 50.0  # without a given threshold, a tick is a spike only above this time
FACTOR = 3.0  # without a given threshold, a spike takes more than this multiple of the usual time
NUM_RECENT = 64  # number of latest ticks that define the usual time
MIN_RECENT = 8  # ticks are not judged before so many of their kind are known
SHARE = 0.25  # a part is a cause if it has at least this share of a spike's excess
FEW_TOKENS = 8  # so few prompt tokens, e.g. those of a fork, are not a cause

PARTS = ("schedule_ms", "launch_ms", "wait_ms", "output_ms", "gc_ms", "other_ms")
"""`tick_ms` is the sum of these."""

PHASES = ("gather_ms", "kv_write_ms", "attention_ms", "forward_ms", "sample_ms")
"""Only a profiling engine measures these."""


@dataclass(slots=True, eq=False)
class Tick:
    """One call of :meth:`Engine.step` that computed something; times in milliseconds.

    With lookahead a tick ends one step and launches the next. `schedule_ms`, `launch_ms`,
    preemptions, clones, evictions and prefix hits then belong to the launched step. `wait_ms`,
    `output_ms` and the tokens belong to the step that ended.
    """

    index: int = 0  # number of ticks before this one
    start: float = 0.0  # seconds, on the engine's clock
    tick_ms: float = 0.0  # the whole tick, the sum of the six parts
    schedule_ms: float = 0.0  # scheduler, block tables and cost model
    # Building and submitting the graph. On a CPU most computing happens here.
    launch_ms: float = 0.0
    wait_ms: float = 0.0  # until the device has finished and the tokens are on the host
    output_ms: float = 0.0  # appending tokens to their requests and decoding text
    # Python's garbage collector on the engine's thread; the other parts exclude it.
    gc_ms: float = 0.0
    other_ms: float = 0.0  # the rest
    # The garbage collector on other threads. The engine's thread waits for it only where it needs
    # Python. It is not one of the six parts: they include this wait.
    gc_elsewhere_ms: float = 0.0
    # `launch_ms` and `wait_ms` of a tick whose step decodes, computes a chunk or copies blocks for
    # the first time. It includes compilation, which is not measured alone.
    prewarm_ms: float = 0.0
    prefill_tokens: int = 0  # prompt tokens computed, also those of a preempted request
    decode_tokens: int = 0  # other tokens computed
    sampled: int = 0  # tokens sampled
    launched_prefill_tokens: int = 0  # prompt tokens of the launched step
    running: int = 0  # requests that run at the end
    waiting: int = 0  # requests that wait at the end
    preemptions: int = 0  # since the tick before, as are the next three
    cow_clones: int = 0  # blocks copied on write, or copied from a cached prefix
    evictions: int = 0  # cached blocks that were reused for other content
    prefix_hit_tokens: int = 0  # tokens found in the prefix cache
    blocks_in_use: int = 0  # at the end
    blocks_cached: int = 0  # free blocks whose content can still be reused, at the end
    live_tokens: int = 0  # tokens of the computed sequences up to the end of their spans
    blocks_touched: int = 0  # blocks that attention must read, counted for each sequence
    # K/V that attention must read, over all layers and within each layer's window. A kernel may
    # read more.
    kv_bytes_read: int = 0
    shared_keys: int = 0  # keys that a sequence has in the same blocks as another one of the step
    faults: int = 0  # steps that failed
    # These are None unless profiling. They include garbage collections.
    gather_ms: float | None = None  # gathering the contexts of chunks
    kv_write_ms: float | None = None  # writing new K/V and copying blocks
    attention_ms: float | None = None  # without the gather
    forward_ms: float | None = None  # the rest of the model
    sample_ms: float | None = None  # from logits to tokens
    causes: tuple[str, ...] = ()  # of a spike, most likely first; otherwise empty

    @property
    def has_prompt_tokens(self) -> bool:
        """Whether a step with prompt tokens was launched or ended in this tick."""
        return self.prefill_tokens > 0 or self.launched_prefill_tokens > 0

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return dict(zip(NAMES, _values(self), strict=True))


NAMES = tuple(field.name for field in fields(Tick))
TIMES = tuple(name for name in NAMES if name.endswith("_ms"))

_values = attrgetter(*NAMES)
_parts = attrgetter(*PARTS)


@dataclass(frozen=True, slots=True)
class Spike:
    """A tick above the threshold. docs/metrics.md explains the causes."""

    index: int
    start: float
    tick_ms: float
    threshold_ms: float
    causes: tuple[str, ...]


class SpikeDetector:
    """Compares each tick with `threshold_ms`, or with FACTOR times the usual time, at least
    FLOOR_MS: the median of recent ticks that only decoded, because running streams expect that
    time. Ticks without decodes are compared with each other."""

    def __init__(self, threshold_ms: float | None = None) -> None:
        self.threshold_ms = threshold_ms
        self._decodes: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._prefills: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._unjudged: deque[Tick] = deque(maxlen=NUM_RECENT)

    def add(self, tick: Tick) -> Iterator[Spike]:
        """Record a tick; yield the spikes found so far and set the causes of their ticks."""
        is_mixed = tick.decode_tokens and (tick.prefill_tokens or tick.launched_prefill_tokens)
        if not tick.faults and not is_mixed:
            self._recent(tick).append(tick)
        if tick.tick_ms > (self.threshold_ms or FLOOR_MS):
            self._unjudged.append(tick)
        for _ in range(len(self._unjudged)):
            late = self._unjudged.popleft()
            if self.threshold_ms is None and len(self._recent(late)) < MIN_RECENT:
                self._unjudged.append(late)
            elif (spike := self._judge(late)) is not None:
                yield spike

    def _recent(self, tick: Tick) -> deque[Tick]:
        return self._decodes if tick.decode_tokens or tick.faults else self._prefills

    def _judge(self, tick: Tick) -> Spike | None:
        usual = [other for other in self._recent(tick) if other is not tick]
        threshold = self.threshold_ms
        if threshold is None:
            usual_ms = median(other.tick_ms for other in usual) if usual else 0.0
            threshold = max(FLOOR_MS, FACTOR * usual_ms)
        if tick.tick_ms <= threshold:
            return None
        tick.causes = causes(tick, usual)
        return Spike(tick.index, tick.start, tick.tick_ms, threshold, tick.causes)


def causes(tick: Tick, usual: Sequence[Tick]) -> tuple[str, ...]:
    """Why `tick` took longer than the `usual` ticks: the parts with the largest excess decide. A
    tick can be a spike by a fixed threshold and take hardly longer: then its whole parts decide."""
    excesses = _excesses(tick, usual)
    if _total(excesses) < SHARE * tick.tick_ms:
        usual = ()
        excesses = _excesses(tick, usual)
    total = _total(excesses)
    if tick.gc_elsewhere_ms > total / 2:
        return ("gc",)
    ranked = sorted(excesses, key=excesses.__getitem__, reverse=True)
    significant = [part for part in ranked if excesses[part] >= SHARE * total] or ranked[:1]
    named = [cause for part in significant for cause in _causes_of_part(part, tick, usual)]
    return tuple(dict.fromkeys(named))


def _excesses(tick: Tick, usual: Sequence[Tick]) -> dict[str, float]:
    """By part of a tick, how many milliseconds more than usual the part took."""
    columns = zip(*map(_parts, usual or [Tick()]), strict=True)
    rows = zip(PARTS, _parts(tick), columns, strict=True)
    return {part: value - median(values) for part, value, values in rows}


def _total(excesses: dict[str, float]) -> float:
    return sum(excess for excess in excesses.values() if excess > 0)


def _causes_of_part(part: str, tick: Tick, usual: Sequence[Tick]) -> list[str]:
    if part == "gc_ms":
        return ["gc"]
    if tick.faults:
        return ["fault"]
    copied = tick.cow_clones > _usual_count("cow_clones", usual)
    if part in ("launch_ms", "wait_ms"):
        launching = part == "launch_ms"
        computed = tick.launched_prefill_tokens if launching else tick.prefill_tokens
        found = {"prewarm": tick.prewarm_ms > 0, "prefill": computed > FEW_TOKENS, "cow": copied}
        otherwise = "launch" if launching else "device"
    elif part == "schedule_ms":
        evicted = tick.evictions > _usual_count("evictions", usual)
        found = {"preemption": tick.preemptions > 0, "eviction": evicted, "cow": copied}
        otherwise = "host"
    else:
        found, otherwise = {}, "host"
    return [cause for cause, holds in found.items() if holds] or [otherwise]


def _usual_count(name: str, usual: Sequence[Tick]) -> float:
    return median(getattr(tick, name) for tick in usual) if usual else 0


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
        """Percentiles of the held ticks' times, None if not measured; spikes. JSON values."""
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

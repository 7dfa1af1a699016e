"""Which ticks took far too long, and what is to blame. Knows no mlx."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from mlx_paged.metrics.tick import PARTS, Tick

FLOOR_MS = 50.0
"""Ticks up to here are never spikes, unless a threshold is given."""

FACTOR = 3.0
"""Spikes take more than so many times the usual."""

NUM_RECENT = 64
"""Latest ticks that say what is usual."""

MIN_RECENT = 8
"""Ticks before anything is usual; earlier ones are judged then."""

SHARE = 0.25
"""Of a spike's excess that a part must have to be named."""

FEW_TOKENS = 8
"""Up to so many prompt tokens, e.g. those of a fork, are not to blame."""

_parts = attrgetter(*PARTS)


@dataclass(frozen=True, slots=True)
class Spike:
    """A tick above the threshold; see :class:`Tick` and :data:`CAUSES`."""

    index: int
    start: float
    tick_ms: float
    threshold_ms: float
    causes: tuple[str, ...]


CAUSES = {
    "prefill": "the excess is computing, and the step had more than a few prompt tokens",
    "preemption": "the excess is scheduling, and a sequence's K/V was given up",
    "eviction": "the excess is scheduling, and more cached blocks were given away than usual",
    "cow": "more blocks were copied than usual; the excess is scheduling or computing",
    "prewarm": "the excess is computing, and the step did something for the first time",
    "gc": "Python's garbage collector",
    "fault": "a step failed and the engine recovered",
    "host": "other Python: scheduling, outputs, tokenizer, signal handlers",
    "launch": "building or handing over the graph (on a CPU: computing it), nothing else to blame",
    "device": "waiting for the device, nothing else to blame",
}
"""Why a tick is a spike."""


class SpikeDetector:
    """Compares ticks with the usual ones.

    What is usual is the median of recent ticks that decoded and did nothing else, because that is
    what running streams are used to; ticks without any stream are compared among themselves.

    Args:
        threshold_ms: fixed; None: FACTOR times the usual, at least FLOOR_MS.
    """

    def __init__(self, threshold_ms: float | None = None) -> None:
        self.threshold_ms = threshold_ms
        self._decodes: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._prefills: deque[Tick] = deque(maxlen=NUM_RECENT)
        self._unjudged: list[Tick] = []

    def add(self, tick: Tick) -> Iterator[Spike]:
        """Take note of a tick; yields the spikes that are known now, their causes in the ticks."""
        recent = self._recent(tick)
        if self._is_yardstick(tick):
            recent.append(tick)
        if tick.tick_ms > (self.threshold_ms or FLOOR_MS):
            self._unjudged.append(tick)
        if not self._unjudged:
            return
        for late in self._due():
            spike = self._judge(late)
            if spike is not None:
                yield spike

    def _recent(self, tick: Tick) -> deque[Tick]:
        return self._decodes if tick.decode_tokens or tick.faults else self._prefills

    def _is_yardstick(self, tick: Tick) -> bool:
        return not tick.faults and not (tick.decode_tokens and tick.has_prompt_tokens)

    def _due(self) -> list[Tick]:
        """Ticks that can be judged by now."""
        due = [
            tick
            for tick in self._unjudged
            if self.threshold_ms is not None or len(self._recent(tick)) >= MIN_RECENT
        ]
        self._unjudged = [tick for tick in self._unjudged if tick not in due][-NUM_RECENT:]
        return due

    def _judge(self, tick: Tick) -> Spike | None:
        usual = [other for other in self._recent(tick) if other is not tick]
        usual_ms = median(other.tick_ms for other in usual) if usual else 0.0
        threshold = self.threshold_ms
        if threshold is None:
            threshold = max(FLOOR_MS, FACTOR * usual_ms)
        if tick.tick_ms <= threshold:
            return None
        tick.causes = causes(tick, usual)
        return Spike(tick.index, tick.start, tick.tick_ms, threshold, tick.causes)


def causes(tick: Tick, usual: Sequence[Tick]) -> tuple[str, ...]:
    """Why `tick` took longer than the `usual` ones: the parts with the largest excess decide.

    One that took hardly longer, and is a spike by a fixed threshold, is explained by its parts.
    """
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
    """By part, how much longer than usual it took."""
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

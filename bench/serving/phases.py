"""Parts of a run: ramp, steady, tail; the spikes among its ticks, and why they are spikes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.serving.run import Tick
from mlx_paged.metrics.tick import SHARE, causes
from mlx_paged.metrics.tick import Tick as EngineTick

FULL = 0.9  # part of the level from which on a run counts as steady
SPIKE_MEDIANS = 5.0
MAX_THRESHOLD_S = 0.2
"""A tick is a spike if it takes so many medians or so many seconds, whichever is less."""


@dataclass(frozen=True)
class Phase:
    """Some consecutive ticks, the idle time between them included."""

    ticks: int
    seconds: float
    tokens: int

    @property
    def tokens_per_sec(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Spike:
    """A tick at or above the threshold, and what made it long, likeliest first."""

    tick: int
    start_s: float
    tick_ms: float
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Phases:
    """Ramp, steady and tail are the whole run; spikes are ticks in any of them."""

    ramp: Phase
    steady: Phase
    tail: Phase
    spikes: tuple[Spike, ...]
    threshold_s: float


def split(ticks: Sequence[Tick], target_active: int, threshold_s: float | None = None) -> Phases:
    """Steady is from the first to the last tick with at least 0.9 of the level running.

    The level is `target_active` if at least 0.9 of it ever ran, otherwise the median number of
    running sequences over time. `threshold_s` is that of spikes.
    """
    if threshold_s is None:
        threshold_s = spike_threshold(ticks)
    level = FULL * _level(ticks, target_active)
    full = [i for i, tick in enumerate(ticks) if tick.running >= level]
    start, stop = (full[0], full[-1] + 1) if full else (0, 0)
    starts_s = [tick.start_s for tick in ticks] + [ticks[-1].end_s if ticks else 0.0]

    def phase(first: int, last: int) -> Phase:
        tokens = sum(tick.tokens for tick in ticks[first:last])
        return Phase(last - first, starts_s[last] - starts_s[first], tokens)

    return Phases(
        phase(0, start),
        phase(start, stop),
        phase(stop, len(ticks)),
        find_spikes(ticks, threshold_s),
        threshold_s,
    )


def _level(ticks: Sequence[Tick], target_active: int) -> float:
    if not ticks or any(tick.running >= FULL * target_active for tick in ticks):
        return target_active
    running, ms = np.array(sorted((tick.running, tick.tick_ms) for tick in ticks)).T
    passed = np.cumsum(ms)
    return float(running[np.searchsorted(passed, passed[-1] / 2)])


def spike_threshold(ticks: Sequence[Tick]) -> float:
    """Five times the median tick, at most 0.2 s; in seconds."""
    usual_ms = float(np.median([tick.tick_ms for tick in ticks] or [np.inf]))
    return min(MAX_THRESHOLD_S, SPIKE_MEDIANS * usual_ms / 1000)


def find_spikes(ticks: Sequence[Tick], threshold_s: float) -> tuple[Spike, ...]:
    """In the order of time."""
    shares = [tick.off_cpu_ms / tick.tick_ms for tick in ticks if tick.tick_ms > 0]
    usual_off_cpu = float(np.median(shares)) if shares else 0.0
    return tuple(
        Spike(i, tick.start_s, tick.tick_ms, causes_of(tick, usual_off_cpu))
        for i, tick in enumerate(ticks)
        if tick.tick_ms >= 1000 * threshold_s
    )


def causes_of(tick: Tick, usual_off_cpu: float = 0.0) -> tuple[str, ...]:
    """Why a tick was long, likeliest first; as :mod:`mlx_paged.metrics.tick` explains its own.

    An injected stall comes first, then "gc" and "host" if they took a large part, then what the
    engine says about the tick. If the engine says nothing, what happened in the tick comes instead.

    Args:
        usual_off_cpu: median over the run's ticks of the part in which the process did not compute.
            Only the time beyond this part is "host".
    """
    host_ms = max(0.0, tick.off_cpu_ms - usual_off_cpu * tick.tick_ms)
    parts = EngineTick(
        launch_ms=tick.tick_ms - tick.stall_ms - tick.gc_ms - host_ms,
        gc_ms=tick.gc_ms,
        other_ms=host_ms,
        launched_prefill_tokens=tick.prompt_tokens,
        cow_clones=tick.cow_clones,
    )
    found = [cause for cause in causes(parts, ()) if cause != "launch"]  # that says nothing here
    events = {
        "preemption": tick.preemptions > 0,
        "join": tick.joined > 0,
        "leave": tick.left > 0,
        "growth": tick.grown_bytes > 0,
    }
    named = ["injected stall"] if tick.stall_ms >= SHARE * tick.tick_ms else []
    named += [cause for cause in found if cause in ("gc", "host")]
    named += tick.causes or [*found, *(name for name, happened in events.items() if happened)]
    return tuple(dict.fromkeys(named)) or ("unknown",)

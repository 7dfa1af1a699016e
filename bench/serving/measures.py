"""What a run comes to, in numbers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.serving.phases import Phase, Phases, split
from bench.serving.run import Run, Stream, Tick
from bench.serving.slo import Slo

SPIKES_LISTED = 20
"""The longest of them."""

Summary = dict[str, Any]
"""Plain JSON values; see docs/serving-bench.md for what each one means."""


def percentiles(values_ms: Sequence[float]) -> Summary:
    """Milliseconds; None where there is nothing."""
    if not values_ms:
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    p50, p95, p99, most = np.percentile(values_ms, (50, 95, 99, 100))
    return {name: round(float(v), 3) for name, v in zip(_NAMES, (p50, p95, p99, most), strict=True)}


_NAMES = ("p50", "p95", "p99", "max")


def ttfts_ms(streams: Sequence[Stream]) -> list[float]:
    """From the scheduled arrival to the first token, of each stream that has one."""
    return [1000 * (s.times_s[0] - s.arrival_s) for s in streams if s.times_s]


def tpots_ms(streams: Sequence[Stream]) -> list[float]:
    """Mean time between a stream's tokens, of each stream that has two."""
    return [
        1000 * (s.times_s[-1] - s.times_s[0]) / (len(s.times_s) - 1)
        for s in streams
        if len(s.times_s) > 1
    ]


def itls_ms(streams: Sequence[Stream]) -> list[float]:
    """Times between consecutive tokens, those of all streams together."""
    gaps: list[float] = []
    for stream in streams:
        gaps += (1000 * np.diff(stream.times_s)).tolist()
    return gaps


def summarize(
    run: Run, target_active: int, slo: Slo | None = None, threshold_s: float | None = None
) -> Summary:
    """Everything about one run."""
    phases = split(run.ticks, target_active, threshold_s)
    rate = run.output_tokens / run.wall_s if run.wall_s > 0 else 0.0
    return {
        "output_tokens_per_sec": round(rate, 2),
        "static_tokens_per_sec": None,
        "continuous_tokens_per_sec": round(rate, 2),
        "continuous_steady_tokens_per_sec": round(phases.steady.tokens_per_sec, 2),
        "wall_s": round(run.wall_s, 4),
        "streams": len(run.streams),
        "streams_finished": sum(stream.is_done for stream in run.streams),
        "output_tokens": run.output_tokens,
        "ttft_ms": percentiles(ttfts_ms(run.streams)),
        "tpot_ms": percentiles(tpots_ms(run.streams)),
        "itl_ms": percentiles(itls_ms(run.streams)),
        "tick_ms": percentiles([tick.tick_ms for tick in run.ticks]),
        "goodput": goodput(run, slo),
        **kv_memory(run),
        "peak_rss_mib": _mib(run.peak_rss_bytes),
        "peak_mlx_mib": _mib(run.peak_mlx_bytes),
        "counts": {"ticks": len(run.ticks), **asdict(run.counters)},
        "tokens_digest": run.tokens_digest,
        "phases": _phases(phases),
        "spikes": _spikes(phases),
    }


def goodput(run: Run, slo: Slo | None) -> Summary | None:
    """Streams, and their tokens, that kept the objectives, a second of the run; None without any.

    `attainment` is their part of all streams that were due.
    """
    if slo is None:
        return None
    good = [stream for stream in run.streams if slo.holds(stream)]
    wall_s = run.wall_s or float("inf")
    return {
        "streams_per_sec": round(len(good) / wall_s, 3),
        "tokens_per_sec": round(sum(len(s.tokens) for s in good) / wall_s, 2),
        "attainment": round(len(good) / len(run.streams), 4) if run.streams else 0.0,
    }


def kv_memory(run: Run) -> Summary:
    """K/V memory at the ends of ticks; means are over the time that ticks took."""
    weights = [tick.tick_ms for tick in run.ticks]
    if sum(weights) <= 0:
        names = ("held_peak", "held_mean", "live_peak", "live_mean")
        return {f"kv_{name}_mib": 0.0 for name in names} | _NO_WASTE
    held = np.array([tick.held_bytes for tick in run.ticks])
    live = np.array([tick.live_bytes for tick in run.ticks])
    mean_held, mean_live = np.average(held, weights=weights), np.average(live, weights=weights)
    at_peak = int(held.argmax())
    return {
        "kv_held_peak_mib": _mib(held.max()),
        "kv_held_mean_mib": _mib(mean_held),
        "kv_live_peak_mib": _mib(live.max()),
        "kv_live_mean_mib": _mib(mean_live),
        "kv_held_over_live": _ratio(mean_held, mean_live),
        "kv_held_over_live_at_peak": _ratio(held[at_peak], live[at_peak]),
        "kv_pool_mib": None if run.pool_bytes is None else _mib(run.pool_bytes),
    }


_NO_WASTE: Summary = {
    "kv_held_over_live": None,
    "kv_held_over_live_at_peak": None,
    "kv_pool_mib": None,
}


def waste_over_time(ticks: Sequence[Tick]) -> list[float]:
    """Held over live K/V bytes at the end of each tick; NaN where nothing lives."""
    return [t.held_bytes / t.live_bytes if t.live_bytes else float("nan") for t in ticks]


def _phases(phases: Phases) -> Summary:
    def plain(phase: Phase) -> Summary:
        return {
            "ticks": phase.ticks,
            "time_s": round(phase.seconds, 4),
            "tokens": phase.tokens,
            "tokens_per_sec": round(phase.tokens_per_sec, 2),
        }

    return {
        "ramp": plain(phases.ramp),
        "steady": plain(phases.steady),
        "tail": plain(phases.tail),
        "spikes": {
            "count": len(phases.spikes),
            "time_s": round(phases.spike_s, 4),
            "threshold_s": round(phases.threshold_s, 5),
        },
    }


def _spikes(phases: Phases) -> list[Summary]:
    longest = sorted(phases.spikes, key=lambda spike: -spike.tick_ms)[:SPIKES_LISTED]
    return [
        {
            "tick": spike.tick,
            "start_s": round(spike.start_s, 4),
            "tick_ms": round(spike.tick_ms, 2),
            "causes": list(spike.causes),
        }
        for spike in longest
    ]


def _mib(num_bytes: float) -> float:
    return round(float(num_bytes) / 2**20, 3)


def _ratio(held: float, live: float) -> float | None:
    return round(float(held / live), 4) if live > 0 else None

"""What a run amounts to, in numbers; and several rounds of runs in one."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median, median_low
from typing import Any

import numpy as np

from bench.flags.limits import Slo
from bench.serving.phases import Phase, Phases, split
from bench.serving.run import Run, Stream

SPIKES_LISTED = 20  # the longest spikes of a run

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "max": 100}

RATIOS = {
    "output_tokens_per_sec": "output tokens/s",
    "continuous_steady_tokens_per_sec": "in the steady phase",
    "kv_held_peak_mib": "peak K/V memory",
    "peak_mlx_mib": "peak memory of MLX",
}
"""What engines are compared by, in words."""

Summary = dict[str, Any]
"""Plain JSON values; docs/serving-bench.md says what each one means."""


def percentiles(values_ms: Sequence[float]) -> Summary:
    """Milliseconds; None without values."""
    if not values_ms:
        return dict.fromkeys(PERCENTILES)
    return {name: round(float(np.percentile(values_ms, q)), 3) for name, q in PERCENTILES.items()}


def ttfts_ms(streams: Sequence[Stream]) -> list[float]:
    """From the scheduled arrival to the first token, of each stream that has one."""
    return [1000 * (s.times_s[0] - s.arrival_s) for s in streams if s.times_s]


def tpots_ms(streams: Sequence[Stream]) -> list[float]:
    """Mean time between a stream's tokens, of each stream that has two."""
    several = [s for s in streams if min(len(s.times_s), s.num_tokens) > 1]
    return [1000 * (s.times_s[-1] - s.times_s[0]) / (s.num_tokens - 1) for s in several]


def itls_ms(streams: Sequence[Stream]) -> list[float]:
    """Times between consecutive tokens of a stream, of all streams together."""
    return [gap for stream in streams for gap in (1000 * np.diff(stream.times_s)).tolist()]


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
        "continuous_steady_tokens_per_sec": (
            round(phases.steady.tokens_per_sec, 2) if run.ticks else None
        ),
        "wall_s": round(run.wall_s, 4),
        "streams": len(run.streams),
        "streams_finished": sum(stream.is_done for stream in run.streams),
        "failures": run.failures,
        "client_cpu_s": run.client_cpu_s,
        "output_tokens": run.output_tokens,
        "ttft_ms": percentiles(ttfts_ms(run.streams)),
        "tpot_ms": percentiles(tpots_ms(run.streams)),
        "itl_ms": percentiles(itls_ms(run.streams)),
        "tick_ms": percentiles([tick.tick_ms for tick in run.ticks]),
        "goodput": goodput(run, slo),
        **kv_memory(run),
        "peak_rss_mib": _mib(run.peak_rss_bytes) if run.ticks else None,
        "peak_mlx_mib": _mib(run.peak_mlx_bytes) if run.ticks else None,
        "counts": {"ticks": len(run.ticks), **asdict(run.counters)},
        "tokens_digest": run.tokens_digest,
        "phases": _phases(phases) if run.ticks else None,
        "spikes": _spikes(phases),
    }


def goodput(run: Run, slo: Slo | None) -> Summary | None:
    """Streams, and their tokens, that kept the objectives, per second; None without objectives.

    `attainment` is their part of all streams that were due.
    """
    if slo is None:
        return None
    good = [stream for stream in run.streams if slo.holds(stream)]
    wall_s = run.wall_s or float("inf")
    return {
        "streams_per_sec": round(len(good) / wall_s, 3),
        "tokens_per_sec": round(sum(s.num_tokens for s in good) / wall_s, 2),
        "attainment": round(len(good) / len(run.streams), 4) if run.streams else 0.0,
    }


def max_rate_text(row: Summary) -> str | None:
    """What a rate search found, in requests per second: a bound if all rates, or none, held."""
    probes = row["probes"]
    if not probes:
        return None
    if row["max_rate"] is None:
        return f"< {min(probe['rate'] for probe in probes):.2f}"
    return f"{'>= ' * row['max_rate_is_bound']}{row['max_rate']:.2f}"


def kv_memory(run: Run) -> Summary:
    """K/V memory at the ends of ticks; means are weighted by the ticks' times."""
    weights = [tick.tick_ms for tick in run.ticks]
    names = ("held_peak", "held_mean", "live_peak", "live_mean")
    found: Summary = {f"kv_{name}_mib": 0.0 if run.ticks else None for name in names}
    found |= dict.fromkeys(("kv_held_over_live", "kv_held_over_live_at_peak", "kv_pool_mib"))
    if sum(weights) <= 0:
        return found
    held = np.array([tick.held_bytes for tick in run.ticks])
    live = np.array([tick.live_bytes for tick in run.ticks])
    mean_held, mean_live = np.average(held, weights=weights), np.average(live, weights=weights)
    at_peak = int(held.argmax())
    return found | {
        "kv_held_peak_mib": _mib(held.max()),
        "kv_held_mean_mib": _mib(mean_held),
        "kv_live_peak_mib": _mib(live.max()),
        "kv_live_mean_mib": _mib(mean_live),
        "kv_held_over_live": _ratio(mean_held, mean_live),
        "kv_held_over_live_at_peak": _ratio(held[at_peak], live[at_peak]),
        "kv_pool_mib": None if run.pool_bytes is None else _mib(run.pool_bytes),
    }


def _phases(phases: Phases) -> Summary:
    found: Summary = {}
    for name in ("ramp", "steady", "tail"):
        phase: Phase = getattr(phases, name)
        found[name] = {
            "ticks": phase.ticks,
            "time_s": round(phase.seconds, 4),
            "tokens": phase.tokens,
            "tokens_per_sec": round(phase.tokens_per_sec, 2),
        }
    spikes = phases.spikes
    found["spikes"] = {
        "count": len(spikes),
        "time_s": round(sum(spike.tick_ms for spike in spikes) / 1000, 4),
        "threshold_s": round(phases.threshold_s, 5),
    }
    return found


def _spikes(phases: Phases) -> list[Summary]:
    longest = sorted(phases.spikes, key=lambda spike: -spike.tick_ms)[:SPIKES_LISTED]
    return [
        asdict(spike) | {"start_s": round(spike.start_s, 4), "tick_ms": round(spike.tick_ms, 2)}
        for spike in longest
    ]


def _mib(num_bytes: float) -> float:
    return round(float(num_bytes) / 2**20, 3)


def _ratio(held: float, live: float) -> float | None:
    return round(float(held / live), 4) if live > 0 else None


def merge(rounds: Sequence[Any]) -> Any:
    """Rounds in one, key by key: the median of numbers, the lower one of counts.

    Of everything else it is the first round's value.
    """
    first = rounds[0]
    if isinstance(first, dict):
        return {key: merge([each[key] for each in rounds]) for key in first}
    if all(isinstance(each, int) for each in rounds):
        return median_low(rounds)
    if all(isinstance(each, int | float) for each in rounds):
        return median(rounds)
    return first


def ratios(by_engine: dict[str, list[Summary]]) -> dict[str, dict[str, float]]:
    """The first engine over each other one in the same round: the median of rounds."""
    first, *others = by_engine
    found: dict[str, dict[str, float]] = {}
    for other in others:
        pairs = list(zip(by_engine[first], by_engine[other], strict=False))
        found[f"{first} / {other}"] = {
            key: round(median(a[key] / b[key] for a, b in pairs), 3)
            for key in RATIOS
            if pairs and all(a[key] and b[key] for a, b in pairs)
        }
    return found

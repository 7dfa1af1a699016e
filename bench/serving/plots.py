"""Pictures of a comparison. Knows matplotlib, and imports it only when one is drawn."""

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.serving.measures import Summary, itls_ms, ttfts_ms, waste_over_time
from bench.serving.phases import Phases
from bench.serving.run import Run

Runs = Mapping[str, Run]
"""The run of each engine that is drawn."""

WIDTH_IN, DPI = 10.0, 100
COLOURS = ("#0b6e99", "#c8553d", "#7a5c99", "#5b8c3e", "#8a6d1f")
CAUSES = {
    "injected stall": "#d00000",
    "host": "#6b7280",
    "gc": "#111827",
    "prefill": "#f59e0b",
    "preemption": "#db2777",
    "cow": "#10b981",
    "eviction": "#0d9488",
    "prewarm": "#ea580c",
    "launch": "#4d7c0f",
    "device": "#0369a1",
    "join": "#3b82f6",
    "leave": "#8b5cf6",
    "growth": "#a16207",
}
OTHER_CAUSE = "#94a3b8"


def draw(runs: Runs, phases: Mapping[str, Phases], rows: Mapping[str, Summary]) -> dict[str, bytes]:
    """PNG files by name; those for which there is nothing to show are left out."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(runs)}
    pictures: dict[str, bytes | None] = {
        "blocks": _blocks(runs, colours),
        "ticks": _ticks(runs, phases, colours),
        "latency": _latency(runs, colours),
        "rates": _rates(rows, colours),
        "waste": _waste(runs, colours),
    }
    return {name: png for name, png in pictures.items() if png is not None}


def _blocks(runs: Runs, colours: Mapping[str, str]) -> bytes:
    figure, (above, below) = _figure(2, 6.4, sharex=True)
    for name, run in runs.items():
        times = [tick.end_s for tick in run.ticks]
        held = [tick.held_bytes / run.block_bytes for tick in run.ticks]
        above.step(times, held, where="post", color=colours[name], label=name)
        running = [tick.running for tick in run.ticks]
        below.step(times, running, where="post", color=colours[name], label=name)
    static = max(run.static_blocks for run in runs.values())
    above.axhline(
        static, color="#444444", linestyle="--", label=f"static reservation ({static} blocks)"
    )
    above.set(ylabel="K/V held (blocks)", title="K/V blocks in use and sequences running")
    most = max(tick.held_bytes / run.block_bytes for run in runs.values() for tick in run.ticks)
    above.set_ylim(0, 1.35 * max(static, most))  # room for the legend
    below.set(ylabel="running (sequences)", xlabel="time (s)")
    below.set_ylim(bottom=0)
    _legend(above)
    return _png(figure)


def _ticks(runs: Runs, phases: Mapping[str, Phases], colours: Mapping[str, str]) -> bytes:
    figure, axes = _figure(len(runs), 1.2 + 1.9 * len(runs), sharex=True, sharey=True)
    shown: dict[str, Any] = {}
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        times = [tick.start_s for tick in run.ticks]
        axis.plot(times, [tick.tick_ms for tick in run.ticks], ".", ms=2.5, color=colours[name])
        axis.axhline(1000 * phases[name].threshold_s, color="#999999", linestyle=":", linewidth=1)
        for spike in phases[name].spikes:
            cause = spike.causes[0]
            shown[cause] = axis.scatter(
                spike.start_s, spike.tick_ms, s=22, color=CAUSES.get(cause, OTHER_CAUSE), zorder=3
            )
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylabel("tick (ms)")
        axis.set_title(name, loc="left", fontsize=10, color=colours[name])
    axes[-1].set_xlabel("time (s); dotted: spike threshold; points: spikes by likeliest cause")
    figure.suptitle("Time of every engine step")
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=9)
    return _png(figure)


def _latency(runs: Runs, colours: Mapping[str, str]) -> bytes:
    figure, (left, right) = _figure(2, 4.2, across=True)
    for axis, what, values_of in (
        (left, "time to first token", ttfts_ms),
        (right, "inter-token latency", itls_ms),
    ):
        for name, run in runs.items():
            _cdf(axis, values_of(run.streams), colours[name], name)
        axis.set(xlabel=f"{what} (ms)", title=what)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_ylim(0, 1)
    left.set_ylabel("fraction of streams")
    right.set_ylabel("fraction of gaps")
    _legend(left)
    return _png(figure)


def _cdf(axis: Any, values: Sequence[float], colour: str, label: str) -> None:
    if values:
        ranks = np.arange(1, len(values) + 1) / len(values)
        axis.step(np.sort(values), ranks, where="post", color=colour, label=label)


def _rates(rows: Mapping[str, Summary], colours: Mapping[str, str]) -> bytes | None:
    if not any(row["probes"] for row in rows.values()):
        return None
    figure, (left, right) = _figure(2, 4.2, across=True)
    for name, row in rows.items():
        probes = sorted(row["probes"], key=lambda probe: float(probe["rate"]))
        rates = [probe["rate"] for probe in probes]
        for axis, key, style in (
            (left, "tokens_per_sec", "-"),
            (left, "good_tokens_per_sec", "--"),
            (right, "attainment", "-"),
        ):
            values = [probe[key] for probe in probes]
            label = f"{name}, within SLO" if style == "--" else name
            axis.plot(rates, values, style, marker="o", ms=4, color=colours[name], label=label)
        if row["max_rate"] is not None:
            right.axvline(row["max_rate"], color=colours[name], linestyle=":", linewidth=1)
    left.set(xlabel="request rate (1/s)", ylabel="output tokens/s", title="throughput")
    left.set_ylim(bottom=0)
    right.set(xlabel="request rate (1/s)", ylabel="fraction of streams", title="within the SLO")
    right.set_ylim(0, 1.02)
    _legend(left)
    return _png(figure)


def _waste(runs: Runs, colours: Mapping[str, str]) -> bytes:
    figure, (axis,) = _figure(1, 3.8)
    for name, run in runs.items():
        times = [tick.end_s for tick in run.ticks]
        waste = waste_over_time(run.ticks)
        axis.plot(times, waste, color=colours[name], linewidth=1.2, label=name)
    axis.axhline(1.0, color="#444444", linestyle="--", linewidth=1, label="nothing wasted")
    axis.set(xlabel="time (s)", ylabel="held / live K/V bytes", title="K/V memory waste")
    usual = [np.array(waste_over_time(run.ticks)) for run in runs.values()]
    most = [np.percentile(waste[waste > 0], 98) for waste in usual if (waste > 0).any()]
    axis.set_ylim(0, 1.3 * max(1.0, *most))  # the first token of a cache is always wasteful
    _legend(axis)
    return _png(figure)


def _figure(
    count: int, height_in: float, *, across: bool = False, **options: Any
) -> tuple[Any, Any]:
    """A figure with so many axes, below each other unless `across`."""
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    rows, columns = (1, count) if across else (count, 1)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(WIDTH_IN, height_in),
        dpi=DPI,
        layout="constrained",
        squeeze=False,
        **options,
    )
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.flat


def _legend(axis: Any) -> None:
    axis.legend(fontsize=9, framealpha=0.9)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    close: Callable[[Any], None] = importlib.import_module("matplotlib.pyplot").close
    close(figure)
    return buffer.getvalue()

"""Results as text."""

from collections.abc import Callable, Mapping
from typing import Any

from bench.serving.measures import Summary

SPIKES_SHOWN = 5
"""Of each engine, the longest."""

Column = tuple[str, Callable[[Summary], Any], str]
"""Heading, value, format."""


def _at(*keys: str) -> Callable[[Summary], Any]:
    def value(row: Summary) -> Any:
        found: Any = row
        for key in keys:
            if found is None:
                return None
            found = found[key]
        return found

    return value


def _percentiles(name: str, key: str) -> tuple[Column, ...]:
    return (
        (f"{name} p50", _at(key, "p50"), ".1f"),
        *((heading, _at(key, heading), ".1f") for heading in ("p95", "p99", "max")),
    )


TABLES: dict[str, tuple[Column, ...]] = {
    "output tokens/s": (
        ("static", _at("static_tokens_per_sec"), ".1f"),
        ("continuous", _at("continuous_tokens_per_sec"), ".1f"),
        ("steady", _at("continuous_steady_tokens_per_sec"), ".1f"),
        ("wall s", _at("wall_s"), ".2f"),
        ("good tok/s", _at("goodput", "tokens_per_sec"), ".1f"),
        ("in SLO", _at("goodput", "attainment"), ".1%"),
        ("max rate/s", _at("max_rate"), ".2f"),
    ),
    "latency in ms": (*_percentiles("TTFT", "ttft_ms"), *_percentiles("TPOT", "tpot_ms")),
    "pace in ms": (*_percentiles("ITL", "itl_ms"), *_percentiles("tick", "tick_ms")),
    "K/V in MiB": (
        ("held peak", _at("kv_held_peak_mib"), ".2f"),
        ("mean", _at("kv_held_mean_mib"), ".2f"),
        ("live peak", _at("kv_live_peak_mib"), ".2f"),
        ("mean", _at("kv_live_mean_mib"), ".2f"),
        ("held/live", _at("kv_held_over_live"), ".3f"),
        ("pool", _at("kv_pool_mib"), ".1f"),
        ("MLX peak", _at("peak_mlx_mib"), ".1f"),
        ("RSS peak", _at("peak_rss_mib"), ".0f"),
    ),
}


def cells(columns: tuple[Column, ...], row: Summary) -> list[str]:
    """One line of a table; a dash where there is nothing to say."""
    values = [(value(row), form) for _, value, form in columns]
    return ["-" if value is None else format(value, form) for value, form in values]


def text_tables(rows: Mapping[str, Summary]) -> str:
    """All tables, engines down, measures across."""
    lines = []
    for title, columns in TABLES.items():
        widths = [max(len(heading), 8) + 2 for heading, _, _ in columns]
        headings = "".join(f"{c[0]:>{width}}" for c, width in zip(columns, widths, strict=True))
        lines.append(f"{title:18}{headings}")
        for name, row in rows.items():
            values = zip(cells(columns, row), widths, strict=True)
            lines.append(f"{name:18}" + "".join(f"{value:>{width}}" for value, width in values))
        lines.append("")
    return "\n".join(lines)


def phase_lines(row: Summary) -> list[str]:
    """Ramp, steady, tail and spikes of one engine."""
    phases = row["phases"]
    lines = [
        f"[phase {name}] ticks={phases[name]['ticks']} time={phases[name]['time_s']:.2f}s"
        f" tokens={phases[name]['tokens']}"
        f" tokens_per_sec={phases[name]['tokens_per_sec']:.1f}"
        for name in ("ramp", "steady", "tail")
    ]
    spikes = phases["spikes"]
    lines.append(
        f"[phase spikes] count={spikes['count']} time={spikes['time_s']:.2f}s"
        f" threshold={spikes['threshold_s']:.4f}s"
    )
    return lines


def spike_lines(row: Summary) -> list[str]:
    """The longest ticks of one engine and their causes."""
    return [
        f"  tick {spike['tick']} at {spike['start_s']:.2f} s: {spike['tick_ms']:.1f} ms,"
        f" {' + '.join(spike['causes'])}"
        for spike in row["spikes"][:SPIKES_SHOWN]
    ]

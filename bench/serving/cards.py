"""The head of a report: what matters most, as cards."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.serving.measures import RATIOS, Summary, max_rate_text

UNITS = {"output_tokens_per_sec": "", "continuous_steady_tokens_per_sec": ""}
"""Of what engines are compared by; of all else MiB, where less is better."""


class Line(NamedTuple):
    """A large figure, and what was measured."""

    figure: str
    about: str


class Card(NamedTuple):
    title: str
    lines: list[Line]


def cards(outcome: Mapping[str, Any]) -> Iterator[Card]:
    """Ratios of the first engine over the others, then latencies and memory of every engine."""
    engines: dict[str, Summary] = outcome["engines"]
    for key, what in RATIOS.items():
        unit = UNITS.get(key, " MiB")
        lines = list(_ratios(outcome["ratios"], engines, key, unit))
        if not lines and len(engines) == 1:
            lines = [
                Line(f"{row[key]:.1f}{unit}", name)
                for name, row in engines.items()
                if row[key] is not None
            ]
        if lines:
            yield Card(what + (", less is better" if unit and len(engines) > 1 else ""), lines)
    for title, line_of in VALUES.items():
        every = [(name, line_of(row)) for name, row in engines.items()]
        if found := [Line(line.figure, f"{name}: {line.about}") for name, line in every if line]:
            yield Card(title, found)


def _ratios(
    ratios: Mapping[str, Mapping[str, float]], engines: Mapping[str, Summary], key: str, unit: str
) -> Iterator[Line]:
    for pair, values in ratios.items():
        if key in values:
            first, other = next((a, b) for a in engines for b in engines if pair == f"{a} / {b}")
            own, its = engines[first][key], engines[other][key]
            rounds = min(engines[first]["rounds"], engines[other]["rounds"])
            of = f"{first} {own:.1f}{unit}, {other} {its:.1f}{unit}"
            yield Line(f"{values[key]:.2f}x", of + f"; {rounds} round{'s' * (rounds > 1)}")


def _times(key: str, high: str) -> Callable[[Summary], Line | None]:
    """The median of a latency, and a high percentile of it."""

    def line(row: Summary) -> Line | None:
        times = row[key]
        if times["p50"] is None:
            return None
        middle = times["p50"]
        return Line(
            f"{middle:.1f} ms" if middle >= 1 else f"{middle:.2g} ms",
            f"median; {high} {times[high]:.1f} ms",
        )

    return line


def _waste(row: Summary) -> Line | None:
    held = row["kv_held_over_live"]
    return held and Line(f"{held:.2f}x", f"at peak {row['kv_held_peak_mib']:.1f} MiB held")


def _kept(row: Summary) -> Line | None:
    if (good := row["goodput"]) is None:
        return None
    rate = f"; highest rate {found}/s" if (found := max_rate_text(row)) else ""
    about = f"of {row['streams']} streams, {good['tokens_per_sec']:.1f} tokens/s{rate}"
    return Line(f"{good['attainment']:.1%}", about)


def _same(row: Summary) -> Line | None:
    same = row.get("streams_as_first")
    return None if same is None else Line(f"{same}", f"of {row['streams']} streams")


VALUES: dict[str, Callable[[Summary], Line | None]] = {
    "time to first token": _times("ttft_ms", "p99"),
    "time between two tokens": _times("itl_ms", "max"),
    "K/V memory reserved / used, mean": _waste,
    "streams within the limits": _kept,
    "streams with the first engine's tokens": _same,
}

"""Results of a session: one plain dictionary, and how it reads on a terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serving.engines import static_sibling
from bench.serving.measures import Summary, summarize
from bench.serving.rate_search import Probe
from bench.serving.rounds import merge, ratios
from bench.serving.run import Run
from bench.serving.slo import Slo
from bench.serving.table import phase_lines, spike_lines, text_tables


@dataclass
class Rates:
    """What a rate search found so far, by engine."""

    probes: dict[str, list[Probe]] = field(default_factory=dict)
    max_rate: dict[str, float | None] = field(default_factory=dict)


def rows_of(
    engines: Sequence[str],
    runs: Mapping[str, Sequence[Run]],
    target_active: int,
    slo: Slo | None,
    threshold_s: float | None,
) -> dict[str, list[Summary]]:
    """Summaries of each asked engine that ran, round by round.

    Whole rounds only, unless an engine has none.
    """

    def of(name: str) -> list[Summary]:
        all_runs = [run for run in runs.get(name, ()) if run.ticks]
        whole = [run for run in all_runs if not run.is_partial] or all_runs
        return [summarize(run, target_active, slo, threshold_s) for run in whole]

    rows = {name: found for name in engines if (found := of(name))}
    for name, summaries in rows.items():
        for summary, a, b in zip(summaries, runs[name], runs[next(iter(rows))], strict=False):
            summary["streams_as_first"] = same_streams(a, b)
        sibling = static_sibling(name)
        static = summaries if sibling is None else rows.get(sibling) or of(sibling)
        for summary, other in zip(summaries, static, strict=False):
            summary["static_tokens_per_sec"] = other["output_tokens_per_sec"]
    return rows


def same_streams(run: Run, other: Run) -> int:
    """Streams that got the same tokens in both, or as many of them as both have."""
    pairs = zip(run.streams, other.streams, strict=False)
    return sum(all(map(int.__eq__, a.tokens, b.tokens)) for a, b in pairs)


def result(
    about: Mapping[str, Any],
    rounds: dict[str, list[Summary]],
    rates: Rates,
    *,
    is_partial: bool,
) -> dict[str, Any]:
    """What the last line of the output says."""
    engines = {name: merge(each) | {"rounds": len(each)} for name, each in rounds.items()}
    for name, row in engines.items():
        row["max_rate"] = rates.max_rate.get(name)
        row["probes"] = [vars(probe) for probe in rates.probes.get(name, [])]
    return {
        "bench": "serving",
        **about,
        "partial": is_partial,
        "engines": engines,
        "ratios": ratios(rounds) if len(rounds) > 1 else {},
    }


def print_results(outcome: Mapping[str, Any]) -> None:
    """Tables, phases, spikes, ratios, and the JSON line."""
    engines: dict[str, Summary] = outcome["engines"]
    if outcome["partial"]:
        print("partial: interrupted, this is what was measured so far\n")
    print(text_tables(engines))
    for name, row in engines.items():
        print(name)
        print("\n".join([*phase_lines(row), *spike_lines(row)]))
    for name, row in list(engines.items())[1:]:
        print(f"{name}: {row['streams_as_first']} of {row['streams']} streams got the same tokens")
    for pair, values in outcome["ratios"].items():
        text = ", ".join(f"{key} {value:.2f}x" for key, value in values.items())
        print(f"{pair}: {text} (medians of rounds)")
    print(json.dumps(outcome))

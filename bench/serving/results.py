"""Results of a session: one plain dictionary, and the same as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any

from bench.command import print_result, table, text_of
from bench.serving.engines import is_on_mlx, is_url, static_sibling
from bench.serving.measures import (
    PERCENTILES,
    RATIOS,
    Summary,
    max_rate_text,
    merge,
    ratios,
    summarize,
)
from bench.serving.run import Run
from bench.serving.session import Session

LATENCIES = ("ttft_ms", "tpot_ms")
"""Of which each round's median is kept."""

SPIKES_SHOWN = 5  # of each engine, the longest

Column = tuple[str, Callable[[Summary], Any], str]
"""Heading, value, format."""


def _at(key: str, *within: str) -> Callable[[Summary], Any]:
    """Looks up a value of a row, or a value within it; None if there is none."""
    if not within:
        return lambda row: row[key]
    return lambda row: None if row[key] is None else row[key][within[0]]


def _percentiles(name: str, key: str) -> list[Column]:
    return [(f"{name} {p}", _at(key, p), ".1f") for p in PERCENTILES]


TABLES: dict[str, Sequence[Column]] = {
    "output tokens/s": (
        ("static", _at("static_tokens_per_sec"), ".1f"),
        ("continuous", _at("continuous_tokens_per_sec"), ".1f"),
        ("steady", _at("continuous_steady_tokens_per_sec"), ".1f"),
        ("wall s", _at("wall_s"), ".2f"),
        ("good tok/s", _at("goodput", "tokens_per_sec"), ".1f"),
        ("in SLO", _at("goodput", "attainment"), ".1%"),
        ("max rate/s", max_rate_text, ""),
    ),
    "latency in ms": (*_percentiles("TTFT", "ttft_ms"), *_percentiles("TPOT", "tpot_ms")),
    "pace in ms": (*_percentiles("ITL", "itl_ms"), *_percentiles("tick", "tick_ms")),
    "K/V in MiB": (
        ("held peak", _at("kv_held_peak_mib"), ".2f"),
        ("held mean", _at("kv_held_mean_mib"), ".2f"),
        ("live peak", _at("kv_live_peak_mib"), ".2f"),
        ("live mean", _at("kv_live_mean_mib"), ".2f"),
        ("held/live", _at("kv_held_over_live"), ".3f"),
        ("pool", _at("kv_pool_mib"), ".1f"),
        ("MLX peak", _at("peak_mlx_mib"), ".1f"),
        ("RSS peak", _at("peak_rss_mib"), ".0f"),
    ),
}


def tables_of(rows: Mapping[str, Summary]) -> Iterator[list[list[str]]]:
    """Tables, their heads first: engines down, measures across; no column is empty."""
    for title, every in TABLES.items():
        columns = [c for c in every if any(c[1](row) is not None for row in rows.values())]
        if columns:
            lines = [[title, *(heading for heading, _, _ in columns)]]
            for name, row in rows.items():
                lines.append([name, *(text_of(value(row), form) for _, value, form in columns)])
            yield lines


def headlines(outcome: Mapping[str, Any]) -> Iterator[str]:
    """The first engine over each other one, then the figures of each that matter most."""
    engines: dict[str, Summary] = outcome["engines"]
    for pair, values in outcome["ratios"].items():
        text = ", ".join(f"{value:.2f}x {RATIOS[key]}" for key, value in values.items())
        yield f"{pair}: {text} (medians of rounds)"
    for name, row in engines.items():
        text = f"{name}: {row['output_tokens_per_sec']:.1f} output tokens/s; p50 / p99 in ms:"
        for what, key in (("first token", "ttft_ms"), ("between tokens", "itl_ms")):
            if (found := row[key])["p50"] is not None:
                text += f" {what} {found['p50']:.1f} / {found['p99']:.1f};"
        if (waste := row["kv_held_over_live"]) is not None:
            text += f" K/V reserved / used {waste:.2f};"
        if name != next(iter(engines)) and (same := row["streams_as_first"]) is not None:
            text += f" {same} of {row['streams']} streams got the same tokens"
        yield text.rstrip(";")
    yield from failures(outcome)
    yield from of_clients(outcome)


def failures(outcome: Mapping[str, Any]) -> Iterator[str]:
    """Engines of which streams failed."""
    for name, row in outcome["engines"].items():
        if failed := row["failures"]:
            of = f"{len(failed)} of {row['rounds'] * row['streams']} streams failed"
            yield f"{name}: {of}; the first: {failed[0]}"


def of_clients(outcome: Mapping[str, Any]) -> Iterator[str]:
    """What the bench itself did beside a server."""
    for name, row in outcome["engines"].items():
        if row["client_cpu_s"] is not None:
            asked = outcome["work"]["output_tokens"]
            yield (
                f"{name}: {row['output_tokens']} of {asked} tokens came; the bench itself computed"
                f" for {row['client_cpu_s']:.2f} of {row['wall_s']:.2f} s"
            )


def phase_lines(row: Summary) -> list[str]:
    """Of one engine: ramp, steady, tail, the longest spikes, and the runs of the rate search."""
    rates = [
        "[rate {rate:.3f}] attainment={attainment:.3f} tokens_per_sec={tokens_per_sec:.1f}"
        " good={good_tokens_per_sec:.1f}".format(**probe)
        for probe in row.get("probes", ())
    ]
    if (phases := row["phases"]) is None:
        return rates
    spikes = phases["spikes"]
    return [
        *(
            f"[phase {name}] ticks={phases[name]['ticks']} time={phases[name]['time_s']:.2f}s"
            f" tokens={phases[name]['tokens']} tokens_per_sec={phases[name]['tokens_per_sec']:.1f}"
            for name in ("ramp", "steady", "tail")
        ),
        f"[phase spikes] count={spikes['count']} time={spikes['time_s']:.2f}s"
        f" threshold={spikes['threshold_s']:.4f}s",
        *(
            f"  tick {spike['tick']} at {spike['start_s']:.2f} s: {spike['tick_ms']:.1f} ms,"
            f" {' + '.join(spike['causes'])}"
            for spike in row["spikes"][:SPIKES_SHOWN]
        ),
        *rates,
    ]


def rows_of(session: Session) -> dict[str, list[Summary]]:
    """Summaries of each engine that was asked for and ran, round by round.

    An interrupted run counts only if its engine has no other.
    """
    args = session.args

    def of(name: str) -> list[Summary]:
        runs = [run for run in session.runs.get(name, ()) if run.ticks or run.streams]
        whole = [run for run in runs if not run.is_partial] or runs
        return [summarize(run, args.target_active, args.slo, args.spike_threshold) for run in whole]

    rows = {name: found for name in args.engines if (found := of(name))}
    for name, summaries in rows.items():
        first = session.runs[next(iter(rows))]
        for summary, a, b in zip(summaries, session.runs[name], first, strict=False):
            is_same_kind = is_url(a.engine) == is_url(b.engine)  # text over HTTP, ids elsewhere
            if not is_on_mlx(name):
                summary["peak_mlx_mib"] = None
            summary["streams_as_first"] = same_streams(a, b) if is_same_kind else None
        sibling = static_sibling(name)
        static = summaries if sibling is None else rows.get(sibling) or of(sibling)
        static = [] if is_url(name) else static
        for summary, other in zip(summaries, static, strict=False):
            summary["static_tokens_per_sec"] = other["output_tokens_per_sec"]
    return rows


def same_streams(run: Run, other: Run) -> int:
    """Streams that got the same tokens in both, as far as both have tokens."""
    pairs = zip(run.streams, other.streams, strict=False)
    return sum(all(map(eq, a.tokens, b.tokens)) for a, b in pairs)


def outcome_of(session: Session, about: Mapping[str, Any], *, is_partial: bool) -> dict[str, Any]:
    """The content of the last line of the output."""
    rounds = rows_of(session)
    engines = {name: merge(each) | {"rounds": len(each)} for name, each in rounds.items()}
    for name, row in engines.items():
        row["failures"] = [reason for each in rounds[name] for reason in each["failures"]]
        row["each_round"] = {key: [each[key] for each in rounds[name]] for key in RATIOS}
        medians = {key: [each[key]["p50"] for each in rounds[name]] for key in LATENCIES}
        row["each_round"] |= medians
        row["max_rate"] = session.max_rate.get(name)
        row["probes"] = probes = session.probes.get(name, [])
        row["max_rate_is_bound"] = row["max_rate"] is not None and all(
            probe["attainment"] >= session.args.attainment for probe in probes
        )
    return {
        "bench": "serving",
        **about,
        "partial": is_partial,
        "engines": engines,
        "ratios": ratios(rounds) if len(rounds) > 1 else {},
    }


def print_outcome(outcome: dict[str, Any]) -> None:
    """Tables, phases, spikes, headlines, and the JSON line."""
    engines: dict[str, Summary] = outcome["engines"]
    if outcome["partial"]:
        print("partial: interrupted, this is what was measured so far\n")
    for cells in tables_of(engines):
        print(table(cells) + "\n")
    for name, row in engines.items():
        if lines := phase_lines(row):
            print(name, *lines, sep="\n")
    print("", *headlines(outcome), sep="\n")
    print_result("serving", outcome)

"""Which charts a report has: streams, K/V memory, steps, latency; each shows all engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

import numpy as np

from bench.serving.charts import Axis, Chart, Points, axis, dots, level, spot, steps
from bench.serving.measures import itls_ms, ttfts_ms
from bench.serving.phases import Phases
from bench.serving.run import Run, Stream

COLOURS = 8  # in style.css, of engines and of causes
BINS = 40  # of a run, for its tokens a second

Kinds = Mapping[str, str]
"""CSS classes of engines, or of causes."""

ByEngine = Mapping[str, Points]


@dataclass(frozen=True)
class Section:
    """Some charts with one legend; `about` says what all of them show."""

    title: str
    about: str
    charts: list[Chart]
    legend: Kinds


def sections(runs: Mapping[str, Run], phases: Mapping[str, Phases]) -> Iterator[Section]:
    """A run of each engine, and the phases of those that have steps."""
    kinds = {name: f"e{i % COLOURS}" for i, name in enumerate(runs)}
    inside = {name: runs[name] for name in phases}
    about = (
        "A stream is under way from when it is due to its last token. The other two charts show the"
        " part of all streams, or of all gaps between tokens, that took no longer."
    )
    charts = [
        _throughput(runs, kinds),
        _under_way(runs, kinds),
        _ranks("time to first token", "streams", ttfts_ms, runs, kinds),
        _ranks("time between two tokens", "gaps", itls_ms, runs, kinds),
    ]
    yield Section("Streams", about, charts, kinds)
    if inside:
        about = (
            "K/V memory at the end of each step, in blocks (of engines without blocks: their bytes"
            " in units of a block). Dotted: the contexts of the running sequences. Dashed: a"
            " reservation of the longest sequence for every place."
        )
        within = {name: kinds[name] for name in inside}
        yield Section("K/V memory", about, [*_memory(inside, kinds)], within)
        found = {c: f"c{i % COLOURS}" for i, c in enumerate(dict.fromkeys(_causes(phases)))}
        about = (
            "The axes are the same for all engines. From the dashed line on, a step is a spike. A"
            " large point is a spike; its colour is its likeliest cause."
        )
        charts = [*_ticks(inside, phases, kinds, found)]
        yield Section("Time of every step", about, charts, within | found)


def _causes(phases: Mapping[str, Phases]) -> Iterator[str]:
    return (spike.causes[0] for each in phases.values() for spike in each.spikes)


def _values(points: Points) -> list[float]:
    return [value for _, value in points]


def _each(texts: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in texts.items()) + "."


def _time_axis(points: ByEngine) -> Axis:
    """All runs from their start to their end."""
    return axis("s", [[time for time, _ in each] for each in points.values()])


def _over_time(what: str, unit: str, points: ByEngine, kinds: Kinds) -> Chart:
    x, y = _time_axis(points), axis(unit, [_values(each) for each in points.values()])
    marks = [steps(x, y, each, kinds[name]) for name, each in points.items()]
    ends = {
        n: f"at most {max(_values(p)):.0f}, ends at {p[-1][0]:.2f} s" for n, p in points.items()
    }
    return Chart(what, f"{what} over time: {_each(ends)}", x, y, marks)


def _throughput(runs: Mapping[str, Run], kinds: Kinds) -> Chart:
    points: dict[str, Points] = {}
    for name, run in runs.items():
        times = [time for stream in run.streams for time in stream.times_s]
        counts, edges = np.histogram(times, BINS, (0, max(times)))
        rates = (counts / np.diff(edges)).tolist()
        points[name] = [*zip(edges[1:].tolist(), rates, strict=True)]
    return _over_time("output tokens a second", "tokens/s", points, kinds)


def _under_way(runs: Mapping[str, Run], kinds: Kinds) -> Chart:
    points: dict[str, Points] = {}
    for name, run in runs.items():
        ended = [stream for stream in run.streams if stream.times_s]
        changes = [(stream.arrival_s, 1) for stream in ended]
        changes = sorted([*changes, *((stream.times_s[-1], -1) for stream in ended)])
        levels = accumulate(float(change) for _, change in changes)
        points[name] = [*zip((time for time, _ in changes), levels, strict=True)]
    return _over_time("streams under way", "streams", points, kinds)


def _memory(runs: Mapping[str, Run], kinds: Kinds) -> Iterator[Chart]:
    held: dict[str, Points] = {}
    live: dict[str, Points] = {}
    for name, run in runs.items():
        held[name] = [(tick.end_s, tick.held_bytes / run.block_bytes) for tick in run.ticks]
        live[name] = [(tick.end_s, tick.live_bytes / run.block_bytes) for tick in run.ticks]
    static = max(run.static_blocks for run in runs.values())
    chart = _over_time("K/V held", "blocks", held, kinds)
    y = axis("blocks", [*map(_values, [*held.values(), *live.values()]), [static]])
    marks = [level(y, static, "static")]
    marks += [steps(chart.x, y, live[name], f"live {kinds[name]}") for name in runs]
    marks += [steps(chart.x, y, held[name], kinds[name]) for name in runs]
    alt = f"{chart.alt} A static reservation would be {static} blocks."
    yield replace(chart, alt=alt, y=y, marks=marks)
    running = {name: [(t.end_s, float(t.running)) for t in run.ticks] for name, run in runs.items()}
    yield _over_time("running sequences", "sequences", running, kinds)


def _ticks(
    runs: Mapping[str, Run], phases: Mapping[str, Phases], kinds: Kinds, causes: Kinds
) -> Iterator[Chart]:
    points = {
        name: [(tick.end_s, tick.tick_ms) for tick in run.ticks] for name, run in runs.items()
    }
    x, y = _time_axis(points), axis("ms", [*map(_values, points.values())], is_log=True)
    for name, of_engine in points.items():
        ms, spikes = _values(of_engine), phases[name].spikes
        marks = [dots(x, y, of_engine, kinds[name])]
        if (threshold_ms := 1000 * phases[name].threshold_s) < y.most:
            marks.append(level(y, threshold_ms, "static"))
        for spike in spikes:
            place = (spike.start_s + spike.tick_ms / 1000, spike.tick_ms)
            title = f"{spike.tick_ms:.1f} ms: {' + '.join(spike.causes)}"
            marks.append(spot(x, y, place, causes[spike.causes[0]], title))
        alt = (
            f"Time of {len(ms)} steps of {name}: median {median(ms):.1f} ms, longest"
            f" {max(ms):.1f} ms, {len(spikes)} spikes."
        )
        yield Chart(name, alt, x, y, marks)


def _ranks(
    what: str,
    of_what: str,
    values_of: Callable[[Sequence[Stream]], list[float]],
    runs: Mapping[str, Run],
    kinds: Kinds,
) -> Chart:
    values = {name: sorted(values_of(run.streams)) for name, run in runs.items()}
    values = {name: each for name, each in values.items() if each}
    x, y = axis("ms", [*values.values()], is_log=True), axis("part", [[1.0]])
    marks, ends = [], {}
    for name, each in values.items():
        ranks = [(i + 1) / len(each) for i in range(len(each))]
        marks.append(steps(x, y, [(each[0], 0.0), *zip(each, ranks, strict=True)], kinds[name]))
        ends[name] = f"half within {median(each):.1f} ms, all within {each[-1]:.1f} ms"
    return Chart(what, f"Part of the {of_what} by {what}: {_each(ends)}", x, y, marks)

"""One HTML page with headlines, tables, pictures, phases and spikes; it needs no other file.

Matplotlib is imported only when a picture is drawn.
"""

import base64
import importlib
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.measures import Summary, itls_ms, ttfts_ms
from bench.serving.phases import Phases, split
from bench.serving.results import headlines, phase_lines, tables_of
from bench.serving.run import Run
from mlx_paged.arguments import missing

Runs = Mapping[str, Run]
"""The run of each engine that is drawn."""

WIDTH_IN, DPI = 10.0, 100
LABELLED = (2, 5)  # between powers of ten
MOST_DECADES = 3  # of an axis with such labels
LINEAR = 8  # times as long as the first engine's may a run be on a linear axis of time
SHORTEST = 1e-5  # of the longest time on an axis; shorter gaps are between tokens of one step
COLOURS = ("#0b6e99", "#c8553d", "#7a5c99", "#5b8c3e", "#8a6d1f")
CAPTIONS = {
    "blocks": "K/V memory held at the end of each step, in blocks (of engines without blocks: their"
    " bytes in units of a block), and live K/V (dotted: the contexts of the running sequences)."
    " Dashed: a reservation of the longest sequence for every place. Below: running sequences."
    " The axis of time is logarithmic if an engine takes much longer than another.",
    "ticks": "Time of every step, on the same axes for all engines. A large point is a spike; its"
    " colour is its likeliest cause.",
    "latency": "Part of the streams that had their first token after so long, counted from the"
    " scheduled arrival; part of the gaps between tokens that were so long.",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
.scroll { overflow-x: auto } th, td { white-space: nowrap }
figure { margin: 2em 0 } figcaption { color: #555 } h1, li { overflow-wrap: anywhere }
img { width: 100%; min-width: 640px; height: auto }
.headlines { font-size: 1.1em; padding-left: 1.2em } .headlines li { margin: .4em 0 }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px }
.partial { background: #fff3cd; padding: .5em 1em }
"""


def check_report(directory: Path) -> None:
    """Before anything is measured: ValueError without matplotlib, OSError without a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--report: {missing('matplotlib', 'bench')}")


def write_report(
    directory: Path, outcome: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]
) -> None:
    """Write index.html, its pictures as files of their own, and result.json.

    Pictures show the first round of each engine.
    """
    first = {name: next(r for r in runs[name] if r.output_tokens) for name in outcome["engines"]}
    phases = {
        name: split(run.ticks, outcome["target_active"], outcome["spike_threshold"])
        for name, run in first.items()
        if run.ticks
    }
    pictures = draw(first, phases) if first else {}
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    (directory / "index.html").write_text(_page(outcome, pictures), encoding="utf-8")
    (directory / "result.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def _page(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    rows: dict[str, Summary] = outcome["engines"]
    body = [f"<h1>Serving: {escape(', '.join(rows) or 'nothing measured')}</h1>"]
    if outcome["partial"]:
        body.append('<p class="partial">Interrupted: this is what was measured so far.</p>')
    lines = "".join(f"<li>{escape(line)}</li>" for line in headlines(outcome))
    body += [f'<ul class="headlines">{lines}</ul>', _about(outcome)]
    body += [_table(cells) for cells in tables_of(rows)]
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        body.append(
            '<figure><div class="scroll">'
            f'<img alt="{name}" src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
        )
    if parts := {name: "\n".join(phase_lines(row)) for name, row in rows.items()}:
        body.append("<h2>Phases and spikes</h2>")
        body += [f"<h3>{escape(n)}</h3><pre>{escape(p)}</pre>" for n, p in parts.items() if p]
    options = {key: value for key, value in outcome.items() if key not in ("engines", "ratios")}
    text = json.dumps(options, indent=1)
    body.append(f"<h2>Options and machine</h2><pre>{escape(text)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Serving bench</title><style>{STYLE}</style></head><body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _about(outcome: Mapping[str, Any]) -> str:
    work = outcome["work"]
    source = outcome["trace"] or outcome["preset"]
    return (
        f"<p>{escape(str(source))}: {work['requests']} requests, {work['prompt_tokens']} prompt and"
        f" {work['output_tokens']} output tokens, {outcome['loop']} loop, model"
        f" {escape(str(outcome['model']))}, seed {outcome['seed']}. Trace {work['digest']}.</p>"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for i, cells in enumerate(rows):
        tag = "td" if i else "th"
        text = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
        lines.append(f"<tr>{text}</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def draw(runs: Runs, phases: Mapping[str, Phases]) -> dict[str, bytes]:
    """PNG files by name."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(runs)}
    inside = {name: runs[name] for name in phases}
    pictures = {}
    if inside:
        pictures = {"blocks": _blocks(inside, colours), "ticks": _ticks(inside, phases, colours)}
    return pictures | {"latency": _latency(runs, colours)}


def _blocks(runs: Runs, colours: Mapping[str, str]) -> bytes:
    figure, (above, below) = _figure(2, 6.4, sharex=True)
    for name, run in runs.items():
        times, colour = [tick.end_s for tick in run.ticks], colours[name]
        held = [tick.held_bytes / run.block_bytes for tick in run.ticks]
        live = [tick.live_bytes / run.block_bytes for tick in run.ticks]
        above.step(times, held, where="post", color=colour, label=name)
        above.step(times, live, where="post", color=colour, linestyle=":")
        running = [tick.running for tick in run.ticks]
        below.step(times, running, where="post", color=colour)
    static = max(run.static_blocks for run in runs.values())
    label = f"static reservation ({static} blocks)"
    above.axhline(static, color="#444444", linestyle="--", label=label)
    above.set(ylabel="K/V held (blocks)", title="K/V blocks in use and sequences running")
    most = max(tick.held_bytes / run.block_bytes for run in runs.values() for tick in run.ticks)
    above.set_ylim(0, 1.35 * max(static, most))  # room for the legend
    above.legend(fontsize=9)
    below.set(ylabel="running (sequences)", xlabel="time (s)")
    below.set_ylim(bottom=0)
    _time_axis(below, runs)
    return _png(figure)


def _ticks(runs: Runs, phases: Mapping[str, Phases], colours: Mapping[str, str]) -> bytes:
    figure, axes = _figure(len(runs), 1.2 + 2.1 * len(runs), sharex=True, sharey=True)
    palette = importlib.import_module("matplotlib").colormaps["tab20"].colors
    shown: dict[str, Any] = {}
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        times = [tick.end_s for tick in run.ticks]
        axis.plot(times, [tick.tick_ms for tick in run.ticks], ".", ms=2.5, color=colours[name])
        axis.axhline(1000 * phases[name].threshold_s, color="#999999", linestyle=":", linewidth=1)
        for spike in phases[name].spikes:
            cause = spike.causes[0]
            shown.setdefault(cause, palette[len(shown) % len(palette)])
            end_s = spike.start_s + spike.tick_ms / 1000
            axis.plot(end_s, spike.tick_ms, "o", ms=5, color=shown[cause])
        axis.set_ylabel("tick (ms)")
        axis.set_title(name, loc="left", fontsize=10, color=colours[name])
    for cause, colour in shown.items():
        axes[0].plot([], [], "o", ms=5, color=colour, label=cause)
    _log_axis(axes[0].yaxis, [tick.tick_ms for run in runs.values() for tick in run.ticks])
    _time_axis(axes[-1], runs)
    axes[-1].set_xlabel(
        "end of the step (s); dotted: spike threshold; points: spikes by likeliest cause"
    )
    figure.suptitle("Time of every engine step")
    if shown:
        figure.legend(loc="outside right upper", fontsize=9)
    return _png(figure)


def _latency(runs: Runs, colours: Mapping[str, str]) -> bytes:
    figure, axes = _figure(2, 4.2, across=True)
    kinds = (("time to first token", ttfts_ms, "streams"), ("inter-token latency", itls_ms, "gaps"))
    for axis, (what, values_of, of_what) in zip(axes, kinds, strict=True):
        for name, run in runs.items():
            values = np.sort(values_of(run.streams))
            ranks = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, ranks, where="post", color=colours[name], label=name)
        axis.set(xlabel=f"{what} (ms)", title=what, ylabel=f"fraction of {of_what}")
        _log_axis(axis.xaxis, [value for run in runs.values() for value in values_of(run.streams)])
        axis.set_ylim(0, 1)
    axes[0].legend(fontsize=9)
    return _png(figure)


def _time_axis(axis: Any, runs: Runs) -> None:
    """Show all runs from their start to their end."""
    starts = [run.ticks[0].end_s for run in runs.values()]
    ends = [run.ticks[-1].end_s for run in runs.values()]
    if max(ends) > LINEAR * min(ends):
        _log_axis(axis.xaxis, [*starts, *ends])
    else:
        axis.set_xlim(0, 1.03 * max(ends))


def _log_axis(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis for all values but those that are next to nothing."""
    most = max(values, default=1.0)
    least = min((value for value in values if value >= SHORTEST * most), default=most)
    options = {"subs": LABELLED} if most < 10**MOST_DECADES * least else {}
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log", **options)
    getattr(axis.axes, f"set_{axis.axis_name}lim")(least / 1.5, 1.5 * most)
    axis.set_major_formatter("{x:g}")
    if options:
        axis.set_minor_formatter("{x:g}")


def _figure(count: int, height: float, *, across: bool = False, **options: Any) -> tuple[Any, Any]:
    """A figure with `count` axes, one below the other unless `across`."""
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    rows, columns = (1, count) if across else (count, 1)
    options |= {"figsize": (WIDTH_IN, height), "dpi": DPI, "layout": "constrained"}
    figure, axes = plt.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes.flat


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    importlib.import_module("matplotlib.pyplot").close(figure)
    return buffer.getvalue()

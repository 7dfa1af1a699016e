"""One HTML page with tables, phases, spikes and pictures; it needs no other file."""

import base64
import importlib.util
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.serving.measures import Summary
from bench.serving.phases import split
from bench.serving.plots import draw
from bench.serving.run import Run
from bench.serving.table import TABLES, cells, phase_lines, spike_lines

CAPTIONS = {
    "blocks": "K/V memory held at the end of each step, in blocks (engines without blocks: their"
    " bytes in units of a block), against a reservation of the longest sequence for every place;"
    " below, the sequences that run.",
    "ticks": "Time of every step of every engine. A point is a spike, coloured by its likeliest"
    " cause.",
    "latency": "How many streams had their first token after so long, counted from the scheduled"
    " arrival, and how many gaps between tokens were so long.",
    "rates": "Output tokens per second and streams within the objectives at each rate that the"
    " search tried; dotted: the highest that held.",
    "waste": "K/V bytes held over the bytes of the running sequences' contexts. Below 1, sequences"
    " share what they have in common.",
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
figure { margin: 2em 0 } img { max-width: 100%; height: auto } figcaption { color: #555 }
pre { background: #f6f6f6; padding: .8em; overflow-x: auto; font-size: 13px }
.partial { background: #fff3cd; padding: .5em 1em }
"""


def check_report(directory: Path) -> None:
    """Fail before anything is measured, not after.

    Raises:
        ValueError: matplotlib is missing.
        OSError: there can be no such directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--report: expected matplotlib: pip install 'mlx-paged[bench]'")


def write_report(
    directory: Path, outcome: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]
) -> None:
    """Write index.html, its pictures as files of their own, and result.json.

    Pictures show the first round of each engine.
    """
    rows: dict[str, Summary] = outcome["engines"]
    first = {name: next(run for run in runs[name] if run.ticks) for name in rows}
    phases = {
        name: split(run.ticks, outcome["target_active"], outcome["spike_threshold"])
        for name, run in first.items()
    }
    pictures = draw(first, phases, rows) if first else {}
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    (directory / "index.html").write_text(_page(outcome, pictures), encoding="utf-8")
    (directory / "result.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def _page(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    rows: dict[str, Summary] = outcome["engines"]
    body = [f"<h1>Serving: {escape(', '.join(rows) or 'nothing measured')}</h1>", _about(outcome)]
    if outcome["partial"]:
        body.append('<p class="partial">Interrupted: this is what was measured so far.</p>')
    body += [_table(title, rows) for title in TABLES]
    body += [_figure(name, png) for name, png in pictures.items()]
    if "rates" not in pictures:
        body.append("<p>Throughput against rate: add <code>--slo ... --max-rate</code>.</p>")
    body.append("<h2>Phases and spikes</h2>")
    for name, row in rows.items():
        lines = "\n".join([*phase_lines(row), *spike_lines(row)])
        body.append(f"<h3>{escape(name)}</h3><pre>{escape(lines)}</pre>")
    options = json.dumps(_options(outcome), indent=1)
    body.append(f"<h2>Options and machine</h2><pre>{escape(options)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
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


def _table(title: str, rows: Mapping[str, Summary]) -> str:
    columns = TABLES[title]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in (title, *(c[0] for c in columns)))
    lines = [
        "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in (name, *cells(columns, row))) + "</tr>"
        for name, row in rows.items()
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _figure(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    caption = escape(CAPTIONS[name])
    return (
        f'<figure><img alt="{name}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _options(outcome: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in outcome.items() if key not in ("engines", "ratios")}

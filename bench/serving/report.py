"""One HTML page with cards, charts, tables, phases and spikes; it needs no other file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bench.serving.cards import cards
from bench.serving.charts import Chart
from bench.serving.curves import Section, sections
from bench.serving.measures import Summary
from bench.serving.phases import split
from bench.serving.results import failures, of_clients, phase_lines, tables_of
from bench.serving.run import Run

STYLE = Path(__file__).with_name("style.css")


def write_report(
    directory: Path, outcome: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]
) -> None:
    """Write index.html and result.json. Charts show the first round of each engine."""
    spoke = {name: [run for run in runs[name] if run.output_tokens] for name in outcome["engines"]}
    first = {name: found[0] for name, found in spoke.items() if found}
    phases = {
        name: split(run.ticks, outcome["target_active"], outcome["spike_threshold"])
        for name, run in first.items()
        if run.ticks
    }
    drawn = sections(first, phases) if first else ()
    page = "\n".join(["<!doctype html>", '<html lang="en">', *_head(), *_body(outcome, drawn)])
    (directory / "index.html").write_text(page + "\n</html>\n", encoding="utf-8")
    (directory / "result.json").write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")


def _head() -> Iterator[str]:
    yield '<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Serving bench</title><style>{STYLE.read_text(encoding='utf-8')}</style>"


def _body(outcome: Mapping[str, Any], drawn: Iterator[Section] | tuple[()]) -> Iterator[str]:
    rows: dict[str, Summary] = outcome["engines"]
    yield f"<h1>Serving: {escape(', '.join(rows) or 'nothing measured')}</h1>"
    yield _about(outcome)
    if outcome["partial"]:
        yield '<p class="warning">Interrupted: this is what was measured so far.</p>'
    for line in (*outcome.get("warnings", ()), *failures(outcome)):
        yield f'<p class="warning">{escape(line)}</p>'
    yield f'<div class="cards">{"".join(_cards(outcome))}</div>'
    for section in drawn:
        names = section.legend.items()
        legend = "".join(f'<span class="{kind}">{escape(name)}</span>' for name, kind in names)
        yield f'<h2>{section.title}</h2><p class="legend">{legend}</p>'
        yield f'<div class="charts">{"".join(map(_figure, section.charts))}</div>'
        yield f"<p>{section.about}</p>"
    yield "<h2>All figures</h2>"
    yield from (f"<p>{escape(line)}.</p>" for line in of_clients(outcome))
    yield from map(_table, tables_of(rows))
    texts = {name: "\n".join(phase_lines(row)) for name, row in rows.items()}
    if any(texts.values()):
        yield "<h2>Phases and spikes</h2>"
        yield from (f"<h3>{escape(n)}</h3><pre>{escape(t)}</pre>" for n, t in texts.items() if t)
    options = {key: value for key, value in outcome.items() if key not in ("engines", "ratios")}
    text = escape(json.dumps(options, indent=1))
    yield f"<details><summary>Options and machine</summary><pre>{text}</pre></details>"


def _about(outcome: Mapping[str, Any]) -> str:
    work = outcome["work"]
    source, model = outcome["trace"] or outcome["preset"], outcome["model"] or "of the server"
    return (
        f"<p>{escape(str(source))}: {work['requests']} requests, {work['prompt_tokens']} prompt and"
        f" {work['output_tokens']} output tokens, {outcome['loop']} loop, model {escape(model)},"
        f" seed {outcome['seed']}. Trace {work['digest']}. An axis is logarithmic where engines lie"
        " far apart on it.</p>"
    )


def _cards(outcome: Mapping[str, Any]) -> Iterator[str]:
    for card in cards(outcome):
        lines = (
            f"<p><strong>{escape(line.figure)}</strong> <span>{escape(line.about)}</span></p>"
            for line in card.lines
        )
        yield f"<section><h2>{escape(card.title)}</h2>{''.join(lines)}</section>"


def _figure(chart: Chart) -> str:
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg()}</figure>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """On a narrow screen each row becomes a block, in which each cell says what it is."""
    head, *others = rows
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for name, *cells in others:
        pairs = zip(head[1:], cells, strict=True)
        texts = (f'<td data-of="{escape(of)}">{escape(cell)}</td>' for of, cell in pairs)
        lines.append(f"<td>{escape(name)}</td>{''.join(texts)}")
    text = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(head[0])}</caption>{text}</table>"

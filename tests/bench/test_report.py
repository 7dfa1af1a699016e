"""The page of bench.serving's --report: cards, charts with every engine, nothing from elsewhere."""

import json
import re
from argparse import Namespace
from html import escape, unescape
from itertools import pairwise

import pytest

from bench.flags.limits import Slo
from bench.machine import machine_warnings
from bench.serving import curves
from bench.serving.charts import BOTTOM, LEFT, RIGHT, SHORTEST, TOP
from bench.serving.measures import RATIOS
from bench.serving.report import write_report
from bench.serving.results import outcome_of
from bench.serving.run import Run, Stream, Tick

URL = "http://127.0.0.1:8080"
SVG = re.compile(r'<svg [^>]*aria-label="([^"]*)">(.*?)</svg>')


def made(name, slowness=1.0, *, ticks=True, fails=False):
    """Ten steps of one token for one stream, each longer than the one before."""
    ends = [slowness * 0.1 * i * (1 + i / 20) for i in range(11)]
    gaps = list(pairwise(ends))
    inside = [Tick(start, 1000 * (end - start), 1, 0, 1, 0, 0, 0, 9, 9) for start, end in gaps]
    ends = ends[1:]
    streams = [Stream(0, 0.0, [] if fails else ends, [1] * 10, not fails)]
    failures = ["status 503"] if fails else []
    tail = {"static_blocks": 2, "block_bytes": 4.0, "failures": failures}
    return Run(name, inside if ticks else [], streams, **tail)


def written(directory, *runs, load_average=0.0, **found):
    """The page, and the content of result.json; `found` by the searches for a rate."""
    args = Namespace(
        engines=[run.engine for run in runs],
        target_active=1,
        slo=Slo(ttft=1.0),
        attainment=0.9,
        spike_threshold=None,
    )
    rounds = {run.engine: [run, run] for run in runs}
    session = Namespace(args=args, runs=rounds, **({"max_rate": {}, "probes": {}} | found))
    work = {"requests": 1, "prompt_tokens": 3, "output_tokens": 10, "digest": "abc"}
    about = {"trace": None, "preset": "uniform", "loop": "open", "model": "tiny", "seed": 0}
    about |= {"work": work, "target_active": 1, "spike_threshold": None}
    machine = {"gemm_gflops": 50.0, "load_average": load_average}
    about["warnings"] = [*machine_warnings(machine)]
    write_report(directory, outcome_of(session, about, is_partial=False), rounds)
    page = (directory / "index.html").read_text()
    return page, json.loads((directory / "result.json").read_text())


def cards(page):
    """By title, the large figures and what is written beside each."""
    found = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", page)
    line = re.compile(r"<strong>(.*?)</strong> <span>(.*?)</span>")
    return {unescape(title): line.findall(lines) for title, lines in found}


@pytest.mark.parametrize("second", [made("mlx_lm", 3), made(URL, 3, ticks=False)])
def test_a_page_needs_nothing_else(second, tmp_path):
    page, _ = written(tmp_path, made("mlx_paged"), second)
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|(?:src|href)=", page)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "result.json"]


def test_the_page_begins_with_cards_that_have_the_figures_of_the_json_line(tmp_path):
    page, result = written(tmp_path, made("mlx_paged"), made("mlx_lm", 3), made("sequential", 7))
    first, *others = result["engines"]
    shown = cards(page)
    for key, what in RATIOS.items():
        title = what if "tokens" in key else f"{what}, less is better"
        pairs = [f"{first} / {other}" for other in others]
        values = [result["ratios"][pair][key] for pair in pairs if key in result["ratios"][pair]]
        assert [figure for figure, _ in shown.get(title, [])] == [f"{v:.2f}x" for v in values]
        for other, (_, about) in zip(others, shown.get(title, []), strict=False):
            own, its = (result["engines"][name][key] for name in (first, other))
            assert re.fullmatch(rf"{first} {own:.1f}.*, {other} {its:.1f}.*; 2 rounds", about)
    assert len(shown["output tokens/s"]) == 2
    for title, key, high in (
        ("time to first token", "ttft_ms", "p99"),
        ("time between two tokens", "itl_ms", "max"),
    ):
        assert shown[title] == [
            (f"{row[key]['p50']:.1f} ms", f"{name}: median; {high} {row[key][high]:.1f} ms")
            for name, row in result["engines"].items()
        ]
    assert page.index('<div class="cards">') < page.index("<svg") < page.index("<table")


@pytest.mark.parametrize(
    "attained, found, text",
    [((1.0, 0.95), 2.0, ">= 2.00"), ((1.0, 0.5), 1.0, "1.00"), ((0.5, 0.0), None, "< 1.00")],
)
def test_a_highest_rate_that_is_a_bound_is_marked(attained, found, text, tmp_path):
    about = {"tokens_per_sec": 1.0, "good_tokens_per_sec": 1.0}
    probes = [{"rate": i + 1.0, "attainment": a, **about} for i, a in enumerate(attained)]
    name = "mlx_paged"
    page, _ = written(tmp_path, made(name), probes={name: probes}, max_rate={name: found})
    assert f'data-of="max rate/s">{escape(text)}</td>' in page
    [(_, card)] = cards(page)["streams within the limits"]
    assert unescape(card).endswith(f"; highest rate {text}/s")


def test_a_busy_machine_is_named_on_the_page(tmp_path):
    page, _ = written(tmp_path, made("mlx_paged"), load_average=1000.0)
    assert '<p class="warning">busy machine: load average 1000.0 on' in page
    page, _ = written(tmp_path, made("mlx_paged"))
    assert 'class="warning"' not in page


def test_memory_of_mlx_is_compared_with_engines_on_mlx_only(tmp_path):
    own, other = made("mlx_paged"), made("llama_cpp", 3)
    own.peak_mlx_bytes, other.peak_mlx_bytes = 2**20, 2**19
    page, result = written(tmp_path, own, other)
    assert result["engines"]["mlx_paged"]["peak_mlx_mib"] == 1.0
    assert result["engines"]["llama_cpp"]["peak_mlx_mib"] is None
    assert "peak_mlx_mib" not in result["ratios"]["mlx_paged / llama_cpp"]
    assert "peak memory of MLX" not in "".join(cards(page))


def test_one_server_alone_has_cards_and_charts(tmp_path):
    page, result = written(tmp_path, made(URL, ticks=False))
    rate = result["engines"][URL]["output_tokens_per_sec"]
    assert cards(page)["output tokens/s"] == [(f"{rate:.1f}", URL)]
    assert len(SVG.findall(page)) == 4 and "K/V memory</h2>" not in page


def test_a_server_that_gave_nothing_is_named_and_not_drawn(tmp_path):
    page, _ = written(tmp_path, made("http://a", ticks=False), made(URL, ticks=False, fails=True))
    assert f'<p class="warning">{URL}: 2 of 2 streams failed; the first: status 503' in page
    assert all(URL not in alt for alt, _ in SVG.findall(page))


@pytest.mark.parametrize("slowness", [0.002, 0.02, 3, 50, 500])
def test_every_engine_is_seen_in_every_chart(tmp_path, monkeypatch, slowness):
    """Also one of which the first step is longer than the whole run of the other."""
    axes, steps, dots = [], curves.steps, curves.dots

    def watched(draw):
        def drawn(x, y, points, kind):
            axes.extend(zip((x, y), zip(*points, strict=True), strict=True))
            return draw(x, y, points, kind)

        return drawn

    monkeypatch.setattr(curves, "steps", watched(steps))
    monkeypatch.setattr(curves, "dots", watched(dots))
    page, _ = written(tmp_path, made("first"), made("other", slowness), made("third", 2))
    charts = SVG.findall(page)
    *together, one, two, three = charts
    assert len(together) == 6
    for alt, svg in together:
        assert all(name in alt for name in ("first", "other", "third"))
        for kind in ("e0", "e1", "e2"):
            [way] = re.findall(rf'<path class="line {kind}" d="M(.*?)"', svg)
            places = [float(text) for text in re.findall(r"[\d.]+", way)]
            assert len(places) > 2 and len(set(places)) > 2, alt
    for kind, (alt, svg) in zip(("e0", "e1", "e2"), (one, two, three), strict=True):
        assert f'<path class="dots {kind}"' in svg and alt.startswith("Time of 10 steps of ")
        right = max(float(x) for x in re.findall(r"M([\d.]+) [\d.]+h0", svg))
        assert LEFT + 2 < right <= RIGHT
    for _, svg in charts:
        for x, y in re.findall(r"M([\d.]+) ([\d.]+)", svg):
            assert LEFT <= float(x) <= RIGHT and TOP <= float(y) <= BOTTOM
    for axis, values in axes:
        assert max(values) <= axis.most
        assert all(v >= axis.least for v in values if v > SHORTEST * axis.most or not axis.is_log)
    assert (
        len({re.sub(r'<path class="(?!grid).*|<circle.*', "", svg) for _, svg in charts[6:]}) == 1
    )

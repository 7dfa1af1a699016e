"""The host-cost and scaling benches: arguments, what they count, and the JSON line; never times."""

import json
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from bench.host_cost import __main__ as host_cost
from bench.host_cost.__main__ import Stopwatch
from bench.host_cost.counted_steps import per_step
from bench.host_cost.gpu_steps import ENGINES
from mlx_paged.ops import dispatch
from scripts import scaling
from scripts.scaling import Point, growth_of

HOST = ["--rows", "2", "3", "--blocks=3", "--steps=4", "--rounds=2", "--layers=2"]
SCALING = ["--model=tiny", "--rows", "2", "4", "--contexts", "20", "40", "--steps=3", "--rounds=2"]


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (host_cost, ["--rows", "0"], "--rows: expected a whole number >= 1, got '0'"),
        (host_cost, ["--blocks", "x"], "--blocks: expected a whole number >= 1, got 'x'"),
        (host_cost, ["--counted"], "--counted: expected --gpu beside it"),
        (host_cost, ["--layers", "0"], "--layers: expected a whole number >= 1, got '0'"),
        (scaling, ["--contexts", "0"], "--contexts: expected a whole number >= 1, got '0'"),
        (scaling, ["--model", "gpt"], "--model: invalid choice: 'gpt'"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(bench, options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench.main(options)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ""
    command = bench.__name__.removesuffix(".__main__")
    assert err.startswith(f"{command}: error: ") and err.count("\n") == 1
    assert message in err


def result_of(bench: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    bench.main(options)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def dump_of(course: str, totals: str) -> str:
    """What callgrind writes of a course."""
    events = "Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw"
    heads = "desc: I1 cache: 196608 B", f"desc: Trigger: Client Request: {course}"
    return "\n".join([*heads, f"events: {events}", f"summary: {totals}", f"totals: {totals}"])


def test_counts_are_those_of_a_step_beside_mlx_lms():
    dumps = [
        dump_of("mlx-lm", "2000 600 400 40 30 10 4 3 1"),
        dump_of("engine, kv_bits 8", "1000 300 200 20 16 4 0 1 1"),
    ]
    base, engine = per_step(dumps, steps=2)
    assert engine["course"] == "engine, kv_bits 8" and engine["instructions"] == 500
    assert engine["first-level misses"] == 20 and engine["last-level misses"] == 1
    assert (base["counts as"], engine["counts as"]) == (1000 + 10 * 40 + 100 * 4, 800)
    assert engine["instructions, over mlx-lm"] == 0.5
    assert engine["counts as, over mlx-lm"] == round(800 / 1800, 3)


def test_policies_are_compared_in_turns(capsys):
    result = result_of(host_cost, ["--policies", "--rows=2", "--steps=4", "--rounds=2"], capsys)
    for each in result["policies"]["2"].values():
        assert each["lowest"] <= each["median"] <= each["highest"] and each["fcfs"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--no-lookahead"]], ids=["ahead", "not ahead"])
def test_host_cost_covers_every_part_of_every_step(mode, capsys):
    result = result_of(host_cost, [*HOST, *mode], capsys)
    assert result["lookahead"] == (mode == [])
    measured = [(each["rows"], each["sampling options"]) for each in result["steps_us"]]
    assert measured == [(rows, name) for rows in (2, 3) for name in ("greedy", "drawn")]
    for each in result["steps_us"]:
        assert all(each[part] > 0 for part in (*host_cost.PARTS, "outputs"))
        assert each["step"] >= max(each[part] for part in host_cost.PARTS)
        assert each["counted"] <= each["step"]
        assert each["quiet step"] <= each["step"] and each["quiet"] <= each["counted"]
    assert all(cost > 0 for cost in result["block_costs"]["mlx_paged"].values())
    assert set(result["floor_us"]) == {"2", "3"}
    for each, rows in zip(result["graphs"], (2, 3), strict=True):
        assert each["rows"] == rows
        assert all(each[f"{name} graph_us"] > 0 for name in ("compiled", "plain", "mlx-lm"))
    recording = result["recording"]
    assert recording["step_us"] > 0 and recording["step_without_us"] > 0
    assert "recording_us" in recording and recording["rows"] == host_cost.RECORDED_ROWS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", ["1", "3"])
def test_gpu_steps_take_a_gpus_ways_and_compare_each_with_mlx_lm(rows, capsys, monkeypatch):
    asked: list[tuple[int, bool]] = []
    takes = dispatch._take_attention

    def noted(*given):
        asked.append((given[0][2], given[6]))
        return takes(*given)

    monkeypatch.setattr(dispatch, "_take_attention", noted)
    options = ["--gpu", "--rows", rows, "--steps=10", "--rounds=1", "--layers=2"]
    result = result_of(host_cost, options, capsys)
    assert (1, False) in asked, "no step asked a GPU's compiler"
    base, *others = result["gpu_steps"]
    assert base["course"] == "mlx-lm" and base["over mlx-lm"] == 1
    assert {each["course"] for each in others} == {*ENGINES, "drop-in"}
    assert all(each["step_us"] > 0 and each["nodes"] > 0 for each in result["gpu_steps"])
    assert mx.default_device() == mx.Device(mx.cpu)


def test_only_one_of_two_engines_records():
    engines = host_cost.recording_engines(2)
    num_ticks = [engine.ticks.num_ticks for engine in engines]
    for engine in engines:
        assert len(engine.step()) == 2
    grown = [e.ticks.num_ticks - n for e, n in zip(engines, num_ticks, strict=True)]
    assert grown == [1, 0]


def test_a_call_inside_another_counts_for_itself_alone(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    owner = SimpleNamespace(inner=lambda: spend(2.0))

    def outer() -> None:
        spend(1.0)
        owner.inner()
        owner.inner()
        spend(4.0)

    owner.outer = outer
    watch = Stopwatch()
    with watch.watching((owner, "outer", "a"), (owner, "inner", "b")):
        owner.outer()
        assert watch.lap() == {"a": 5.0, "b": 4.0}
    owner.outer()
    assert watch.lap() == {} and owner.outer is outer


def test_scaling_measures_every_point_and_the_crowd(capsys):
    result = result_of(scaling, [*SCALING, "--waiting=9"], capsys)
    sizes = [(point["rows"], point["context"]) for point in result["points"]]
    assert sizes == [(2, 20), (2, 40), (4, 20), (4, 40)]
    assert {name: len(ratios) for name, ratios in result["doublings"].items()} == {
        "rows": 2,
        "context": 2,
    }
    assert [point["waiting"] for point in result["crowd"]] == [0, 9]


def test_scaling_draws_what_it_measured(tmp_path):
    pytest.importorskip("matplotlib")
    points = [Point(2, context, None, step_ms=[1.0, 2.0]) for context in (20, 40)]
    scaling.plot(tmp_path / "scaling.png", points, growth_of(points), points)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_growth_finds_the_line_that_points_lie_on():
    points = [
        Point(rows, context, None, step_ms=[3 + 0.5 * rows + 0.002 * rows * context])
        for rows in (8, 16, 32)
        for context in (256, 512)
    ]
    growth = growth_of(points)
    assert growth["fixed_ms"] == pytest.approx(3)
    assert growth["us_a_row"] == pytest.approx(500)
    assert growth["us_a_token"] == pytest.approx(2)
    by_rows = (3 + 16 + 0.002 * 32 * 512) / (3 + 8 + 0.002 * 16 * 512)
    assert growth["worst_doubling"] == pytest.approx(by_rows, abs=1e-3)
    assert 0 < growth["exponent"] < 1

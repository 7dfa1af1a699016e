"""The stall bench, and what benches share: arguments, counts, and the JSON line; never times."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from bench import machine, memory, stalls
from bench.command import table, text_of
from bench.flags.clock import Clock
from bench.models import random_prompts
from mlx_paged.ops.cpu_layers import mlx_linear
from mlx_paged.scheduler.budget import MIN_CHUNK

STALLS = ["--model=tiny", "--streams=2", "--stream-tokens=8", "--rounds=2", "--small-step=16"]
STALLS += ["--prompt-tokens=120", "--warm-up-tokens=40"]


class Outputs:
    """What a bench printed."""

    def __init__(self, captured: Any) -> None:
        *self.lines, last = captured.out.splitlines()
        self.result = json.loads(last)
        about_machine = ("slow BLAS", "busy machine")
        self.err = [e for e in captured.err.splitlines() if not e.startswith(about_machine)]


@pytest.mark.parametrize(
    ("bench", "options", "message"),
    [
        (stalls, ["--streams", "0"], "--streams: expected a whole number >= 1, got '0'"),
        (stalls, ["--prompt-tokens", "1"], "--prompt-tokens: expected a whole number >= 2, got"),
        (
            stalls,
            ["--max-stall-ms", "0"],
            "--max-stall-ms: expected a number of milliseconds",
        ),
        (
            stalls,
            ["--max-stall-ms", "nan"],
            "--max-stall-ms: expected a number of milliseconds",
        ),
        (stalls, ["--rounds", "x"], "--rounds: expected a whole number >= 1, got 'x'"),
        (stalls, ["--model", "gpt"], "--model: invalid choice: 'gpt'"),
        (memory, ["--n", "0"], "--n: expected a whole number >= 1, got '0'"),
        (memory, ["--max-tokens", "1"], "--max-tokens: expected a whole number >= 2, got '1'"),
        (memory, ["--max-tokens", "2.5"], "--max-tokens: expected a whole number >= 2, got '2.5'"),
        (
            memory,
            ["--block-size", "12"],
            "--block-size: invalid choice: 12 (choose from 8, 16",
        ),
        (memory, ["--streams", "8"], "unrecognized arguments: --streams 8"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(bench, options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench.main(options)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert out == ""
    command = bench.__name__.removesuffix(".__main__")
    assert err.startswith(f"{command}: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("gflops", "load", "words"),
    [
        (4.0, 0.1, ["slow BLAS: float32 GEMM at 4.0"]),
        (99.0, 1.5, ["busy machine: load average 1.5"]),
        (99.0, 0.9, []),
        (4.0, 3.0, ["slow BLAS", "busy machine"]),
    ],
)
def test_a_machine_that_distorts_times_is_named_once_a_cause(
    gflops, load, words, monkeypatch, capsys
):
    monkeypatch.setattr(machine, "gemm_gflops", lambda: gflops)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    assert machine.check_machine() == {"gemm_gflops": gflops, "load_average": load}
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == len(words)
    for line, word in zip(err.splitlines(), words, strict=True):
        assert line.startswith(word)


@pytest.mark.slow
@pytest.mark.parametrize("own_is_faster", [False, True])
def test_a_linear_layer_is_rated_by_the_faster_of_both_kernels(monkeypatch, own_is_faster):
    """As if one kernel took a tenth of the other's second."""

    def seconds(clock: Clock, run: Callable[[], object], num_threads: int) -> float:
        run()
        is_own = nn.Linear.__call__ is not mlx_linear[nn.Linear]
        return 0.1 if is_own is own_is_faster else 1.0

    monkeypatch.setattr(Clock, "seconds", seconds)
    operations = 2 * machine.GEMM_SIZE**3
    assert machine.linear_gflops(mx.float32) == pytest.approx(operations / 0.1e9, rel=0.1)


@pytest.mark.slow
def test_the_stall_bench_compares_four_engines_in_as_many_rounds(capsys):
    stalls.main([*STALLS, "--max-stall-ms=1e-3"])
    outputs = Outputs(capsys.readouterr())
    engines = outputs.result["engines"]
    assert outputs.err == []
    assert list(engines) == [
        "mlx_paged, bound 0.001 ms",
        "mlx_paged, chunk 512",
        "mlx_lm, defaults",
        "mlx_lm, prefill step 16",
    ]
    for name, row in engines.items():
        assert any(line.startswith(name) for line in outputs.lines)
        assert 0 < row["gap_p50_ms"] <= row["gap_p99_ms"] <= row["gap_max_ms"]
        assert row["gap_max_ms"] <= row["gap_worst_ms"]
        assert row["gaps_above_bound"] == row["gaps"] > 0
        assert row["gaps_above_promise"] <= row["gaps"]
        assert row["gap_before_ms"] > 0 and row["ttft_s"] > 0
    assert engines["mlx_lm, prefill step 16"]["gaps"] >= 2 * 2 * (120 // 16)  # rounds, streams
    assert outputs.result["floor_decode_ms"] > 0
    assert outputs.result["max_gap_ratio"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "num_steps"),
    # A gap a stream for each chunk; one or two more for what is under way when the prompt arrives,
    # or, in mlx-lm, for the prompt's last token.
    [("mlx_paged, chunk 512", 1), ("mlx_lm, defaults", 1), ("mlx_lm, prefill step 16", 8)],
)
def test_streams_get_a_token_between_chunks_of_the_long_prompt(name, num_steps, model):
    args = stalls.parse(STALLS)
    scenario = stalls.Scenario(args)
    played = stalls.play(stalls.servers(args, model, scenario)[name](), scenario)
    assert num_steps * args.streams <= len(played.gaps) <= (num_steps + 2) * args.streams
    assert len(played.gaps_before) == stalls.BASELINE_STEPS * args.streams
    assert sum(played.gaps) / args.streams >= 1000 * played.ttft_s - 1e-6


def test_one_engine_has_the_bound_and_one_only_its_budget(model):
    args = stalls.parse([*STALLS, "--max-stall-ms=80", "--prefill-chunk=64"])
    makers = stalls.servers(args, model, stalls.Scenario(args))
    bounded, unbounded = (make().engine.scheduler for make in list(makers.values())[:2])
    assert (bounded.budget.max_stall, bounded.budget.prefill_chunk) == (0.08, 64)
    assert (unbounded.budget.max_stall, unbounded.budget.prefill_chunk) == (None, 64)


@pytest.mark.parametrize("name", ["mlx_paged, chunk 512", "mlx_lm, defaults"])
def test_each_server_gives_the_tokens_it_was_asked_for(name, model):
    args = stalls.parse(STALLS)
    server = stalls.servers(args, model, stalls.Scenario(args))[name]()
    ids = [server.add(prompt, 3 + i) for i, prompt in enumerate(random_prompts(2, 5, "tiny"))]
    given = [request_id for _ in range(20) for request_id in server.step()]
    assert [given.count(request_id) for request_id in ids] == [3, 4]


def test_the_floor_is_measured_with_chunks_of_the_least_size(model):
    args = stalls.parse(STALLS)
    scenario = stalls.Scenario(args)
    engine = stalls.make_engine(args, model, scenario, None)
    decode_ms, chunk_ms = stalls.measure_floor(engine, scenario)
    num_decode_steps = stalls.BASELINE_STEPS + 2 * stalls.SETTLING_STEPS
    assert engine.stats.steps >= num_decode_steps + 2 + 119 // MIN_CHUNK
    assert decode_ms > 0 and chunk_ms >= 0


class ScriptedServer:
    """Gives tokens to these requests, step by step, at these times."""

    def __init__(self, script: list[tuple[float, list[int]]]) -> None:
        self.script = iter(script)
        self.now = -1.0

    def step(self) -> list[int]:
        self.now, ids = next(self.script)
        return ids


def test_a_gap_counts_from_the_last_token_before_the_arrival(monkeypatch):
    server = ScriptedServer([(1.0, [0, 1]), (2.0, [0]), (2.5, []), (4.0, [0, 1]), (5.0, [1, 7])])
    monkeypatch.setattr(stalls.time, "perf_counter", lambda: server.now)
    watch = stalls.Watch(server)
    assert watch.steps(2) == 2.0
    assert watch.await_first(7) == 5.0
    assert watch.gaps_ms([0], since=2.0) == [2000.0]
    assert watch.gaps_ms([0, 1], since=2.0) == [2000.0, 3000.0, 1000.0]
    assert watch.gaps_ms([0], since=1.5) == [1000.0, 2000.0]


def test_medians_are_over_rounds_and_counts_over_all():
    gaps = [[1.0, 2.0, 9.0], [1.0, 3.0, 5.0], [2.0, 4.0, 30.0]]
    rounds = [
        stalls.Round([1.0], each, ttft_s, []) for each, ttft_s in zip(gaps, (8, 7, 3), strict=True)
    ]
    assert stalls.summary(rounds, bound_ms=4.0, promise_ms=5.0) == {
        "gap_before_ms": 1.0,
        "gap_p50_ms": 3.0,
        "gap_p99_ms": 8.86,
        "gap_max_ms": 9.0,
        "gap_worst_ms": 30.0,
        "gaps": 9,
        "gaps_above_bound": 3,
        "gaps_above_promise": 2,
        "ttft_s": 7,
    }
    slow = [stalls.Round([1.0], [gap], 1.0, []) for gap in (18.0, 50.0, 30.0)]
    assert stalls.max_gap_ratio(slow, rounds) == 2.0


def test_prompts_depend_on_their_seed_alone():
    prompts = random_prompts(2, 5, "tiny", seed=3)
    assert prompts == random_prompts(2, 5, "tiny", seed=3) != random_prompts(2, 5, "tiny", seed=4)
    assert [len(prompt) for prompt in prompts] == [5, 5] and max(map(max, prompts)) < 128


def test_a_table_has_columns_as_wide_as_their_widest_cell():
    assert table([["ms", "p50"], ["mlx_lm", "1.25"]]) == "ms       p50\nmlx_lm  1.25"
    assert text_of(None, ".1f") == "-" and text_of(0.25, ".1%") == "25.0%"

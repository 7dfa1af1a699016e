"""The attention bench: its grid, what it computes and writes, and how it ends; never the times."""

import mlx.core as mx
import numpy as np
import pytest
from test_bench_cli import Outputs

from bench.flags import clock
from bench.flags.clock import Clock
from bench.flags.head_counts import HeadCounts
from bench.machine import measure_read
from bench.paged_attention import __main__ as paged_attention
from bench.paged_attention import timing as attention_timing
from bench.paged_attention.cases import Case, Inputs
from bench.paged_attention.ggml import GgmlAttention
from bench.paged_attention.timing import in_turns, summary
from mlx_paged.doctor.speed import MemoryReader
from tests.support.ops.numpy_reference import paged_attention_numpy
from tests.support.ops.paged_cases import TOLERANCE, worst_error

TINY = ["--quick", "--heads=4:2:8", "--dtypes", "float32", "--batches=2", "--contexts=33"]
TINY += ["--block-sizes=8", "--chunk-lengths=4", "--chunk-contexts=9", "--rounds=1"]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch):
    """Few layers and short reads, to be quick."""
    monkeypatch.setattr("bench.paged_attention.cases.BEYOND_CACHE", 2**16)
    monkeypatch.setattr(
        paged_attention, "measure_read", lambda clock: measure_read(clock, 1, 2**20)
    )
    monkeypatch.setattr(paged_attention, "MemoryReader", lambda n: MemoryReader(n, 2**20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads", "8:3:64"], "--heads: expected query heads, KV heads that divide them and dim"),
        (["--heads", "8:2"], "as 32:8:128, got '8:2'"),
        (["--heads", "8:0:64"], "got '8:0:64'"),
        (["--dtypes", "int8"], "--dtypes: invalid choice: 'int8'"),
        (["--block-sizes", "12"], "--block-sizes: invalid choice: 12"),
        (["--chunk-lengths", "1"], "--chunk-lengths: expected a whole number >= 2, got '1'"),
        (["--memory", "0"], "--memory: expected a number of GiB above 0, got '0'"),
    ],
)
def test_a_wrong_argument_is_reported_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        paged_attention.main(options)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert out == "" and err.count("\n") == 1 and message in err


def test_ggml_that_is_not_installed_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_info:
        paged_attention.main([*TINY, "--ggml"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert out == "" and err.count("\n") == 1
    assert "--ggml: llama-cpp-python is missing: expected pip install '.[peers]'" in err


@pytest.mark.slow
def test_every_way_is_timed_in_every_case(capsys):
    paged_attention.main(TINY)
    outputs = Outputs(capsys.readouterr())
    result = outputs.result
    assert outputs.err == [] and result["partial"] is False and result["skipped"] == []
    sizes = [(row["length"], row["batch"], row["context"]) for row in result["cases"]]
    assert sizes == [(1, 2, 33), (4, 1, 4), (4, 1, 9)]
    for row in result["cases"]:
        assert set(row["ways"]) == {"paged", "gather", "contiguous"}
        assert row["error"] < 1e-5
        for way in row["ways"].values():
            assert 0 < way["best_ms"] <= way["ms"]
            assert way["speedup"] > 0 and way["percent_of_read"] > 0
        assert row["ways"]["paged"]["speedup"] == 1
    decode = result["cases"][0]
    assert decode["kv_mib"] == pytest.approx(2 * 2 * 33 * 2 * 8 * 4 / 2**20, rel=1e-3)
    assert set(result["ceilings"]) == {"read_gb_s", "gemm_gflops", "load_average"}


@pytest.mark.slow
def test_ggml_takes_its_turns(capsys):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    paged_attention.main([*TINY, "--ggml"])
    for row in Outputs(capsys.readouterr()).result["cases"]:
        assert set(row["ways"]) == {"paged", "gather", "contiguous", "ggml"}


def test_the_whole_grid_is_the_default_and_quick_a_part_of_it():
    full = paged_attention.grid(paged_attention.parse([]))
    for name, values in {
        "block_size": {8, 16, 32},
        "batch": {1, 8, 16, 32, 64},
        "dtype": {"float32", "float16", "bfloat16"},
        "length": {1, 16, 64, 128, 512},
    }.items():
        assert {getattr(case, name) for case in full} == values
    assert {case.context for case in full if case.length == 1} == {512, 4096, 16384}
    assert {case.context for case in full if case.length == 64} == {64, 512, 2048, 6144}
    assert len({case.heads.group for case in full}) > 1
    assert set(paged_attention.grid(paged_attention.parse(["--quick"]))) < set(full)
    chunks = paged_attention.grid(paged_attention.parse(["--only=chunks"]))
    assert chunks == [case for case in full if case.length > 1]


@pytest.mark.slow
def test_what_the_memory_cannot_hold_is_skipped_with_the_reason(capsys):
    paged_attention.main([*TINY, "--only=decodes", "--contexts", "33", "30000", "--memory=0.01"])
    outputs = Outputs(capsys.readouterr())
    assert [row["context"] for row in outputs.result["cases"]] == [33]
    [skipped] = outputs.result["skipped"]
    assert skipped["context"] == 30000
    assert skipped["reason"] == "needs 0.0465 GiB of at most 0.01"
    assert any(line.startswith("skipped:") and "30000" in line for line in outputs.lines)


def test_a_case_needs_its_pool_thrice_and_single_precision_copies_and_scores():
    case = Case(HeadCounts(8, 2, 64), "float16", 1, 64, 16384, 16)
    assert case.kv_bytes == 2**29 and case.num_layers == 1
    assert case.memory_bytes == 3 * 2**29 + 3 * 2**30 + 4 * 4 * 64 * 8 * 16384


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(capsys, monkeypatch):
    timed = []

    def time_case(case, *args, **options):
        if timed:
            raise KeyboardInterrupt
        timed.append(case)
        return attention_timing.time_case(case, *args, **options)

    monkeypatch.setattr(paged_attention, "time_case", time_case)
    with pytest.raises(SystemExit) as exit_info:
        paged_attention.main(TINY)
    outputs = Outputs(capsys.readouterr())
    assert exit_info.value.code == 130
    assert outputs.result["partial"] is True and len(outputs.result["cases"]) == 1
    assert outputs.err == ["interrupted after 1 of 3 cases"]


@pytest.mark.slow
def test_a_wrong_answer_ends_the_bench(monkeypatch, capsys):
    monkeypatch.setattr("bench.paged_attention.timing._difference", lambda *_: float("nan"))
    with pytest.raises(SystemExit, match="the paged op is nan from MLX's attention"):
        paged_attention.main(TINY)


def expected_of(inputs):
    """The first layer's attention in float64."""
    arrays = (inputs.q, inputs.pool.k[0], inputs.pool.v[0], inputs.tables, inputs.context_lens)
    as_float64 = [np.array(a.astype(mx.float32), np.float64) for a in arrays[:3]]
    return paged_attention_numpy(
        *as_float64, *(np.array(a) for a in arrays[3:]), scale=inputs.scale
    )


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ways_compute_the_same_attention(dtype, length):
    inputs = Inputs(Case(HeadCounts(4, 2, 16), dtype, length, 1 if length > 1 else 3, 21, 8))
    expected = expected_of(inputs)
    ways = inputs.contenders()
    assert set(ways) == {"paged", "gather", "contiguous"}
    outs = {name: attend(0) for name, attend in (ways | inputs.torch_contenders()).items()}
    for name, out in outs.items():
        if not isinstance(out, mx.array):
            out = mx.array(out.float().numpy()).reshape(expected.shape)
        tolerance = 8 if dtype == "bfloat16" and name != "paged" else 1  # they round the scores
        assert worst_error(out, expected) <= tolerance * TOLERANCE[inputs.q.dtype], name


@pytest.mark.parametrize("length", [1, 5, 70])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ggml_computes_the_same_attention(dtype, length):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    inputs = Inputs(Case(HeadCounts(4, 2, 16), dtype, length, 1 if length > 1 else 3, 90, 8))
    attend = GgmlAttention(inputs.q, *inputs.contiguous[0], inputs.scale)
    attend()
    out = mx.array(attend.output().swapaxes(1, 2))
    tolerance = 1 if dtype == "float32" else 8  # it rounds queries or sums, too
    assert worst_error(out, expected_of(inputs)) <= tolerance * TOLERANCE[inputs.q.dtype]


def test_blocks_are_scattered_and_layers_differ():
    inputs = Inputs(Case(HeadCounts(2, 1, 8), "float32", 1, 2, 64, 8))
    assert sorted(np.array(inputs.tables).ravel().tolist()) == list(range(16))
    assert not np.array_equal(np.array(inputs.tables).ravel(), np.arange(16))
    assert inputs.case.num_layers > 1
    first, second = (np.array(inputs.pool.k[layer]) for layer in (0, 1))
    assert not np.array_equal(first, second)


def test_medians_are_of_ratios_within_a_round():
    case = Case(HeadCounts(4, 2, 8), "float32", 1, 2, 50, 8)
    reader = MemoryReader(1, 1000 * 8)
    times = {
        "read": [8e-6, 16e-6, 8e-6],  # 1, 0.5, 1 GB/s
        "paged": [t * case.num_layers for t in (64e-6, 128e-6, 256e-6)],
        "gather": [t * case.num_layers for t in (128e-6, 128e-6, 1024e-6)],
    }
    row = summary(case, times, reader)
    paged, gather = row["ways"]["paged"], row["ways"]["gather"]
    assert case.kv_bytes == 2 * 2 * 50 * 2 * 8 * 4 == 12800
    assert (paged["ms"], paged["best_ms"], paged["speedup"]) == (0.128, 0.064, 1.0)
    assert (paged["gb_s"], paged["best_gb_s"], paged["percent_of_read"]) == (0.1, 0.2, 20.0)
    assert (gather["speedup"], gather["best_speedup"]) == (2.0, 2.0)
    assert (row["read_gb_s"], row["best_read_gb_s"]) == (1.0, 1.0)


@pytest.mark.parametrize(("rounds", "budget_s", "turns"), [(3, 9e9, 4), (3, 0.0, 1)])
def test_ways_take_turns_while_there_is_time(rounds, budget_s, turns, monkeypatch):
    monkeypatch.setattr(attention_timing, "TURN_S", 0.0)
    taken = []
    runs = {name: lambda name=name: taken.append(name) for name in ("read", "a", "b")}
    times = in_turns(runs, rounds, budget_s, Clock.WALL)
    assert (
        taken
        == ["read", "a", "b", "read", "a", "b", "a", "b", "read", "b", "read", "a"][: 3 * turns]
    )
    assert {name: len(each) for name, each in times.items()} == dict.fromkeys(
        runs, max(1, turns - 1)
    )


def test_fast_ways_are_repeated_in_their_turn(monkeypatch):
    seconds = iter([0.02, 0.06, 0.01, 0.1, *[1.2] * 4])
    monkeypatch.setattr(Clock, "seconds", lambda clock, run, threads: (run(), next(seconds))[1])
    taken = []
    runs = {name: lambda name=name: taken.append(name) for name in ("read", "a", "b", "c")}
    times = in_turns(runs, 1, 9e9, Clock.WALL)
    assert taken == ["read", "a", "b", "c", *["read"] * 2, "a", *["b"] * 5, "c"]
    assert times == {"read": [0.6], "a": [1.2], "b": [0.24], "c": [1.2]}


def test_processor_time_is_shared_by_the_threads_and_does_not_pass_in_sleep(monkeypatch):
    monkeypatch.setattr(clock.time, "perf_counter", iter([1.0, 9.0]).__next__)
    monkeypatch.setattr(clock.time, "process_time", iter([1.0, 4.0]).__next__)
    assert Clock.WALL.seconds(lambda: None, 2) == 8.0
    assert Clock.PROCESSOR.seconds(lambda: None, 2) == 1.5


def test_flops_count_what_a_causal_chunk_sees():
    case = Case(HeadCounts(4, 2, 8), "float32", 3, 1, 10, 8)
    assert case.flops == 4 * 4 * 8 * (8 + 9 + 10)


@pytest.mark.slow
def test_a_picture_is_drawn_if_matplotlib_is_there(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    paged_attention.main([*TINY, f"--plot={path}"])
    assert Outputs(capsys.readouterr()).err == []
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_without_matplotlib_the_measurement_is_not_lost(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    paged_attention.main([*TINY, "--only=decodes", f"--plot={tmp_path / 'curve.png'}"])
    outputs = Outputs(capsys.readouterr())
    assert len(outputs.result["cases"]) == 1
    [line] = outputs.err
    assert line.startswith("no picture: ") and "matplotlib" in line

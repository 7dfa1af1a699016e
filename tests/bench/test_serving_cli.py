"""python -m bench.serving: mistakes, tables and the JSON line, stalls, Ctrl-C, the report."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serving import __main__ as serving

ROOT = Path(__file__).parents[2]
SMALL = ["--model=tiny", "--requests=4", "--target-active=3", "--prefill-chunk=64"]
PAGED = [*SMALL, "--engines=mlx_paged", "--no-static"]


def run(capsys, *options):
    """Lines before the last one of stdout, that one decoded, and the exit status."""
    status = serving.main(options)
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last), status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "huge"], "--preset: invalid choice: 'huge'"),
        (["--engines", "mlx_paged,vllm"], "--engines: unknown engine 'vllm': expected some of"),
        (["--request-rate", "0"], "--request-rate: expected a number above 0, got '0'"),
        (["--request-rate", "nan"], "--request-rate: expected a number above 0, got 'nan'"),
        (["--burstiness", "2"], "--burstiness: expected --request-rate or --max-rate with it"),
        (["--slo", "ttft:5"], "--slo: expected limits on ttft, itl or tpot, e.g."),
        (["--max-rate"], "--max-rate: expected --slo with it"),
        (["--max-rate", "--slo=ttft=9", "--closed-loop"], "--max-rate: sets the rate, without"),
        (["--closed-loop", "--request-rate=3"], "--closed-loop: requests follow each other"),
        (["--open-loop", "--closed-loop"], "--closed-loop: not allowed with argument --open-loop"),
        (["--trace", "no.jsonl"], "trace no.jsonl: cannot be read (No such file or directory)"),
        (["--preset=short-behind-long", "--requests=3"], "brings its own requests and arrivals"),
        (["--trace", "x", "--requests=3"], "--trace: brings its own arrivals, without"),
        (["--trace", "x", "--tokens-target=3"], "--trace: brings its own requests, without"),
        (["--requests=3", "--tokens-target=3"], "--tokens-target: says how many requests there"),
        (["--inject-stall", "5"], "--inject-stall: expected MILLISECONDS@TICK, e.g. 300@20, got"),
        (["--model", "./nowhere"], "model ./nowhere: no such directory"),
        (["--report", __file__], "File exists"),
        (
            ["--num-blocks=9", "--requests=3"],
            "--num-blocks: expected at least 16, as one request needs, got 9",
        ),
        (["--seed=-1"], "--seed: expected a whole number >= 0, got '-1'"),
    ],
)
def test_a_mistake_is_reported_in_one_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr("bench.machine.gemm_gflops", lambda: 99.0)
    monkeypatch.setattr("bench.machine.os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with pytest.raises(SystemExit) as exit_info:
        serving.main(["--model=tiny", *options])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2
    assert err.startswith("bench.serving: error: ") and err.count("\n") == 1
    assert message in err and out == ""


def test_an_engine_that_is_not_installed_is_refused_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_info:
        serving.main(["--model=tiny", "--engines=mlx_paged,llama_cpp"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == "" and err.count("\n") == 1
    assert (
        "--engines: llama_cpp: llama-cpp-python or gguf is missing: expected pip install '.[peers]'"
        in err
    )


@pytest.mark.slow
def test_engines_run_side_by_side_and_end_with_one_json_line(capsys):
    options = ["--engines=mlx_paged,mlx_lm", "--rounds=2", "--slo=ttft=3600s"]
    lines, result, status = run(capsys, *SMALL, *options)
    assert status == 0 and not result["partial"]
    assert list(result["engines"]) == ["mlx_paged", "mlx_lm"]
    for name, row in result["engines"].items():
        assert sum(line.startswith(name) for line in lines) >= 4  # three tables, and its phases
        assert row["streams_finished"] == row["streams"] == 4
        assert row["output_tokens"] == result["work"]["output_tokens"]
        assert row["output_tokens_per_sec"] == row["continuous_tokens_per_sec"] > 0
        assert row["continuous_steady_tokens_per_sec"] > 0 and row["static_tokens_per_sec"] > 0
        for key in ("tick_ms", "itl_ms", "ttft_ms", "tpot_ms"):
            assert 0 < row[key]["p50"] <= row[key]["p95"] <= row[key]["p99"] <= row[key]["max"]
        assert row["kv_held_over_live"] >= 1 and row["kv_held_peak_mib"] > 0
        assert row["goodput"]["attainment"] == 1
        assert row["peak_rss_mib"] > 0 and row["peak_mlx_mib"] > 0 and row["rounds"] == 2
    paged, stock = result["engines"].values()
    assert paged["tokens_digest"] == stock["tokens_digest"]
    assert paged["streams_as_first"] == stock["streams_as_first"] == 4
    assert paged["kv_pool_mib"] > 0 and stock["kv_pool_mib"] is None
    assert result["ratios"]["mlx_paged / mlx_lm"]["output_tokens_per_sec"] > 0
    for latency in ("ttft_ms", "tpot_ms"):
        assert stock["each_round"][latency] == [stock[latency]["p50"]]
    text = "\n".join(lines)
    for phase in ("ramp", "steady", "tail"):
        assert len(re.findall(rf"^\[phase {phase}\] ticks=\d+ time=[\d.]+s ", text, re.M)) == 2
    spikes = r"^\[phase spikes\] count=\d+ time=[\d.]+s threshold=[\d.]+s$"
    assert len(re.findall(spikes, text, re.M)) == 2


@pytest.mark.slow
def test_what_does_not_depend_on_time_is_the_same_in_two_runs(capsys):
    options = [*SMALL, "--requests=2", "--preset=fork-heavy"]
    options += ["--request-rate=20", "--arrivals-by-step=20"]
    options += ["--engines=mlx_paged,mlx_lm", "--no-static", "--num-blocks=40"]
    (_, first, _), (_, second, _) = (run(capsys, *options) for _ in range(2))
    assert first["work"] == second["work"]
    for name, row in first["engines"].items():
        other = second["engines"][name]
        for each in (row, other, row["each_round"], other["each_round"]):
            for memory in ("peak_rss_mib", "peak_mlx_mib"):
                each.pop(memory, None)
        assert row == other
    assert first["engines"]["mlx_paged"]["counts"]["cow_clones"] > 0
    _, third, _ = run(capsys, *options, "--seed=1")
    assert third["work"]["digest"] != first["work"]["digest"]


@pytest.mark.slow
def test_an_injected_stall_is_found_with_its_cause(capsys):
    lines, result, _ = run(capsys, *PAGED, "--inject-stall=300@7", "--spike-threshold=0.25")
    spikes = result["engines"]["mlx_paged"]["spikes"]
    [stall] = [spike for spike in spikes if spike["tick"] == 7]
    assert stall["tick_ms"] >= 300 and "injected stall" in stall["causes"]
    assert any(re.match(r"  tick 7 at .* ms, .*injected stall", line) for line in lines)
    assert result["engines"]["mlx_paged"]["phases"]["spikes"]["time_s"] >= 0.3


@pytest.mark.slow
def test_a_recorded_trace_replays_what_was_written(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    _, first, _ = run(capsys, *PAGED, "--request-rate=100", f"--write-trace={path}")
    options = [option for option in PAGED if not option.startswith("--requests")]
    _, second, _ = run(capsys, *options, f"--trace={path}")
    assert second["work"] == first["work"]
    digests = [each["engines"]["mlx_paged"]["tokens_digest"] for each in (first, second)]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_the_highest_rate_within_the_slo_is_searched(capsys):
    _, result, _ = run(capsys, *PAGED, "--slo=ttft=3600s", "--max-rate")
    row = result["engines"]["mlx_paged"]
    assert [probe["attainment"] for probe in row["probes"]] == [1.0] * 5
    assert row["max_rate"] == row["probes"][-1]["rate"]


INTERRUPTED_RUN = """
import os, signal, sys
from bench.serving import __main__ as serving
from bench.serving.servers import PagedServer
step, steps = PagedServer.step, iter(range(10**6))
def interrupted(self):
    if next(steps) == 30:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self)
PagedServer.step = interrupted
sys.exit(serving.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_writes_what_was_measured_so_far():
    options = [*PAGED, "--requests=40", "--engines=mlx_paged,mlx_lm", "--rounds=2"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_RUN, *options], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["partial"] and list(result["engines"]) == ["mlx_paged"]
    row = result["engines"]["mlx_paged"]
    assert 0 < row["output_tokens"] < result["work"]["output_tokens"]
    assert row["streams_finished"] < 40 and row["ttft_ms"]["p50"] > 0
    assert "partial: interrupted" in done.stdout


@pytest.mark.slow
def test_a_report_is_written_with_the_json_line(capsys, tmp_path):
    options = [*SMALL, "--engines=mlx_paged,mlx_lm", "--no-static", "--slo=ttft=3600s"]
    lines, result, _ = run(capsys, *options, "--max-rate", f"--report={tmp_path / 'out'}")
    page = (tmp_path / "out" / "index.html").read_text()
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    ratio = result["ratios"]["mlx_paged / mlx_lm"]["output_tokens_per_sec"]
    assert re.match(rf"mlx_paged / mlx_lm: {ratio:.2f}x output tokens/s, ", lines[-3])
    texts = (f"<strong>{ratio:.2f}x</strong>", "[phase steady]", "[rate ", result["work"]["digest"])
    assert all(text in page for text in texts)
    tables = re.findall(r"<table>(.*?)</table>", page)
    assert len(tables) == 4
    for table in tables:
        rows = [re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("</tr>") if row]
        assert all(set(column[1:]) != {"-"} for column in zip(*rows, strict=True))
    assert "<th>static</th>" not in page and "<th>in SLO</th>" in page


@pytest.mark.slow
def test_short_prompts_are_measured_with_long_ones_before_them_and_without(capsys, monkeypatch):
    monkeypatch.setattr("bench.flags.presets.STREAMS", (8, 16, 120))
    options = ["--model=tiny", "--engines=mlx_paged", "--no-static", "--arrivals-by-step=20"]
    lines, outcome, status = run(capsys, "--preset=short-behind-long", *options)
    row = outcome["short_behind_long"]["mlx_paged"]
    assert status == 0 and outcome["engines"]["mlx_paged"]["streams"] == 16
    assert 40 <= row["short_ms"] <= 2 * row["short_alone_ms"] and row["long_ms"] > 700
    assert row["ratio"] == pytest.approx(row["short_ms"] / row["short_alone_ms"], abs=1e-3)
    (line,) = [line for line in lines if line.startswith("mlx_paged: p95 TTFT of short prompts")]
    assert f"{row['short_ms']:.0f} ms" in line and f"{row['ratio']:.2f}x" in line

"""mlx_paged.generate reports its steps on stderr and in a file."""

import json
import signal
import subprocess

import pytest
from test_generate_interrupt import interrupt_after, read_until
from test_generate_mistakes import assert_one_line_mistake

from mlx_paged.engine.engine import Engine
from mlx_paged.metrics.tick import NAMES, PHASES
from tests.support.commands.generate_runs import (
    CLASS,
    FUNCTION,
    ROOT,
    command,
    model_copy,
    read_jsonl,
)

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def test_every_tick_is_a_line(run, tmp_path):
    path, stats = tmp_path / "ticks.jsonl", tmp_path / "stats.json"
    path.write_text("of an earlier run\n")
    result = run(
        "-p", FUNCTION, "-p", CLASS, "-m", 9, "--metrics-jsonl", path, "--stats-json", stats
    )
    assert result.status == 0
    ticks, found = read_jsonl(path), json.loads(stats.read_text())
    assert [tick["index"] for tick in ticks] == list(range(found["ticks"]))
    assert all(list(tick) == list(NAMES) for tick in ticks)
    assert sum(tick["sampled"] for tick in ticks) == found["generation_tokens"] == 18
    assert sum(tick["prefill_tokens"] for tick in ticks) == found["prompt_tokens"]
    assert all(tick[name] is None for tick in ticks for name in PHASES)


def test_a_tick_can_be_read_before_the_next_one_begins(run, tmp_path, monkeypatch):
    path, step = tmp_path / "ticks.jsonl", Engine.step
    lines: list[int] = []

    def watched(engine: Engine):
        outputs = step(engine)
        lines.append(len(read_jsonl(path)) - len(engine.ticks))
        return outputs

    monkeypatch.setattr(Engine, "step", watched)
    run("-p", FUNCTION, "-m", 5, "--metrics-jsonl", path)
    assert lines == [0] * 5


def test_ctrl_c_leaves_the_ticks_that_were(run, tmp_path, monkeypatch):
    path = tmp_path / "ticks.jsonl"
    interrupt_after(monkeypatch, steps=5)
    assert run("-p", FUNCTION, "-m", 50, "--metrics-jsonl", path).status == 130
    assert [tick["index"] for tick in read_jsonl(path)] == list(range(5))


@pytest.mark.slow
def test_a_killed_command_leaves_whole_lines(tmp_path):
    endless = model_copy(
        tmp_path / "endless", config={"eos_token_id": None}, tokenizer_config={"eos_token": None}
    )
    path = tmp_path / "ticks.jsonl"
    arguments = ("--model", endless, "-p", FUNCTION, "-m", 20_000, "--metrics-jsonl", path)
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, cwd=ROOT) as running:
        try:
            read_until(running.stdout, b"return", seconds=120)
        finally:
            running.send_signal(signal.SIGKILL)
    assert len(read_jsonl(path)) >= 2


def test_a_file_that_cannot_be_written_is_noticed_before_the_work(run, tmp_path, asked):
    path = tmp_path / "no" / "such" / "directory"
    result = run("-p", FUNCTION, "--metrics-jsonl", path)
    assert_one_line_mistake(result, f"{path}: No such file or directory")
    assert not asked


def test_a_mistake_leaves_the_ticks_of_an_earlier_run(run, tmp_path):
    path = tmp_path / "ticks.jsonl"
    path.write_text("earlier\n")
    assert_one_line_mistake(
        run("-p", FUNCTION, "-m", 2000, "--kv-memory", 0.0001, "--metrics-jsonl", path),
        "fewer max_tokens",
    )
    assert path.read_text() == "earlier\n"


def test_a_disk_that_fills_up_stops_the_file_and_not_the_work(run, expected, caplog):
    result = run("-p", FUNCTION, "-p", CLASS, "-m", 9, "--metrics-jsonl", "/dev/full")
    assert result.status == 0 and expected(FUNCTION, 9) in result.out
    (record,) = caplog.records
    assert "no more ticks are written: " in record.message


@pytest.mark.parametrize("value", [0, "x"])
def test_a_threshold_is_above_0(run, value):
    result = run("-p", FUNCTION, "--spike-ms", value)
    assert_one_line_mistake(result, "--spike-ms: expected a number of milliseconds above 0")


def test_spikes_are_counted_by_their_first_cause(run, tmp_path):
    stats = tmp_path / "stats.json"
    result = run("-p", FUNCTION, "-m", 12, "--spike-ms", 0.001, "--stats-json", stats)
    causes = json.loads(stats.read_text())["spike_causes"]
    assert sum(causes.values()) == 12
    counted = ", ".join(f"{count} {cause}" for cause, count in causes.items())
    assert f"Slow steps by cause: {counted} (" in result.err
    assert "Slow steps" not in run("-p", FUNCTION, "-m", 12, "--spike-ms", 10**6).err


def test_a_profile_says_that_it_is_one(run, expected, tmp_path):
    path = tmp_path / "ticks.jsonl"
    result = run("-p", FUNCTION, "-p", CLASS, "-m", 9, "--profile", "--metrics-jsonl", path)
    assert expected(FUNCTION, 9) in result.out
    (line,) = [line for line in result.err.splitlines() if line.startswith("Profile: ")]
    assert "synchronised, slower than a normal run" in line
    assert all(name.removesuffix("_ms") in line for name in PHASES)
    assert all(tick["forward_ms"] > 0 for tick in read_jsonl(path))
    assert "Profile: " not in run("-p", FUNCTION, "-m", 2).err

"""Ctrl-C during mlx_paged.generate keeps the finished prompts; the status is 130."""

import io
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_paged.engine.engine import Engine
from mlx_paged.generate import command as generate
from tests.support import TIMEOUT
from tests.support.commands.generate_runs import (
    CLASS,
    FUNCTION,
    LONG,
    ROOT,
    RULE,
    command,
    jsonl,
    model_copy,
    read_jsonl,
)

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Raise Ctrl-C in the step that follows `steps` steps."""
    step, left = Engine.step, iter(range(steps))

    def interrupted(engine: Engine) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)


def test_ctrl_c_keeps_what_is_finished(run, expected, monkeypatch, tmp_path):
    """Each finished prompt keeps its number."""
    lengths = {FUNCTION: 50, CLASS: 3, LONG: 4}
    lines = [{"prompt": prompt, "max_tokens": length} for prompt, length in lengths.items()]
    output, stats = tmp_path / "results.jsonl", tmp_path / "stats.json"
    interrupt_after(monkeypatch, steps=5)
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    result = run("--prompts-file", file, "--output", output, "--stats-json", stats)
    assert result.status == 130
    assert result.err.endswith("interrupted: 2 of 3 prompts finished\n")
    assert [entry["prompt"] for entry in read_jsonl(output)] == [CLASS, LONG]
    assert json.loads(stats.read_text())["requests_finished"] == 2
    assert result.out == ""


def test_ctrl_c_prints_what_is_finished(run, expected, monkeypatch, tmp_path):
    lines = [{"prompt": FUNCTION, "max_tokens": 50}, {"prompt": CLASS, "max_tokens": 3}]
    interrupt_after(monkeypatch, steps=5)
    result = run("--prompts-file", jsonl(tmp_path / "prompts.jsonl", lines))
    assert f"{RULE} 2/2: {CLASS}\n{expected(CLASS, 3)}\n" in result.out
    assert FUNCTION not in result.out


def test_ctrl_c_leaves_the_streamed_text_of_a_single_prompt(run, expected, monkeypatch):
    interrupt_after(monkeypatch, steps=5)
    result = run("-p", FUNCTION, "-m", 50)
    assert result.status == 130
    assert result.out.strip("\n") and expected(FUNCTION, 50).startswith(result.out[:-1])
    assert f"{RULE}\nPrompt: " in result.err
    assert result.err.endswith("\ninterrupted: 0 of 1 prompts finished\n")


def test_ctrl_c_while_the_model_loads_is_no_traceback(run, monkeypatch):
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_model", interrupted)
    result = run("-p", FUNCTION)
    assert result.status == 130 and result.out == ""
    assert result.err == "interrupted\n"


def read_until(stream: io.BufferedReader, expected: bytes, seconds: float) -> bytes:
    """Read a pipe until its output contains `expected`."""
    seen, deadline = b"", time.monotonic() + seconds
    while expected not in seen:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(stream.fileno(), 4096) if ready else b""
        assert piece, f"{expected!r} did not come; this did: {seen!r}"
        seen += piece
    return seen


@pytest.fixture
def endless_model(tmp_path) -> Path:
    """The demo model without an end-of-sequence token."""
    return model_copy(
        tmp_path / "endless", config={"eos_token_id": None}, tokenizer_config={"eos_token": None}
    )


@pytest.mark.slow
def test_ctrl_c_ends_the_running_command_with_what_it_has(endless_model, expected, tmp_path):
    lengths = {FUNCTION: 2, CLASS: 20_000, LONG: 20_000}
    lines = [{"prompt": prompt, "max_tokens": length} for prompt, length in lengths.items()]
    file = jsonl(tmp_path / "prompts.jsonl", lines)
    output = tmp_path / "results.jsonl"
    with subprocess.Popen(
        command("--model", endless_model, "--prompts-file", file, "--output", output),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as running:
        try:
            deadline = time.monotonic() + TIMEOUT
            while not (output.exists() and output.read_bytes().endswith(b"\n")):
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=TIMEOUT)
        finally:
            running.kill()
    assert running.returncode == 130
    assert out == b""  # texts go to --output
    (result,) = map(json.loads, output.read_text().splitlines())
    assert (result["number"], result["text"]) == (1, expected(FUNCTION, 2))
    assert err.endswith(b"interrupted: 1 of 3 prompts finished\n")
    assert b"Traceback" not in err

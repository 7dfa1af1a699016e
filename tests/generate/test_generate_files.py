"""No run of the command replaces answers or prompts, unless it is told to."""

import io
import json
import os
import sys

import pytest
from test_generate_mistakes import assert_one_line_mistake

from mlx_paged.generate import report
from tests.support.commands.generate_runs import CLASS, FUNCTION, jsonl, read_jsonl

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def test_answers_of_an_earlier_run_are_kept(run, tmp_path):
    output = tmp_path / "results.jsonl"
    assert run("-p", FUNCTION, "-m", 2, "--output", output).status == 0
    before = output.read_bytes()
    refused = run("-p", CLASS, "-m", 2, "--output", output)
    assert_one_line_mistake(
        refused, f"--output {output} has {len(before)} bytes: expected --resume"
    )
    assert output.read_bytes() == before
    assert run("-p", CLASS, "-m", 2, "--output", output, "--overwrite").status == 0
    assert [record["prompt"] for record in read_jsonl(output)] == [CLASS]
    output.write_text("")
    assert run("-p", CLASS, "-m", 2, "--output", output).status == 0


def test_prompts_come_through_a_pipe(run, monkeypatch, tmp_path):
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (CLASS, FUNCTION, "é ="))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    output = tmp_path / "results.jsonl"
    assert run("--prompts-file", "-", "-m", 2, "--output", output).status == 0
    assert {record["prompt"] for record in read_jsonl(output)} == {CLASS, FUNCTION, "é ="}
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("given", [b'{"prompt": "\xff"}\n', b"", b"{}\n"])
def test_wrong_prompts_of_a_pipe_are_one_line(run, monkeypatch, given):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert_one_line_mistake(run("--prompts-file", "-"), "-")


def test_standard_input_is_one_prompt(run):
    assert_one_line_mistake(run("-p", "-", "--prompts-file", "-"), "two prompts are '-'")


@pytest.mark.parametrize("flag", ["--output", "--stats-json", "--metrics-jsonl"])
@pytest.mark.parametrize("way", ["same", "relative", "symlink", "hard link"])
def test_a_file_of_prompts_is_never_written(run, tmp_path, monkeypatch, flag, way):
    monkeypatch.chdir(tmp_path)
    prompts = jsonl(tmp_path / "prompts.jsonl", [{"prompt": FUNCTION}])
    before, other = prompts.read_bytes(), tmp_path / "link.jsonl"
    if way == "symlink":
        other.symlink_to(prompts)
    if way == "hard link":
        os.link(prompts, other)
    path = {"same": prompts, "relative": "./prompts.jsonl"}.get(way, other)
    modes = [["--overwrite"], ["--resume"]] if flag == "--output" else [[]]
    for mode in modes:
        result = run("--prompts-file", prompts, "-m", 2, flag, path, *mode)
        assert_one_line_mistake(result, f"{flag} {path} is the file of --prompts-file")
    assert prompts.read_bytes() == before


def test_two_results_do_not_share_a_file(run, tmp_path):
    path = tmp_path / "file"
    result = run("-p", FUNCTION, "-m", 2, "--output", path, "--stats-json", path)
    assert_one_line_mistake(result, f"--stats-json {path} is the file of --output")
    assert not path.exists()


def test_devices_are_written_without_a_question(run):
    result = run("-p", FUNCTION, "-m", 2, "--output", "/dev/null", "--stats-json", "/dev/null")
    assert result.status == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--overwrite"], "--overwrite is given: expected --output beside it"),
        (["--no-logprobs"], "--no-logprobs is given: expected --output beside it"),
        (["--output", "x", "--resume", "--overwrite"], "--resume is given beside --overwrite"),
        (
            ["--output", "x", "--logprobs", 1, "--no-logprobs"],
            "--logprobs is given beside --no-logprobs",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(run, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    assert_one_line_mistake(run("-p", FUNCTION, *flags), message)


def test_log_probabilities_can_be_left_out(run, tmp_path):
    output = tmp_path / "results.jsonl"
    run("-p", FUNCTION, "-m", 3, "--output", output, "--no-logprobs")
    (record,) = read_jsonl(output)
    assert "logprobs" not in record and len(record["tokens"]) == 3


def test_texts_are_not_printed_beside_a_file(run, tmp_path):
    for prompts in (["-p", FUNCTION], ["-p", FUNCTION, "-p", CLASS]):
        result = run(*prompts, "-m", 3, "--output", tmp_path / "results.jsonl", "--overwrite")
        assert result.out == "" and "Generation: " in result.err


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(run, monkeypatch):
    assert report.LINE_SECONDS == 60
    assert not sys.stderr.isatty()
    monkeypatch.setattr(report, "LINE_SECONDS", 0.0)
    lines = run("-p", FUNCTION, "-p", CLASS, "-m", 3).err.splitlines()
    shown = [line for line in lines if " texts, " in line]
    assert len(shown) >= 3 and shown[-1].startswith("00:00 2/2 texts, ")
    assert " texts, " not in run("-p", CLASS, "--verbose", "False").err

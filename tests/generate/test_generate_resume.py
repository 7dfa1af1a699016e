"""--output has each result as soon as it is there; --resume goes on where a killed run ended."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_generate_mistakes import assert_one_line_mistake

from mlx_paged.engine.engine import Engine
from tests.support.commands.generate_runs import CLASS, FUNCTION, LONG, jsonl, read_jsonl

pytest_plugins = ["tests.support.commands.generate_fixtures"]

LENGTHS = {FUNCTION: 40, CLASS: 3, LONG: 9, "x": 30}
TIMES = ("ttft_s", "seconds", "cached_prompt_tokens", "prefix_miss")


class Killed(BaseException):
    """Stands for a signal that ends the process."""


@pytest.fixture
def prompts(tmp_path) -> Path:
    lines = [{"prompt": prompt, "max_tokens": length} for prompt, length in LENGTHS.items()]
    return jsonl(tmp_path / "prompts.jsonl", lines)


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def killed(run, monkeypatch, output):
    """Run the command; it is killed after 20 steps."""

    def killed(*arguments: object) -> None:
        step, left = Engine.step, iter(range(20))

        def killing(engine: Engine) -> Any:
            if next(left, None) is None:
                raise Killed
            return step(engine)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Engine, "step", killing)
            run(*arguments, "--output", output, "--overwrite")

    return killed


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in r.items() if key not in TIMES} for r in records]


def test_a_killed_run_leaves_what_was_finished(killed, expected, prompts, output):
    killed("--prompts-file", prompts)
    records = read_jsonl(output)
    assert [record["number"] for record in records] == [2, 3]  # in the order of their ends
    assert [record["text"] for record in records] == [expected(CLASS, 3), expected(LONG, 9)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], ["--temp", 1, "--seed", 3, "--n", 2], ["--beams", 2], ["--n", 1, "--best-of", 3]],
    ids=["plain", "samples", "beams", "best"],
)
def test_a_resumed_run_gives_what_the_whole_run_gives(run, killed, prompts, output, options):
    arguments = ["--prompts-file", prompts, *options]
    assert run(*arguments, "--output", output).status == 0
    whole = read_jsonl(output)
    killed(*arguments)
    assert 0 < len(read_jsonl(output)) < len(whole)
    result = run(*arguments, "--output", output, "--resume")
    assert result.status == 0
    assert timeless(read_jsonl(output)) == timeless(whole)


def test_only_the_missing_prompts_are_computed(run, killed, asked, prompts, output):
    killed("--prompts-file", prompts)
    asked.clear()
    result = run("--prompts-file", prompts, "--output", output, "--resume")
    assert asked == [FUNCTION, "x"]
    assert result.out == ""
    assert result.err.startswith(f"2 of 4 prompts are answered in {output}\n")


def test_a_line_that_was_cut_off_is_dropped(run, asked, prompts, output):
    run("--prompts-file", prompts, "--output", output)
    whole = read_jsonl(output)
    output.write_bytes(output.read_bytes()[:-20])
    asked.clear()
    run("--prompts-file", prompts, "--output", output, "--resume")
    assert asked == ["x"] and timeless(read_jsonl(output)) == timeless(whole)


def test_samples_of_which_one_is_missing_are_drawn_again(run, asked, output):
    arguments = ["-p", FUNCTION, "-p", CLASS, "-m", 3, "--n", 2, "--temp", 1, "--output", output]
    run(*arguments)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]))
    asked.clear()
    run(*arguments, "--resume")
    assert asked == [CLASS]
    assert [(r["number"], r["index"]) for r in read_jsonl(output)] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


def test_a_prompt_that_failed_is_computed_again(run, asked, prompts, output):
    run("--prompts-file", prompts, "--output", output)
    records = read_jsonl(output)
    records[1] |= {"error": "ValueError: no", "finish_reason": "error", "text": ""}
    jsonl(output, records)
    asked.clear()
    assert run("--prompts-file", prompts, "--output", output, "--resume").status == 0
    assert asked == [CLASS] and "error" not in read_jsonl(output)[1]


def test_nothing_is_left_to_do_if_all_is_answered(run, asked, prompts, output):
    arguments = ["--prompts-file", prompts, "--output", output, "--resume"]
    run(*arguments)  # without a file it is a first run
    before = output.read_bytes()
    asked.clear()
    result = run(*arguments)
    assert (result.status, result.out, asked) == (0, "", [])
    assert result.err == f"4 of 4 prompts are answered in {output}\n"
    assert output.read_bytes() == before


@pytest.mark.parametrize("change", [["-m", 4], ["-p", "y"], ["--temp", 1], ["--n", 2]])
def test_other_prompts_or_options_are_refused(run, output, change):
    run("-p", FUNCTION, "--output", output, "-m", 3)
    before = output.read_bytes()
    arguments = ["-p", FUNCTION] if change[0] != "-p" else []
    result = run(*arguments, "-m", 3, *change, "--output", output, "--resume")
    assert_one_line_mistake(result, f"{output} line 1: prompt 1 or its options changed since")
    assert output.read_bytes() == before


@pytest.mark.parametrize("line", ["a poem", {"text": "x"}, [1], {"number": [1], "digest": ""}])
def test_a_file_of_something_else_is_refused(run, output, line):
    jsonl(output, [line])
    before = output.read_bytes()
    result = run("-p", FUNCTION, "--output", output, "--resume")
    assert_one_line_mistake(result, f"{output} line 1: expected a line of --output")
    assert output.read_bytes() == before


@pytest.mark.parametrize("flags", [["--resume"], ["--logprobs", 2]])
def test_what_is_for_a_file_needs_one(run, flags):
    message = f"{flags[0]} is given: expected --output beside it"
    assert_one_line_mistake(run("-p", FUNCTION, *flags), message)


def test_a_full_disk_is_one_line(run):
    result = run("-p", FUNCTION, "-m", 2, "--output", "/dev/full", "--verbose", "False")
    assert result.status == 1
    assert result.err == "mlx_paged.generate: error: /dev/full: No space left on device\n"


def test_a_seed_does_not_repeat_the_numbers_of_the_seed_before(run, output):
    """Prompt 2 of one seed is not prompt 1 of the next one."""
    texts = set()
    for seed in (1, 2, 3):
        run(
            *["-p", FUNCTION] * 2,
            "-m",
            16,
            "--temp",
            1,
            "--seed",
            seed,
            "--output",
            output,
            "--overwrite",
        )
        texts |= {json.dumps(record["tokens"]) for record in read_jsonl(output)}
    assert len(texts) == 6

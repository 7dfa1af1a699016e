"""Mistakes on the command line of mlx_paged.generate: one line on stderr, status 2, no output."""

import io
import subprocess
import sys
from typing import Any

import pytest

from mlx_paged import loading as model_loader
from mlx_paged.cli import demo_model_path
from tests.support import TIMEOUT
from tests.support.commands.generate_runs import (
    FUNCTION,
    ROOT,
    Result,
    command,
    jsonl,
    model_copy,
    read_jsonl,
)

pytest_plugins = ["tests.support.commands.generate_fixtures"]


def assert_one_line_mistake(result: Result, message: str) -> None:
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("mlx_paged.generate: error: ")
    assert result.err.count("\n") == 1 and result.err.endswith("\n")
    assert message in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-block-size", 12], "--kv-block-size: invalid choice: 12 (choose from 8, 16, 32)"),
        (["--kv-block-size", "x"], "--kv-block-size: invalid int value: 'x'"),
        (["--kv-memory", 0], "--kv-memory: expected a number of GB above 0, got '0'"),
        (["--kv-memory", "nan"], "--kv-memory: expected a number of GB above 0, got 'nan'"),
        (["--temp", -1], "--temp: expected a number >= 0, got '-1'"),
        (["--temp", "inf"], "--temp: expected a number >= 0, got 'inf'"),
        (["--top-p", 1.5], "--top-p: expected a number from 0 to 1, got '1.5'"),
        (["--min-p", -0.5], "--min-p: expected a number from 0 to 1, got '-0.5'"),
        (["--top-k", -1], "--top-k: expected a whole number >= 0, got '-1'"),
        (["--seed", "dice"], "--seed: expected a whole number >= 0, got 'dice'"),
        (["--max-tokens", 0], "--max-tokens/-m: expected a whole number >= 1, got '0'"),
        (["--max-tokens", 2.5], "--max-tokens/-m: expected a whole number >= 1, got '2.5'"),
        (["--max-running", 0], "--max-running: expected a whole number >= 1, got '0'"),
        (
            ["--prefill-chunk", 0],
            "--prefill-chunk/--prefill-step-size: expected a whole number >= 1, got '0'",
        ),
        (["--num-draft-tokens", 4], "--num-draft-tokens is given: expected --draft-model or"),
        (["--n", 0], "--n: expected a whole number >= 1, got '0'"),
        (["--n", 3, "--best-of", 2], "error: --n is 3: expected at most --best-of 2"),
        (["--beams", 2, "--n", 2], "n or --best-of is given with --beams: expected one of them"),
        (
            ["--beams", 10**6],
            "--prompt: num_beams is 1000000: expected",
        ),
        (
            ["--beams", 2, "--temp", 1],
            "--temp or --stop is given with --beams: expected one of them",
        ),
        (["--beams", 2, "--stop", "x"], "--temp or --stop is given with --beams: expected one of"),
        (["--max-stall-ms", 0], "--max-stall-ms: expected a number of milliseconds above 0"),
        (["--policy", "lifo"], "invalid choice: 'lifo' (choose from 'fcfs', 'priority', 'short"),
        (["--preempt", "all"], "invalid choice: 'all' (choose from 'newest', 'longest', 'fewest"),
        (["--xtc-threshold", 0.9], "--xtc-threshold: expected a number from 0 to 0.5, got '0.9'"),
        (["--repetition-penalty", -1], "--repetition-penalty: expected a number >= 0, got '-1'"),
        (["--logprobs", "all"], "--logprobs: expected a whole number >= 0, got 'all'"),
        (["--stop", ""], "--stop: expected a non-empty string"),
        (["--blocks", 3], "unrecognized arguments: --blocks 3"),
        (["--prompt"], "--prompt/-p: expected one argument"),
        (["--prompt", ""], "--prompt: the prompt is empty"),
        (["--kv-memory", 1e-6], "kv_memory is 1000 bytes, but one block of 16 tokens takes "),
        (["--kv-memory", 10**6], "kv_memory is 1000000000000000 bytes (1000000.000 GB), but "),
        (
            ["--max-tokens", 2000, "--kv-memory", 0.0001],
            "expected a shorter prompt, fewer max_tokens or a larger pool",
        ),
    ],
    ids=lambda value: " ".join(map(str, value))[:30].strip() if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(run, options, message):
    assert_one_line_mistake(run("-p", FUNCTION, *options), message)


def test_a_wrong_schema_names_its_flag(run, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "strin"}')
    result = run("-p", FUNCTION, "--json-schema", schema)
    assert_one_line_mistake(result, "error: --json-schema: Invalid type: strin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "type": "object"\n  "x": 1}', "line 3 column 3: not valid JSON: Expecting ',' del"),
        (b"[" * 100_000, "not valid JSON: nested too deep"),
        (b'["a"]' + b" " * 1000, 'expected a JSON object, got \'["a"]  '),
        (b'{"title": "caf\xe9"}', "not UTF-8: "),
    ],
    ids=["typo", "deep", "list", "latin"],
)
def test_a_schema_that_is_no_json_names_file_and_place(run, tmp_path, content, message):
    schema = tmp_path / "schema.json"
    schema.write_bytes(content)
    result = run("-p", FUNCTION, "--json-schema", schema)
    assert_one_line_mistake(result, f"--json-schema: {schema}: {message}")
    assert len(result.err) < 250 + len(str(schema))


def test_a_schema_in_the_place_of_its_file_is_told(run):
    result = run("-p", FUNCTION, "--json-schema", '{"type": "string"}')
    expected = "expected the name of a file that has the schema, got {"
    assert_one_line_mistake(result, f"--json-schema: {expected}")


def test_a_schema_without_llguidance_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}')
    result = run("-p", FUNCTION, "--json-schema", schema)
    message = "a grammar is given, but llguidance is missing: expected pip install '.[structured]'"
    assert_one_line_mistake(result, f"error: --json-schema: {message}")


def test_a_wrong_schema_of_a_line_names_its_line(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "json_schema": {"type": "strin"}}')
    result = run("--prompts-file", path)
    assert_one_line_mistake(result, "line 1: json_schema: Invalid type: strin")


def test_no_prompt_is_a_mistake(run):
    assert_one_line_mistake(run("-m", 3), "no prompt: give --prompt or --prompts-file")


def test_an_empty_stdin_is_a_mistake(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert_one_line_mistake(run("-p", "-"), "--prompt: the prompt is empty")


def test_a_missing_model_is_a_mistake(run, tmp_path):
    for path in ("nowhere", tmp_path / "no" / "model"):
        assert_one_line_mistake(run("-p", "x", "--model", path), f"model {path}: no such directory")


def test_something_that_is_no_model_is_a_mistake(run, tmp_path):
    (tmp_path / "file").write_text("not a model")
    (tmp_path / "empty").mkdir()
    model_copy(tmp_path / "odd", config={"model_type": "unheard_of"})
    for name, message in {
        "file": "it is a file: expected a folder with config.json and *.safetensors",
        "empty": "it has no config.json: expected a folder with config.json and *.safetensors",
        "odd": "cannot be loaded (",
    }.items():
        path = tmp_path / name
        assert_one_line_mistake(run("-p", "x", "--model", path), f"model {path}: {message}")


def test_a_model_without_a_tokenizer_is_a_mistake(run, tmp_path):
    """Without any of these files the library would make a tokenizer that has no tokens."""
    for kept in ((), ("tokenizer_config.json",)):
        path = tmp_path / str(len(kept))
        path.mkdir()
        for name in ("config.json", "model.safetensors", *kept):
            (path / name).symlink_to(demo_model_path() / name)
        message = f"model {path}: it has no tokenizer: expected tokenizer.json or tokenizer.model"
        assert_one_line_mistake(run("-p", "x", "--model", path), message)


def test_a_model_that_the_hub_does_not_give_is_a_mistake(run, monkeypatch):
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route\nand a second line")

    monkeypatch.setattr(model_loader, "load", unreachable)
    result = run("-p", "x", "--model", "someone/something")
    message = "model someone/something: not here and not from the hub (ConnectionError: no route):"
    message += " expected a folder, or the name of a model on the hub and a network"
    assert_one_line_mistake(result, message)


def test_a_model_that_cannot_be_paged_is_a_mistake(run, demo, monkeypatch):
    monkeypatch.setattr(demo[0], "model_type", "plamo3")
    assert_one_line_mistake(run("-p", "x"), "model type plamo3 is refused: ")


def test_a_name_of_an_adapter_is_printable(run, tmp_path):
    result = run("-p", "x", "--adapter", f"a\nb={tmp_path}")
    assert_one_line_mistake(result, "expected NAME=PATH with a printable name")


def test_a_missing_adapter_is_a_mistake(run, tmp_path):
    path = tmp_path / "adapter"
    result = run("-p", "x", "--model", demo_model_path(), "--adapter-path", path)
    assert_one_line_mistake(result, f"adapter {path}: no such directory")


def test_a_prompts_file_that_cannot_be_read_is_a_mistake(run, tmp_path):
    missing = tmp_path / "missing.jsonl"
    assert_one_line_mistake(run("--prompts-file", missing), f"{missing}: No such file")
    assert_one_line_mistake(run("--prompts-file", tmp_path), f"{tmp_path}: Is a directory")


def test_a_prompts_file_in_another_encoding_is_named(run, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "caf\u00e9"}\n'.encode("latin-1"))
    assert_one_line_mistake(run("--prompts-file", path), str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not valid JSON"),
        ({"prompt": "x", "top_q": 1}, 'unknown key "top_q"'),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x", "top_p": 2}, "top_p is 2: expected from 0 to 1"),
        ({"messages": [{"role": "user", "content": "x"}]}, '"messages" needs a chat template'),
    ],
    ids=[
        "not JSON",
        "unknown key",
        "empty prompt",
        "out of range",
        "no template",
    ],
)
def test_a_bad_line_is_reported_with_its_number(run, tmp_path, line, message):
    path = jsonl(tmp_path / "prompts.jsonl", [{"prompt": "fine"}, line])
    assert_one_line_mistake(run("--prompts-file", path), f"error: {path} line 2: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "x", "logit_bias": {"99999": 1}},
            "logit_bias names token 99",
        ),
        (
            {"prompt": "a b " * 1100},
            "2201 prompt tokens and max_tokens 1 are more than the model's context length",
        ),
    ],
    ids=["unknown token", "prompt beyond the context"],
)
def test_a_prompt_that_the_engine_refuses_fails_alone(run, expected, tmp_path, line, message):
    output = tmp_path / "results.jsonl"
    path = jsonl(tmp_path / "prompts.jsonl", [line, {"prompt": FUNCTION}])
    result = run("--prompts-file", path, "-m", 3, "--output", output)
    assert result.status == 1 and f"{path} line 1: {message}" in result.err
    refused, answered = read_jsonl(output)
    assert refused["error"].startswith(message) and refused["finish_reason"] == "error"
    assert answered["text"] == expected(FUNCTION, 3)
    jsonl(path, [line])
    alone = run("--prompts-file", path, "--output", output, "--overwrite")
    assert_one_line_mistake(alone, f"{path} line 1: {message}")
    assert len(read_jsonl(output)) == 2  # the answers of the run before


def test_the_flag_max_tokens_is_cut_to_what_the_context_leaves(run, tmp_path):
    output = tmp_path / "results.jsonl"
    path = jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a b " * 1020, "ignore_eos": True}])
    assert run("--prompts-file", path, "--output", output).status == 0
    (answer,) = read_jsonl(output)
    assert answer["prompt_tokens"] + answer["generation_tokens"] == 2048


@pytest.mark.parametrize("asked", [-1, 2048, 10**9])
def test_a_lines_own_max_tokens_are_cut_too_and_the_result_says_so(run, tmp_path, asked):
    prompt, output = "a b " * 1020, tmp_path / "results.jsonl"
    plain = {"prompt": prompt, "ignore_eos": True}
    head = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    for lines in (
        [plain | {"max_tokens": asked}, plain | {"max_tokens": 3}],
        [head | {"body": plain | {"model": "default_model", "max_tokens": asked}}],
    ):
        path = jsonl(tmp_path / "prompts.jsonl", lines)
        assert run("--prompts-file", path, "--output", output, "--overwrite").status == 0
        first, *others = read_jsonl(output)
        if "response" in first:
            usage = first["response"]["body"]["usage"]
            used, told = usage["total_tokens"], first["response"]["max_tokens"]
            assert told == usage["completion_tokens"]
        else:
            used, told = first["prompt_tokens"] + first["generation_tokens"], first["max_tokens"]
            assert told == first["generation_tokens"]
        assert used == 2048
        assert not any("max_tokens" in other for other in others)


def test_a_chat_that_the_template_refuses_is_reported_with_its_number(run, chat_model, tmp_path):
    lines = [{"messages": [{"role": role, "content": "hi"}]} for role in ("user", "robot")]
    path = jsonl(tmp_path / "prompts.jsonl", lines)
    result = run("--model", chat_model, "--prompts-file", path)
    assert_one_line_mistake(
        result, f"{path} line 2: the chat template refuses the messages: no robots here"
    )


@pytest.mark.parametrize("option", ["--output", "--stats-json"])
def test_a_file_that_cannot_be_written_is_noticed_before_the_work(run, option, tmp_path):
    path = tmp_path / "no" / "such" / "directory" / "file"
    result = run("-p", FUNCTION, option, path)
    assert_one_line_mistake(result, f"{path}: No such file or directory")


def test_a_mistake_leaves_the_results_of_an_earlier_run(run, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("earlier\n")
    assert_one_line_mistake(
        run("-p", FUNCTION, "--output", path, "--overwrite", "--model", "nowhere"), "nowhere"
    )
    assert path.read_text() == "earlier\n"


@pytest.mark.slow
def test_the_command_ends_with_status_2_after_a_mistake():
    done = subprocess.run(
        command("--max-tokens", 0), capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT
    )
    assert_one_line_mistake(Result(done.returncode, done.stdout, done.stderr), "--max-tokens")


@pytest.mark.parametrize("name", ["model.gguf", "folder/model.gguf", "folder"])
def test_gguf_is_named_as_the_cause(run, tmp_path, name):
    (tmp_path / "folder").mkdir()
    for file in ("model.gguf", "folder/model.gguf"):
        (tmp_path / file).write_bytes(b"GGUF")
    path = tmp_path / name
    message = f"model {path}: GGUF is not read: expected a folder with"
    assert_one_line_mistake(run("-p", FUNCTION, "--model", path), message)

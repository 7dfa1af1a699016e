"""OpenAI's batch lines in --prompts-file: read and answered as the server does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from test_generate_mistakes import assert_one_line_mistake

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.engine import Engine
from tests.support import TIMEOUT
from tests.support.commands.generate_runs import CLASS, FUNCTION, jsonl, read_jsonl

pytest_plugins = ["tests.support.commands.generate_fixtures"]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
TYPES = {CHAT: ChatCompletion, TEXT: Completion, RESPONSES: Response}


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def batch(run, tmp_path):
    """Run a file of these lines. Returns the exit status and the lines of the answers."""

    def batch(*lines: Any, flags: tuple[object, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
        output = tmp_path / "answers.jsonl"
        path = jsonl(tmp_path / "batch.jsonl", lines)
        result = run("--prompts-file", path, "--output", output, *flags)
        return result.status, read_jsonl(output)

    return batch


def answered(record: dict[str, Any]) -> dict[str, Any]:
    """The body of an answer without an error."""
    assert record["error"] is None and record["response"]["status_code"] == 200
    assert record.keys() == {"id", "custom_id", "response", "error"}
    assert record["response"].keys() == {"status_code", "request_id", "body"}
    return record["response"]["body"]


def test_openais_types_parse_the_answers_of_all_urls(batch, expected):
    many = {"n": 2, "logprobs": 1, "temperature": 1, "seed": 5}
    lines = [
        line("chat", CHAT, model="default_model", messages=HELLO, max_tokens=4, logprobs=True),
        line("text", TEXT, prompt=FUNCTION, max_tokens=9),
        line("answer", RESPONSES, input="Hello", max_output_tokens=4),
        line("texts", TEXT, prompt=[FUNCTION, CLASS], max_tokens=3, **many),
    ]
    status, records = batch(*lines)
    assert status == 0 and [record["custom_id"] for record in records] == [
        each["custom_id"] for each in lines
    ]
    bodies = [answered(record) for record in records]
    for body, each in zip(bodies, lines, strict=True):
        TYPES[each["url"]].model_validate(body, strict=True)
    chat, text, answer, texts = bodies
    assert len(chat["choices"][0]["logprobs"]["content"]) == 4
    assert text["choices"][0]["text"].lstrip() == expected(FUNCTION, 9).lstrip()
    assert text["usage"]["completion_tokens"] == 9
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in texts["choices"]}) > 1


def test_fields_are_obeyed_as_by_the_server(batch, expected):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    text = expected(FUNCTION, 40).lstrip()
    stop = text[12:15]
    status, records = batch(
        line("stop", TEXT, prompt=FUNCTION, max_tokens=40, stop=stop),
        line("json", CHAT, messages=HELLO, response_format=form, max_tokens=60),
        line("bias", TEXT, prompt=FUNCTION, max_tokens=2, logit_bias={"7": 100}, logprobs=0),
        flags=("--max-tokens", 50),
    )
    assert status == 0
    stopped, structured, biased = (answered(record)["choices"][0] for record in records)
    assert stopped["text"].lstrip() == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"
    assert json.loads(structured["message"]["content"])["a"] in (1, 2)
    assert [entry["id"] for entry in biased["logprobs"]["content"]] == [7, 7]


def test_the_flags_are_the_defaults_of_fields(batch):
    records = batch(
        line("flags", TEXT, prompt=FUNCTION, ignore_eos=True),
        line("own", TEXT, prompt=FUNCTION, ignore_eos=True, max_tokens=3),
        flags=("--max-tokens", 7, "--temp", 1, "--seed", 3),
    )[1]
    counts = [answered(record)["usage"]["completion_tokens"] for record in records]
    assert counts == [7, 3]


BAD = {
    "field of a wrong type": (line("a", CHAT, messages=HELLO, top_p="x"), 400, "top_p"),
    "no messages": (line("a", CHAT, messages=[]), 400, "messages"),
    "field of responses": (line("a", RESPONSES, input=7), 400, "input"),
    "stream": (line("a", TEXT, prompt="x", stream=True), 400, "stream"),
    "priority": (line("a", TEXT, prompt="x", priority=1), 400, "priority"),
    "unknown token": (line("a", TEXT, prompt="x", logit_bias={"99999": 1}), 400, "logit_bias"),
    "unknown prompt token": (line("a", TEXT, prompt=[99999]), 400, "prompt"),
    "grammar": (line("a", TEXT, prompt="x", guided_regex="("), 400, "guided_regex"),
    "prompt too long": (line("a", TEXT, prompt="a b " * 1100), 400, "prompt"),
    "other model": (line("a", TEXT, prompt="x", model="gpt-5"), 404, "model"),
    "not finite": ('{"custom_id": "a", "url": "/v1/completions", "body": {"top_p": NaN}}', 400, ""),
    "url": (line("a", "/v1/embeddings", input="x"), 400, ""),
    "method": (line("a", TEXT, prompt="x") | {"method": "GET"}, 400, ""),
    "no body": ({"custom_id": "a", "method": "POST", "url": TEXT}, 400, ""),
    "body": (line("a", TEXT) | {"body": "x"}, 400, ""),
    "no id": ({"method": "POST", "url": TEXT, "body": {"prompt": "x"}}, 400, ""),
    "same id": (line("fine", TEXT, prompt="x"), 400, ""),
    "not JSON": ("{", 400, ""),
    "no object": ("17", 400, ""),
    "own form": ({"prompt": "x"}, 400, ""),
}


@pytest.mark.parametrize(("bad", "code", "param"), BAD.values(), ids=BAD)
def test_a_wrong_line_fails_alone(batch, bad, code, param):
    fine = line("fine", TEXT, prompt=FUNCTION, max_tokens=2)
    status, (first, second) = batch(fine, bad)
    assert status == 1 and answered(first)["usage"]["completion_tokens"] == 2
    assert second["response"]["status_code"] == code
    error = second["response"]["body"]["error"]
    assert second["error"]["message"] == error["message"]
    assert (error["param"] or "") == param


def test_a_job_of_wrong_lines_only_has_all_their_answers(batch):
    status, records = batch(line("a", CHAT), line("b", TEXT))
    assert status == 1
    assert [record["response"]["status_code"] for record in records] == [400, 400]


def test_a_resumed_job_computes_failed_and_missing_lines_only(run, batch, asked, tmp_path):
    lines = [
        line("a", TEXT, prompt=FUNCTION, max_tokens=2),
        line("b", TEXT, prompt="x", max_tokens=0),
        line("c", CHAT, messages=HELLO, max_tokens=2),
    ]
    first = batch(*lines)[1]
    output = tmp_path / "answers.jsonl"
    jsonl(output, first[:2])
    lines[1]["body"]["max_tokens"] = 1  # mended
    asked.clear()
    status, second = batch(*lines, flags=("--resume",))
    assert status == 0 and len(asked) == 2
    assert second[0] == first[0]
    assert [record["custom_id"] for record in second] == ["a", "b", "c"]
    lines[0]["body"]["max_tokens"] = 3
    result = run("--prompts-file", jsonl(tmp_path / "b", lines), "--output", output, "--resume")
    assert_one_line_mistake(result, f"{output} line 1: prompt 1 or its options")


def test_without_output_the_answers_are_printed(run, tmp_path):
    path = jsonl(tmp_path / "batch.jsonl", [line("a", TEXT, prompt=FUNCTION, max_tokens=2)])
    result = run("--prompts-file", path)
    assert json.loads(result.out)["custom_id"] == "a"


@pytest.mark.parametrize(
    "flags",
    [["--prompt", "x"], ["--stop", "x"], ["--n", 2], ["--beams", 2], ["--system-prompt", "x"]],
    ids=str,
)
def test_a_flag_without_effect_is_refused(run, tmp_path, flags):
    path = jsonl(tmp_path / "batch.jsonl", [line("a", TEXT, prompt=FUNCTION)])
    assert_one_line_mistake(run("--prompts-file", path, *flags), f"{flags[0]} is given beside")


def test_fields_without_effect_are_named_once(run, tmp_path):
    lines = [line(name, TEXT, prompt="x", max_tokens=1, colour=1) for name in "ab"]
    result = run("--prompts-file", jsonl(tmp_path / "batch.jsonl", lines))
    assert result.err.count("colour") == 1


def test_an_engine_that_fails_is_an_error_of_the_line(batch, monkeypatch):
    def failing(self: Engine, choice: Any) -> None:
        self._fail(choice.request, RuntimeError("no luck"))

    monkeypatch.setattr(Engine, "_append", failing)
    status, (record,) = batch(line("a", TEXT, prompt="x"))
    assert status == 1 and record["response"]["status_code"] == 500
    assert "no luck" in record["error"]["message"]


def test_batch_lines_need_no_package_of_the_server(tmp_path):
    """Only the extra "server" has these."""
    path, output = jsonl(tmp_path / "b", [line("a", CHAT, messages=HELLO)]), tmp_path / "out"
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'prometheus_client'): sys.modules[name] = None\n"
        "from mlx_paged.generate.__main__ import main\n"
        f"sys.exit(main(['--kv-memory', '.02', '-m', '2', '--no-prewarm', '--prompts-file', "
        f"{str(path)!r}, '--output', {str(output)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert answered(read_jsonl(output)[0])["usage"]["completion_tokens"] == 2


def test_a_model_has_the_names_that_the_server_gives_it(batch):
    names = "default_model", str(demo_model_path()), Path(demo_model_path()).name
    lines = [line(name, TEXT, prompt="x", max_tokens=1, model=name) for name in names]
    assert batch(*lines)[0] == 0

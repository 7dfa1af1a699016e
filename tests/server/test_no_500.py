"""No input makes the server fail, and what it sends is JSON that any parser reads."""

import json
from dataclasses import replace

import pytest

from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.json_text import MAX_DEPTH, MAX_FIELDS, MAX_MARKS, parse
from mlx_paged.server import answers
from tests.support.commands.server_harness import TEMPLATE, exchange, post, tool_format, wait_until

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--chat-template", TEMPLATE, "--max-request-bytes", "8000000"
TURNS = [{"role": "user", "content": "def f"}]
VALID = {
    "/v1/completions": {"prompt": "def f", "max_tokens": 1},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/responses": {"input": "def f", "max_output_tokens": 1},
    "/tokenize": {"content": "def f"},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": TURNS},
    "/v1/estimate": {"prompt": "def f"},
}
STRANGE = {
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "beyond floats": "1e999",
    "half a character": '"\\udfff"',
    "half a character in a name": '{"\\ud800": 1}',
    "deep": "[" * 980 + "]" * 980,
    "long integer": "9" * 4000,
    "too long integer": "9" * 5000,
}
FIELDS = ("metadata", "tools", "model", "unknown", "user", "logit_bias", "include", "stop", "text")


def strict(content):
    """What a parser makes of it that knows only the JSON of the standard."""

    def refuse(constant):
        raise ValueError(constant)

    found = json.loads(content.decode(), parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()
    return found


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE)
def test_what_json_cannot_say_is_refused_by_name(server, path, value):
    for field in FIELDS:
        for text in (value, f'{{"a": [{value}]}}'):
            for more in ("", ', "stream": true'):
                body = json.dumps(VALID[path])[:-1] + f', "{field}": {text}{more}}}'
                status, headers, content = exchange(server, "POST", path, body)
                assert status == 400 and headers["content-type"] == "application/json"
                assert headers["retry-after"] is None
                message = strict(content)["error"]["message"]
                assert message.startswith(f"{field}: expected") or "is not JSON" in message


@pytest.mark.parametrize("path", VALID)
def test_names_of_fields_that_cannot_be_written_are_refused(server, path):
    for name in ("\ud800", "a\udfffb"):
        status, _, content = exchange(server, "POST", path, json.dumps(VALID[path] | {name: 1}))
        assert status == 400 and "half a character" in strict(content)["error"]["message"]


@pytest.mark.parametrize("path", VALID)
def test_strange_values_within_json_are_no_failures(server, path):
    """Each known field, and names that an answer may tell or the log."""
    for field in ("include", "role_mapping", "metadata", "model", "reasoning", "text", "a\x1b[31m"):
        for value in (5, [5], {"type": ["x"]}, [{"role": {}}], 10**99, "\x00", 1e-300):
            body = VALID[path] | {field: value}
            status, _, content = exchange(server, "POST", path, json.dumps(body))
            assert status < 500 and strict(content)
    for field in {"messages", "input"} & VALID[path].keys():
        turns = [{"role": {}, "content": "a"}]
        assert post(server, VALID[path] | {field: turns}, path)[0] == 400


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("repetition_penalty", 1e-45, 400),
        ("repetition_penalty", 1e300, 400),
        ("temperature", 1e-300, 200),
        ("logit_bias", {"5": 100.5}, 400),
        ("logit_bias", {"5": -1e300}, 400),
        ("logit_bias", {str(2**61 + 4): 1}, 400),
        ("logit_bias", {"-1": 1}, 400),
        ("logit_bias", {"²": 1}, 400),
        ("stop_token_ids", [2**61], 400),
        ("priority", 10**90, 400),
        ("logprobs", 21, 400),
        ("logprobs", 10**30, 400),
        ("top_logprobs", 21, 400),
    ],
    ids=str,
)
def test_numbers_beyond_what_is_computed_are_refused(server, name, value, status):
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = VALID[path] | {"logprobs": True, name: value}
        found, _, content = exchange(server, "POST", path, json.dumps(body))
        assert found == status and strict(content)
        if status == 400:
            assert strict(content)["error"]["param"] == name


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 980, 100_000])
def test_arguments_and_schemas_as_texts_have_as_few_levels_as_bodies(server, depth):
    deep = "[" * depth + "]" * depth
    function = {"name": "f", "arguments": f'{{"a": {deep}}}'}
    call = {"id": "c", "type": "function", "function": function}
    turns = [*TURNS, {"role": "assistant", "tool_calls": [call]}]
    item = {"type": "function_call", "call_id": "c"} | function
    for path, fields, name in (
        ("/v1/chat/completions", {"messages": turns}, "messages[1].tool_calls[0]"),
        ("/v1/responses", {"input": [item]}, "input[0].arguments"),
        ("/v1/chat/completions", {"guided_json": deep}, "guided_json"),
    ):
        status, _, content = exchange(server, "POST", path, json.dumps(VALID[path] | fields))
        assert status == 400 and name in strict(content)["error"]["message"]


def test_bodies_with_too_many_parts_are_refused():
    depth = MAX_DEPTH - 2
    assert parse(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(ValueError, match="a: expected at most 200 levels"):
        parse(b'{"a":' + b"[" * (depth + 3) + b"]" * (depth + 3) + b"}")
    fields = {f"f{i}": 1 for i in range(MAX_FIELDS)}
    assert parse(json.dumps(fields).encode()) == fields
    with pytest.raises(ValueError, match="the body has 1001 fields: expected at most 1000"):
        parse(json.dumps(fields | {"more": 1}).encode())
    with pytest.raises(ValueError, match="commas and brackets: expected at most"):
        parse(b"[" + b"1," * MAX_MARKS + b"1]")
    assert parse(b'\xef\xbb\xbf{"a": "\xf0\x9f\x98\x80\\ud83d\\ude00"}') == {"a": "😀😀"}


def test_names_that_other_apis_derive_are_counted(server):
    for path, field in (("/v1/responses", "reasoning"), ("/v1/messages", "output_config")):
        body = VALID[path] | {field: {f"f{i}": 1 for i in range(MAX_FIELDS)}}
        status, _, answer = post(server, body, path)
        assert status == 400 and "fields: expected at most 1000" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["NaN", '"\\\\ud800"', "1e999"], ids=str)
def test_calls_that_json_has_not_are_text(server, path, stream, value, monkeypatch):
    """A model writes them, and a client's grammar may make it do so."""
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'.replace(
        "\\\\", "\\"
    )
    whole = CompletionChoice.add

    def says(self, output):
        return whole(self, replace(output, text="" if self.num_tokens else call))

    monkeypatch.setattr(CompletionChoice, "add", says)
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = {
        "/v1/chat/completions": [{"type": "function", "function": function}],
        "/v1/messages": [{"name": "f", "input_schema": {"type": "object"}}],
        "/v1/responses": [{"type": "function", **function}],
    }[path]
    with tool_format(server, "json_tools"):
        body = VALID[path] | {"tools": tools, "stream": stream}
        status, _, content = exchange(server, "POST", path, json.dumps(body))
    assert status == 200
    lines = content.split(b"\n") if stream else [b"data: " + content]
    told = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
    assert told and all(strict(each) for each in told)
    assert b"<tool_call>" in content


@pytest.mark.parametrize("path", VALID)
def test_a_failure_that_nobody_foresaw_is_json_and_ends_alone(server, path, monkeypatch, caplog):
    def fail(*_):
        raise LookupError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_paged.server.app._fields", fail)
        status, headers, content = exchange(server, "POST", path, json.dumps(VALID[path]))
    assert status == 500 and headers["content-type"] == "application/json"
    error = strict(content)["error"]
    assert error["message"] == "the server failed"
    assert error["type"] == ("api_error" if "messages" in path else "server_error")
    assert "unforeseen" not in content.decode()
    wait_until(lambda: "unforeseen" in caplog.text)  # the log's lines come after the answer
    assert exchange(server, "POST", path, json.dumps(VALID[path]))[0] == 200
    assert answers.written({"a": "\ud800"}) == '{"a": "\\ud800"}'


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_while_a_text_is_generated_is_the_clients(server, stream):
    """More alternatives at one place than llguidance takes."""
    keys = {f"p{i}x": {"type": "integer"} for i in range(2100)}
    schema = {"type": "object", "properties": keys, "additionalProperties": False}
    body = VALID["/v1/completions"] | {"guided_json": schema, "max_tokens": 9, "stream": stream}
    status, _, content = exchange(server, "POST", "/v1/completions", json.dumps(body))
    error = content if not stream else content.rpartition(b"data: ")[2]
    assert status == (200 if stream else 400)
    assert strict(error)["error"]["type"] == "invalid_request_error"
    assert strict(error)["error"]["param"] == "guided_json"

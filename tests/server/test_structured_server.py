"""Structured outputs and forced tool calls, with their clients over a socket."""

import json
import re
import threading
from typing import Literal

import pytest
from jsonschema import validate
from mlx_lm.tool_parsers import json_tools, pythonic
from pydantic import BaseModel

from mlx_paged.sampling.grammar import Grammars
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    SCHEMA,
    TEMPLATE,
    TIMEOUT,
    client,
    demo,
    post,
    tool_format,
    written,
)

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--chat-template", TEMPLATE
CHAT = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 80}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]


def content(server, **fields):
    status, _, answer = post(server, CHAT | fields, "/v1/chat/completions")
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    return answer["choices"][0]["message"]["content"]


def test_a_schema_of_response_format_is_obeyed(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    validate(json.loads(content(server, response_format=form)), SCHEMA)
    assert content(server, response_format={"type": "text"}, max_tokens=80, stop="\n") is not None


def test_openai_parses_an_answer_into_a_class(server):
    class Thing(BaseModel):
        color: Literal["red", "green"]
        count: Literal[1, 2, 3]

    parsed = client(server).chat.completions.parse(
        model=MODEL, messages=CHAT["messages"], max_tokens=80, response_format=Thing
    )
    assert isinstance(parsed.choices[0].message.parsed, Thing)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("json", SCHEMA, None),
        ("json", json.dumps(SCHEMA), None),
        ("regex", "[ab]{3}c", "[ab]{3}c"),
        ("choice", ['say "no"', "yes\n"], '(say "no"|yes\n)'),
        ("grammar", 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/', "x[0-9]{2}"),
    ],
)
def test_fields_of_vllm_are_obeyed(server, nested, kind, value, pattern):
    fields = {"structured_outputs": {kind: value}} if nested else {f"guided_{kind}": value}
    text = content(server, **fields)
    if pattern is None:
        validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"guided_json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
        ({"guided_regex": "(" * 9}, "unclosed group"),
        ({"guided_regex": "a" * 70_000}, "65536"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "nothing beside guided_regex"),
        ({"guided_choice": "b"}, "guided_choice"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": {"whitespace": 1}}, "structured_outputs.whitespace"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS}, "none is known"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_obeyed_is_refused_with_the_reason(server, fields, reason):
    status, _, answer = post(server, CHAT | fields, "/v1/chat/completions")
    message = answer["error"]["message"]
    assert status == 400 and reason.replace("none is", "no grammar is") in message


DEEP = {
    "guided_json": {"guided_json": "deep"},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": "deep"}}
    },
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": "deep"}}],
        "tool_choice": "required",
    },
    "input_schema": {
        "tools": [{"name": "f", "input_schema": "deep"}],
        "tool_choice": {"type": "any"},
    },
    "n": {"n": "deep"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("field", DEEP)
def test_deep_nesting_is_a_mistake_of_the_client(server, field):
    """Whether llguidance gives up, or Python while it reads or writes JSON."""
    path = "/v1/messages" if field == "input_schema" else "/v1/chat/completions"
    with tool_format(server, json_tools):
        for depth in (200, 900, *range(960, 1000), 5000):
            deep = '{"items": ' * depth + "true" + "}" * depth
            body = json.dumps(CHAT | DEEP[field]).replace('"deep"', deep)
            status, _, answer = post(server, body.encode(), path)
            assert status == 400 and answer["error"]["message"], depth


@pytest.mark.sampled(4)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_if_it_must_be(server, choice, stream):
    with tool_format(server, json_tools, problem="planted"):
        answer = client(server).chat.completions.create(
            model=MODEL,
            messages=CHAT["messages"],
            max_tokens=200,
            tools=TOOLS,
            tool_choice=choice,
            temperature=1.0,
            seed=3,
            stream=stream,
        )
        if stream:
            parts = [part.choices[0] for part in answer]
            calls = [call for part in parts for call in part.delta.tool_calls or []]
            reason = parts[-1].finish_reason
        else:
            calls = answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
    assert calls and reason in ("tool_calls", "length")
    for call in calls:
        assert call.function.name in (("f", "g") if choice == "required" else ("g",))
        validate(json.loads(call.function.arguments), SCHEMA)


def test_a_format_without_a_grammar_is_refused_by_name(server):
    with tool_format(server, pythonic):
        body = CHAT | {"tools": TOOLS, "tool_choice": "required"}
        status, _, answer = post(server, body, "/v1/chat/completions")
    assert status == 400 and "(pythonic)" in answer["error"]["message"]


@pytest.mark.slow
def test_a_schema_that_takes_long_does_not_delay_others(server, monkeypatch):
    """It is compiled in a thread of its own; a stream comes to its end meanwhile."""
    begun, may_end, answers = threading.Event(), threading.Event(), []
    whole = Grammars._compile

    def slow(self, kind, source):
        begun.set()
        assert may_end.wait(TIMEOUT)
        return whole(self, kind, source)

    def ask():
        body = CHAT | {"guided_regex": "a slow one"}
        answers.append(post(server, body, "/v1/chat/completions"))

    monkeypatch.setattr(Grammars, "_compile", slow)
    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(TIMEOUT)
    options = {"model": MODEL, "prompt": CODE, "max_tokens": 50}
    stream = client(server).completions.create(stream=True, **options)
    assert "".join(part.choices[0].text for part in stream) == written(CODE, 50)
    assert not answers
    may_end.set()
    asking.join()
    ((status, _, answer),) = answers
    assert status == 200 and answer["choices"][0]["message"]["content"] == "a slow one"


def test_sources_that_take_too_long_are_answered(server, monkeypatch):
    refusals = [ValueError("the compiler takes more than 10 s"), RuntimeError("busy")]

    def late(self, make):
        raise refusals.pop(0)

    monkeypatch.setattr(Grammars, "_in_time", late)
    for status, name in ((400, "late"), (400, "late"), (503, "other")):
        body = CHAT | {"guided_regex": name}
        found, _, answer = post(server, body, "/v1/chat/completions")
        assert found == status and answer["error"]["message"]
    assert not refusals


def test_a_developers_turn_is_a_systems_turn(server):
    """OpenAI's newer clients call it so."""
    user = {"role": "user", "content": "def f"}
    counts = []
    for role in ("system", "developer"):
        body = {"messages": [{"role": role, "content": "x"}, user], "max_tokens": 1}
        _, _, answer = post(server, body, "/v1/chat/completions")
        counts.append(answer["usage"]["prompt_tokens"])
    assert counts == [len(demo()[1].encode("system: x\nuser: def f\n"))] * 2

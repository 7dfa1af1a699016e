"""Structured outputs and forced tool calls, with their clients over a socket."""

import json
import re
import threading
from typing import Literal

import pytest
from jsonschema import validate
from pydantic import BaseModel

from mlx_paged.formats.json_tools import JsonTools
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.thoughts import Thoughts
from mlx_paged.protocol import prompts
from mlx_paged.sampling.grammar import Grammars
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    SCHEMA,
    TEMPLATE,
    TIMEOUT,
    client,
    demo,
    exchange,
    foreign_format,
    live,
    model_format,
    only_model,
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
    with tool_format(server, "json_tools"):
        for depth in (200, 900, *range(960, 1000), 5000):
            deep = '{"items": ' * depth + "true" + "}" * depth
            body = json.dumps(CHAT | DEEP[field]).replace('"deep"', deep)
            status, _, answer = post(server, body.encode(), path)
            assert status == 400 and answer["error"]["message"], depth


@pytest.mark.sampled(4)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_if_it_must_be(server, choice, stream):
    with tool_format(server, "json_tools", problem="planted"):
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


ANSWER = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
ANSWER["additionalProperties"] = False
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
BY_API = {
    "/v1/chat/completions": (
        CHAT | {"parallel_tool_calls": False},
        {"tools": TOOLS, "response_format": FORMAT},
        "required",
    ),
    "/v1/responses": (
        {"input": "def f", "max_output_tokens": 80, "parallel_tool_calls": False},
        {
            "tools": [{"type": "function"} | tool["function"] for tool in TOOLS],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": ANSWER}},
        },
        "required",
    ),
    "/v1/messages": (
        CHAT,
        {
            "tools": [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
        },
        {"type": "any", "disable_parallel_tool_use": True},
    ),
}
"""By path: a body, tools beside a schema, and the choice of tools that demands a call."""
NAMED = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "g"}},
    "/v1/responses": {"type": "function", "name": "g"},
    "/v1/messages": {"type": "tool", "name": "g"},
}


def read(server, path, body, stream):
    """The texts, the calls and the thoughts of an answer, and its headers, whatever its API."""
    raw = json.dumps(body | {"stream": stream}).encode()
    status, headers, content = exchange(server, "POST", path, raw)
    assert status == 200, content
    texts, calls, thoughts = [], [], []
    if path == "/v1/chat/completions" and stream:
        lines = [line[6:] for line in content.decode().split("\n\n") if line.startswith("data: {")]
        parts = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
        text = "".join(part.get("content") or "" for part in parts)
        thoughts = [part["reasoning"] for part in parts if "reasoning" in part]
        calls = [call["function"] for part in parts for call in part.get("tool_calls", ())]
        texts = [text] if text else []
    elif path == "/v1/chat/completions":
        message = json.loads(content)["choices"][0]["message"]
        texts = [message["content"]] if message["content"] else []
        thoughts = [message["reasoning"]] if "reasoning" in message else []
        calls = [call["function"] for call in message.get("tool_calls", ())]
    elif path == "/v1/responses":
        answer = json.loads(content) if not stream else None
        if stream:
            *_, last = (x for x in content.decode().split("\n") if x.startswith("data: "))
            answer = json.loads(last[6:])["response"]
        texts = [i["content"][0]["text"] for i in answer["output"] if i["type"] == "message"]
        thoughts = [i for i in answer["output"] if i["type"] == "reasoning"]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
    else:
        blocks = blocks_of(content) if stream else json.loads(content)["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block for block in blocks if block["type"] == "thinking"]
        calls = [
            {"name": block["name"], "arguments": json.dumps(block["input"])}
            for block in blocks
            if block["type"] == "tool_use"
        ]
    return texts, calls, thoughts, headers


def blocks_of(content):
    """The content blocks of a stream of Anthropic's."""
    blocks = []
    for line in content.decode().split("\n"):
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            blocks.append(event["content_block"])
        elif event.get("type") == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] += delta[name]
    return blocks


CASES = [(path, stream) for path in BY_API for stream in (False, True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["json_tools", "longcat", "mistral"])
@pytest.mark.parametrize(("path", "stream"), CASES)
def test_tools_beside_a_schema_are_a_call_or_an_answer(server, path, stream, name):
    body, fields, _ = BY_API[path]
    kinds = set()
    with tool_format(server, name):
        for seed in range(8):
            sampled = {"temperature": 1.5, "seed": seed, "top_k": 0}
            texts, calls, _, headers = read(server, path, body | fields | sampled, stream)
            assert "x-ignored-fields" not in headers
            assert bool(texts) != bool(calls)
            kinds.add("call" if calls else "answer")
            for text in texts:
                validate(json.loads(text), ANSWER)
            for call in calls:
                assert call["name"] in ("f", "g")
                validate(json.loads(call["arguments"]), SCHEMA)
    assert kinds == {"call", "answer"}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("path", "stream"), CASES)
def test_a_tool_that_must_be_called_goes_before_a_schema(server, path, stream, named):
    body, fields, must = BY_API[path]
    choice = {"tool_choice": NAMED[path] if named else must}
    with tool_format(server, "json_tools", problem="planted"):
        for seed in range(3):
            sampled = {"temperature": 1.0, "seed": seed}
            texts, calls, _, _ = read(server, path, body | fields | choice | sampled, stream)
            assert calls and not texts
            for call in calls:
                assert call["name"] in (("g",) if named else ("f", "g"))
                validate(json.loads(call["arguments"]), SCHEMA)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "stream"), CASES)
def test_a_call_or_an_answer_follows_a_thought(server, path, stream, monkeypatch):
    """A thought here ends with its line."""
    marks = only_model(server).format.marks
    form = JsonTools(marks, Thoughts("", "\n"))
    body, fields, _ = BY_API[path]
    more = {"max_output_tokens" if "input" in body else "max_tokens": 400, "temperature": 1.5}
    kinds = []
    with model_format(server, form):
        monkeypatch.setattr(prompts, "_begin", lambda *_: Begin.THOUGHT)
        for seed in range(8):
            given = body | fields | more | {"seed": seed}
            texts, calls, thoughts, _ = read(server, path, given, stream)
            text = "".join(texts).strip()
            assert bool(text) != bool(calls)
            kinds.append(("call" if calls else "answer", bool(thoughts)))
            if text:
                validate(json.loads(text), ANSWER)
    assert ("call", True) in kinds and ("answer", True) in kinds


@pytest.mark.parametrize("path", BY_API)
@pytest.mark.parametrize("case", ["format", "regex", "none"])
def test_tools_that_no_grammar_leaves_are_named(server, path, case):
    """The schema alone is obeyed, as without tools."""
    body, fields, _ = BY_API[path]
    if case == "regex":
        dropped = "response_format", "text", "output_config"
        fields = {k: v for k, v in fields.items() if k not in dropped} | {"guided_regex": "[ab]{3}"}
    if case == "none":
        none = {"type": "none"} if path == "/v1/messages" else "none"
        fields = fields | {"tool_choice": none}
    chosen = foreign_format if case == "format" else tool_format
    with chosen(server, "pythonic" if case == "format" else "json_tools"):
        texts, calls, _, headers = read(server, path, body | fields, False)
    (text,) = texts
    assert not calls and headers["x-ignored-fields"] == (None if case == "none" else "tools")
    if case == "regex":
        assert re.fullmatch("[ab]{3}", text)
    else:
        validate(json.loads(text), ANSWER)


def test_strict_fields_refuse_tools_that_no_grammar_leaves():
    with live(*FLAGS, "--strict-fields") as own, foreign_format(own, "pythonic"):
        body = CHAT | BY_API["/v1/chat/completions"][1]
        status, _, answer = post(own, body, "/v1/chat/completions")
    assert (status, answer["error"]["param"]) == (400, "tools")


BAD = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
            "text.format",
        ),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}]},
            "tools",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "parameters": BAD}]},
            "tools",
        ),
    ],
)
def test_the_source_that_is_wrong_is_named(server, path, wrong, param):
    body, fields, _ = BY_API[path]
    with tool_format(server, "json_tools"):
        status, _, answer = post(server, body | fields | wrong, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "uniqueItems" in answer["error"]["message"]


def test_a_format_without_a_grammar_is_refused_by_name(server):
    with foreign_format(server, "pythonic"):
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

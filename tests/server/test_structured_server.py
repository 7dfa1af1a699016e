"""Structured outputs, forced tool calls and the Messages API, with their clients over a socket."""

import json
import re
import threading
from contextlib import contextmanager
from typing import Literal

import pytest
from jsonschema import validate
from mlx_lm.tool_parsers import json_tools, pythonic
from pydantic import BaseModel

from mlx_paged.sampling.grammar import Grammars
from mlx_paged.server.models import _machine
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    TIMEOUT,
    client,
    demo,
    exchange,
    live,
    only_model,
    post,
    solo,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "color": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "color", "count"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 80}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "{{ '\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def server():
    with live("--chat-template", TEMPLATE) as running:
        yield running


@contextmanager
def tool_format(server, module, problem=None):
    """The demo model's tokenizer with the tool format of a module of mlx-lm."""
    model = only_model(server)
    tokenizer, before = model.tokenizer, model.machines
    vars(tokenizer).update(
        _tool_parser=module.parse_tool_call,
        _tool_call_start=module.tool_call_start,
        _tool_call_end=module.tool_call_end,
    )
    model.machines = {tools: _machine(tokenizer, tools) for tools in (False, True)}
    abilities = model.abilities
    model.abilities = abilities._replace(tools_problem=problem)
    try:
        yield
    finally:
        model.abilities = abilities
        vars(tokenizer).update(_tool_parser=None, _tool_call_start=None, _tool_call_end=None)
        model.machines = before


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
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
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


@pytest.mark.sampled(2)
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
    assert "".join(part.choices[0].text for part in stream) == solo(CODE, 50)[0]
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


# The Messages API


@pytest.fixture(scope="module")
def claude(server):
    anthropic = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{server.address[1]}"
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)


USER = [{"role": "user", "content": "def f"}]
PROMPT = "user: def f\n"
CLAUDE_TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("f", "g")]


@pytest.mark.slow
def test_a_message_is_what_mlx_lm_gives(claude):
    message = claude.messages.create(model=MODEL, max_tokens=24, messages=USER)
    text, tokens, _ = solo(PROMPT, 24)
    assert [block.text for block in message.content] == [text]
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "max_tokens",
        None,
    )
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(demo()[1].encode(PROMPT))
    assert usage.output_tokens == len(tokens) == 24


def test_a_stream_gives_the_same_message(claude):
    whole = claude.messages.create(model=MODEL, max_tokens=24, messages=USER)
    with claude.messages.stream(model=MODEL, max_tokens=24, messages=USER) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 24)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_stop_sequence_is_named(claude):
    text = solo(PROMPT, 24)[0]
    stops = ["never in it", text[10:14]]
    message = claude.messages.create(
        model=MODEL, max_tokens=24, messages=USER, stop_sequences=stops
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stops[1])
    assert message.content[0].text == text[: text.index(stops[1])]


def test_system_blocks_and_tool_results_reach_the_template(claude):
    history = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "def"}, {"type": "text", "text": "!"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    prompt = "system: Be short.\nuser: def!\nassistant: callingf{'a': 1}\ntool: 42\nuser: so?\n"
    counted = claude.messages.count_tokens(model=MODEL, system=system, messages=history)
    assert counted.input_tokens == len(demo()[1].encode(prompt))
    message = claude.messages.create(model=MODEL, max_tokens=9, system=system, messages=history)
    assert message.content[0].text == solo(prompt, 9)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("system", "roles", "prompt"),
    [
        (None, "sau", "system: 0\nassistant: 1\nuser: 2\n"),
        ("be", "ssu", "system: be\n\n0\n\n1\nuser: 2\n"),
        ("be", "usa", "system: be\nuser: 0\n\n1\nassistant: 2"),
        ("be", "ussua", "system: be\nuser: 0\n\n1\n\n2\n\n3\nassistant: 4"),
        (None, "uasu", "user: 0\nassistant: 1\nuser: 2\n\n3\n"),
        (None, "uas", "user: 0\nassistant: 1\nuser: 2\n"),
        (None, "uuau", "user: 0\nuser: 1\nassistant: 2\nuser: 3\n"),
    ],
)
def test_turns_of_the_system_join_the_turns_beside_them(claude, system, roles, prompt):
    names = {"s": "system", "u": "user", "a": "assistant"}
    turns = [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]
    options = {} if system is None else {"system": system}
    counted = claude.messages.count_tokens(model=MODEL, messages=turns, **options)
    assert counted.input_tokens == len(demo()[1].encode(prompt))
    message = claude.messages.create(model=MODEL, max_tokens=9, messages=turns, **options)
    assert message.content[0].text == solo(prompt, 9)[0]


def test_a_billing_header_is_not_part_of_the_prompt(claude):
    blocks = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={i};"}
        for i in (1, 2)
    ]
    kept = {"type": "text", "text": "Be short."}
    counts = {
        claude.messages.count_tokens(model=MODEL, system=system, messages=USER).input_tokens
        for system in ([blocks[0], kept], [blocks[1], kept], "Be short.")
    }
    assert counts == {len(demo()[1].encode(f"system: Be short.\n{PROMPT}"))}
    alone = claude.messages.count_tokens(model=MODEL, system=blocks[:1], messages=USER)
    assert alone.input_tokens == len(demo()[1].encode(PROMPT))


@pytest.mark.parametrize("streams", [False, True])
def test_a_full_context_is_told_in_the_words_that_clients_read(server, streams):
    """Claude Code reads the numbers, and asks again for less."""

    def refused(path, messages, max_tokens):
        body = {"model": MODEL, "max_tokens": max_tokens, "messages": messages, "stream": streams}
        status, _, answer = post(server, body, path)
        assert status == 400
        return answer["error"]

    many = [{"role": "user", "content": "a b c " * 1500}]
    count = len(demo()[1].encode(f"user: {many[0]['content']}\n"))
    assert count > 2048
    few = len(demo()[1].encode(PROMPT))
    error = refused("/v1/messages", many, 8)
    assert error["message"] == f"prompt is too long: {count} tokens > 2047 maximum"
    error = refused("/v1/messages", USER, 32_000)
    assert error["type"] == "invalid_request_error"
    assert error["message"] == (
        f"input length and `max_tokens` exceed context limit: {few} + 32000 > 2048,"
        " decrease input length or `max_tokens` and try again"
    )
    huge = [{"role": "user", "content": "a" * 1_000_000}]
    found = re.fullmatch(
        r"prompt is too long: (\d+) tokens > 2047 maximum",
        refused("/v1/messages", huge, 8)["message"],
    )
    assert 2047 < int(found[1]) <= 1_000_010
    for messages, total in ((many, count + 8), (USER, few + 32_000)):
        error = refused("/v1/chat/completions", messages, 8 if messages is many else 32_000)
        assert error["code"] == "context_length_exceeded"
        expected = f"maximum context length is 2048 tokens. However, you requested {total} tokens"
        assert expected in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/x/y"])
def test_missing_paths_are_told_in_anthropics_form(server, path):
    status, _, answer = post(server, {}, path)
    assert (status, answer["type"]) == (404, "error")
    assert answer["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "g"}])
@pytest.mark.parametrize("streams", [False, True])
def test_tools_are_called_through_the_client(server, claude, choice, streams):
    options = {"tools": CLAUDE_TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    options |= {
        "model": MODEL,
        "max_tokens": 200,
        "messages": USER,
        "extra_body": {"temperature": 1},
    }
    with tool_format(server, json_tools):
        if streams:
            with claude.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = claude.messages.create(**options)
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert block.name in (("f", "g") if choice["type"] == "any" else ("g",))
    validate(block.input, SCHEMA)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search"),
        ({"tool_choice": {"type": "all"}}, "tool_choice"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice"),
        ({"n": 2}, "n: expected 1"),
        ({"output_format": {"type": "xml"}}, "json_schema"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_anthropics_form(server, changes, reason):
    body = {"model": MODEL, "max_tokens": 8, "messages": USER} | changes
    status, _, answer = post(server, body, "/v1/messages")
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert reason in answer["error"]["message"]


def test_other_methods_are_refused_in_anthropics_form(server):
    status, _, content = exchange(server, "GET", "/v1/messages")
    answer = json.loads(content)
    assert (status, answer["type"]) == (405, "error")
    assert answer["error"]["type"] == "invalid_request_error"


def test_output_format_constrains_a_message(server):
    body = {"max_tokens": 80, "messages": USER}
    body |= {"output_format": {"type": "json_schema", "schema": SCHEMA}}
    status, _, answer = post(server, body, "/v1/messages")
    assert (status, answer["stop_reason"]) == (200, "end_turn")
    validate(json.loads(answer["content"][0]["text"]), SCHEMA)

"""A `tool_choice` of the type allowed_tools, sent and read by OpenAI's client."""

import pytest
from openai.types import responses as types
from pydantic import TypeAdapter

from tests.server.test_client_tools import CALLS, HARMONY, TAGS
from tests.support.commands.scripted_models import CHANNELS, scripted, template
from tests.support.commands.server_harness import MODEL, client, post

EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NAMES = ("f", "g", "h")
FLAT = [{"type": "function", "name": name, "parameters": EMPTY} for name in NAMES]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": EMPTY}} for name in NAMES]
ASK = [{"role": "user", "content": "hi"}]


def allow(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def allow_flat(mode, *names):
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


@pytest.fixture(scope="module", params=CALLS)
def made(request):
    """A client of a server, the server, and how its model writes a call."""
    family = request.param
    marks = (CHANNELS, HARMONY) if family == "harmony" else (template(family), TAGS)
    with scripted(*marks) as server, client(server) as speaker:
        yield speaker, server, CALLS[family]


def in_chat(speaker, stream, **fields):
    """The content and the names of the calls of a chat completion."""
    given = {"messages": ASK, "model": MODEL, "tools": TOOLS, "max_tokens": 600, "stream": stream}
    answer = speaker.chat.completions.create(**given, **fields)
    parts = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
    text = "".join(part.content or "" for part in parts)
    return text, [call.function.name for part in parts for call in part.tool_calls or []]


def in_responses(speaker, **fields):
    """The text and the names of the calls of a response."""
    given = {"input": "hi", "model": MODEL, "tools": FLAT, "max_output_tokens": 600}
    answer = speaker.responses.create(**given, **fields)
    assert isinstance(answer.tool_choice, types.ToolChoiceAllowed)
    TypeAdapter(types.Response).validate_python(answer.to_dict())
    calls = [item.name for item in answer.output if item.type == "function_call"]
    return answer.output_text, calls


def of_script(text):
    return {"extra_body": {"metadata": {"script": text}}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_another_tool_is_text(made, stream):
    speaker, _, write = made
    for name in NAMES:
        own = of_script(write(name, {}))
        text, calls = in_chat(speaker, stream, tool_choice=allow("auto", "f", "h"), **own)
        assert calls == ([] if name == "g" else [name]) and bool(text) == (name == "g")
    own = of_script(write("f", {}) + write("g", {}) + write("h", {}))
    text, calls = in_chat(speaker, stream, tool_choice=allow("auto", "f", "h"), **own)
    assert calls == ["f", "h"] and text
    if not stream:
        text, calls = in_responses(speaker, tool_choice=allow_flat("auto", "g"), **own)
        assert calls == ["g"] and text


def test_one_of_the_allowed_tools_is_called(made):
    speaker, _, _ = made
    found = set()
    for seed in range(4):
        own = {"temperature": 1.0, "extra_body": {"seed": seed, "thinking_budget": 4}}
        _, calls = in_chat(speaker, False, tool_choice=allow("required", "g", "h"), **own)
        found |= {*calls}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": 1}}}
        own |= {"response_format": form}
        text, calls = in_chat(speaker, False, tool_choice=allow("auto", "h"), **own)
        assert {*calls} <= {"h"} and text in ("", "1")
    assert found and found <= {"g", "h"}
    own = {"temperature": 1.0, "extra_body": {"seed": 1, "thinking_budget": 4}}
    _, calls = in_responses(speaker, tool_choice=allow_flat("required", "g"), **own)
    assert {*calls} == {"g"}


def test_the_prompt_keeps_all_tools(made):
    speaker, _, _ = made
    counts = {
        speaker.chat.completions.create(
            messages=ASK,
            model=MODEL,
            tools=TOOLS,
            max_tokens=9,
            tool_choice=choice,
            **of_script("ok"),
        ).usage.prompt_tokens
        for choice in ("auto", allow("auto", "f"), allow("auto", "g", "h"))
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    "choice",
    [
        allow("auto"),
        allow("auto", "other"),
        allow("none", "f"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": []},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": "f"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": ["auto"], "tools": [TOOLS[0]]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
    ],
)
def test_a_wrong_choice_is_refused_by_name(made, choice):
    _, server, _ = made
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "max_tokens": 5}
    status, _, answer = post(server, body, "/v1/chat/completions")
    assert status == 400 and answer["error"]["param"] == "tool_choice"
    inner = choice.get("allowed_tools")
    flat = {"type": "allowed_tools"} | (inner if isinstance(inner, dict) else {"tools": inner})
    body = {"input": "hi", "tools": FLAT, "tool_choice": flat, "max_output_tokens": 5}
    status, _, answer = post(server, body, "/v1/responses")
    assert status == 400 and "tool_choice" in answer["error"]["message"]

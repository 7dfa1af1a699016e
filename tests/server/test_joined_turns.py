"""Turns in a row of one role are joined where the chat template refuses them."""

import pytest

from mlx_paged.protocol.messages import folded
from mlx_paged.protocol.turns import merged
from tests.support.commands.server_harness import demo, live, only_model, post

LINES = (
    "{% for t in tools or [] %}{{ t.function.name }}("
    "{% for n, p in t.function.parameters.properties.items() %}{{ n }}:{{ p.type }},{% endfor %})"
    "{{ '\n' }}"
    "{% endfor %}{% for m in messages %}CHECK{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
)
FAIL = "{{ raise_exception('roles must alternate') }}{% endif %}"
BEFORE = "not loop.first and messages[loop.index0 - 1].role == m.role"
CHECKS = {
    "none": "",
    "user": f"{{% if m.role == 'user' and {BEFORE} %}}{FAIL}",
    "both": f"{{% if m.role in ('user', 'assistant') and {BEFORE} %}}{FAIL}",
    "parity": "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + FAIL,
}
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    {"role": "assistant", "content": "d"},
    {"role": "assistant", "content": "e"},
    {"role": "user", "content": "f"},
]
APART = "user: a\nuser: bc\nassistant: d\nassistant: e\nuser: f\n"
USERS = "user: a\n\nbc\nassistant: d\nassistant: e\nuser: f\n"
BOTH = "user: a\n\nbc\nassistant: d\n\ne\nuser: f\n"
EXPECTED = {"none": APART, "user": USERS, "both": BOTH, "parity": BOTH}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def asked(path, turns, **others):
    body = {"messages": turns, "max_tokens": 1} | others
    if path == "/v1/responses":
        body["input"] = [
            turn
            | {
                "content": [
                    {"type": "output_text" if turn["role"] == "assistant" else "input_text"}
                    | {"text": part["text"]}
                    for part in (
                        turn["content"]
                        if isinstance(turn["content"], list)
                        else [{"text": turn["content"]}]
                    )
                ]
            }
            for turn in body.pop("messages")
        ]
        body["max_output_tokens"] = body.pop("max_tokens")
    return body


def prompt_length(answer):
    usage = answer["usage"]
    count = usage.get("prompt_tokens", usage.get("input_tokens"))
    return count + usage.get("cache_read_input_tokens", 0)


@pytest.mark.parametrize("check", CHECKS)
def test_turns_are_joined_only_where_the_template_refuses_them(check):
    with live("--chat-template", LINES.replace("CHECK", CHECKS[check])) as server:
        wanted = demo()[1].encode(EXPECTED[check], add_special_tokens=False)
        for path in PATHS:
            status, _, answer = post(server, asked(path, TURNS), path)
            assert status == 200, answer
            assert prompt_length(answer) == len(wanted)
        body = asked(PATHS[0], [{"role": "user", "content": "a"}, *TURNS[2:4]])
        continued = body | {"continue_final_message": True}
        assert post(server, continued, PATHS[0])[0] == 200
        assert only_model(server).abilities.joins == {
            "none": (),
            "user": ("user",),
        }.get(check, ("user", "assistant"))


def test_a_turn_keeps_what_both_have():
    def call(name):
        return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}

    image = {"type": "image"}
    chat = [
        {"role": "user", "content": [image]},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call("f")], "reasoning_content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call("g")]},
        {"role": "tool", "content": "r", "tool_call_id": "f"},
        {"role": "tool", "content": "s", "tool_call_id": "g"},
    ]
    user, assistant, *results = merged(chat, ("user", "assistant"))
    gap = {"type": "text", "text": "\n\n"}
    assert user["content"] == [image, gap, {"type": "text", "text": "a"}]
    assert user["name"] == "Ann"
    assert [each["id"] for each in assistant["tool_calls"]] == ["f", "g"]
    assert assistant["reasoning_content"] == "x" and not assistant["content"]
    assert results == chat[4:]
    assert merged(chat, ()) == chat


@pytest.fixture(scope="module")
def reader():
    with live("--chat-template", LINES.replace("CHECK", "")) as server:
        yield server


@pytest.mark.parametrize("given", [{}, {"SCHEMA": {}}, {"SCHEMA": {"type": "object"}}], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_templates_that_read_properties_take_tools_without_them(reader, path, given):
    name = "input_schema" if path == "/v1/messages" else "parameters"
    tool = {"name": "f", "description": "d"} | ({name: given["SCHEMA"]} if given else {})
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": tool}
    elif path == "/v1/responses":
        tool["type"] = "function"
    body = asked(path, [{"role": "user", "content": "a"}], tools=[tool])
    status, _, answer = post(reader, body, path)
    assert status == 200, answer
    wanted = demo()[1].encode("f()\nuser: a\n", add_special_tokens=False)
    assert prompt_length(answer) == len(wanted)


@pytest.mark.parametrize("kind", ["system", "user"])
def test_many_turns_in_a_row_are_joined_once(monkeypatch, kind):
    """One after the other would copy what is joined for each of them."""
    counts = []

    def count(contents):
        counts.append(len(contents))
        return "\n\n".join(contents)

    said = {"role": "user", "content": "a"}
    turns = [said, *({"role": kind, "content": str(i)} for i in range(500))]
    if kind == "user":
        monkeypatch.setattr("mlx_paged.protocol.turns.joined", count)
        (found,) = merged(turns, {"user"})
    else:
        monkeypatch.setattr("mlx_paged.protocol.messages.joined", count)
        (found,) = folded("", turns)
    assert found["content"] == "\n\n".join(["a", *map(str, range(500))])
    assert counts == [501]


def test_texts_and_parts_are_joined_in_their_order():
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    contents = ["a", parts, "d"]
    turns = [{"role": "user", "content": content} for content in contents]
    (found,) = merged(turns, {"user"})
    assert "".join(part["text"] for part in found["content"]) == "a\n\nbc\n\nd"


def test_more_turns_than_the_context_has_tokens_are_not_rendered(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("it was rendered")

    with live("--chat-template", LINES.replace("CHECK", "")) as server:
        turn = {"role": "user", "content": "a"}
        limit = only_model(server).max_context
        monkeypatch.setattr("mlx_paged.protocol.prompts.rendered", fail)
        call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
        called = {"role": "assistant", "tool_calls": [call] * limit}
        for messages in ([turn] * limit, [turn, called, turn]):
            body = {"messages": messages, "max_tokens": 1}
            status, _, answer = post(server, body, "/v1/chat/completions")
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

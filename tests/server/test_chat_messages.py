"""Messages that would be read otherwise than they are meant are refused by their place; what else
clients send is accepted."""

import json

import pytest

from mlx_paged.protocol import messages, responses
from mlx_paged.protocol.request_body import read, refusing
from tests.support.commands.server_harness import live, post

SAY = {"type": "function", "function": {"name": "say", "parameters": {}}}
USER = {"role": "user", "content": "a"}


def call(arguments, **others):
    return {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": arguments} | others,
    }


def said(*calls):
    return {"role": "assistant", "tool_calls": [*calls]}


WRONG = {
    "role": ({"role": "wizard", "content": "a"}, "messages[1].role", "wizard"),
    "no role": ({"content": "a"}, "messages[1].role", "nothing"),
    "key": ({"role": "user", "contents": "a"}, "messages[1].contents", "contents"),
    "camel": ({"role": "tool", "content": "", "toolCallId": "x"}, "messages[1].toolCallId", "tool"),
    "call": ({"role": "assistant", "tool_call": []}, "messages[1].tool_call", "tool_calls"),
    "no content": ({"role": "user"}, "messages[1].content", "nothing"),
    "no text": ({"role": "user", "content": {}}, "messages[1].content", "text"),
    "part": ({"role": "user", "content": [{"type": "x"}]}, "messages[1].content", "x"),
    "refusal": ({"role": "assistant", "refusal": ["No."]}, "messages[1].refusal", "a text"),
    "bad part": (
        said() | {"content": [{"type": "refusal", "refusal": 1}]},
        "messages[1].content",
        "1",
    ),
    "user's": (
        {"role": "user", "content": [{"type": "refusal", "refusal": "N"}]},
        "messages[1].content",
        "N",
    ),
    "no id": ({"role": "tool", "content": "z"}, "messages[1].tool_call_id", "id of a call"),
    "cut": (
        said(call("{}"), call('{"a": "b')),
        "messages[1].tool_calls[1].function.arguments",
        '{"a": "b',
    ),
    "list": (said(call([1])), "messages[1].tool_calls[0].function.arguments", "JSON"),
    "no name": (said(call("{}", name=None)), "messages[1].tool_calls[0].function", "a name"),
    "calls": ({"role": "assistant", "tool_calls": {}} | said("c"), "messages[1].tool_calls", "c"),
}


@pytest.mark.parametrize(("message", "place", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_is_refused_by_its_place(message, place, told):
    with pytest.raises(ValueError) as error:
        read({"messages": [USER, message]}, True, 1)
    name, _, expected = str(error.value).partition(": expected ")
    assert name == place and told in expected and "got" in expected


def test_the_error_names_the_place():
    with live() as server:
        body = {"messages": [USER, said(call("{"))], "max_tokens": 1}
        error = post(server, body, "/v1/chat/completions")[2]["error"]
        assert error["param"] == "messages[1].tool_calls[0].function.arguments"


ACCEPTED = [
    USER | {"name": "Ann", "cache_control": {"type": "ephemeral"}, "id": "m1"},
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
    {"role": "assistant", "content": "", "function_call": None, "reasoning": "hm"},
    {"role": "assistant", "reasoning_content": "x", "provider_specific_fields": {}, "context": 1},
    {"role": "assistant"},
    said(call('{"a": 1}'), call(""), call({"a": 1}), call(None)),
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "z"}], "name": "f"},
    {"role": "function", "name": "f", "content": "z"},
    {"role": "developer", "content": "d"},
]


def test_what_clients_send_is_accepted():
    fields, ignored = read({"messages": json.loads(json.dumps(ACCEPTED))}, True, 1)
    assert ignored == [] and len(fields["messages"]) == len(ACCEPTED)


NO = {"type": "refusal", "refusal": "No."}
SO = {"type": "text", "text": "so"}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": "so", "refusal": "No."}, "so\n\nNo."),
        ({"content": "so", "refusal": ""}, "so"),
        ({"content": [NO]}, [{"type": "text", "text": "No."}]),
        ({"content": [SO, NO], "refusal": None}, [SO, {"type": "text", "text": "No."}]),
    ],
    ids=str,
)
def test_what_an_assistant_refused_is_its_text(message, content):
    given = json.loads(json.dumps([USER, {"role": "assistant"} | message, USER]))
    _, told, _ = read({"messages": given}, True, 1)[0]["messages"]
    assert told == {"role": "assistant", "content": content}


def test_refusals_of_the_responses_api_are_text():
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [NO]}]
    chat = responses.as_chat({"input": items})
    assert chat["messages"][1] == {"role": "assistant", "content": "No."}


def test_a_role_may_be_named_in_the_role_mapping():
    fields = {"messages": [{"role": "wizard", "content": "a"}], "role_mapping": {"wizard": "W: "}}
    assert read(fields, True, 1)[1] == []


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({"type": "function", "name": "f", "parameters": {}}, "tools[1].function"),
        ({"name": "f", "input_schema": {}}, "tools[1].function"),
        ({"type": "web_search"}, "tools[1].type"),
    ],
    ids=["responses", "messages", "kind"],
)
def test_tools_of_another_api_are_refused(tool, place):
    with pytest.raises(ValueError) as error:
        read({"messages": [USER], "tools": [SAY, tool]}, True, 1)
    assert str(error.value).startswith(f"{place}: expected ")


def block(**content):
    return {"messages": [USER, {"role": "user", "content": [content]}], "max_tokens": 1}


def item(**content):
    return {"input": [USER, content]}


OTHERS = {
    "role": (messages, {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
    "content": (messages, {"messages": [{"role": "user", "contents": ""}]}, "messages[0].content"),
    "block": (messages, block(type="document"), "messages[1].content"),
    "result": (messages, block(type="tool_result", content=""), "messages[1].content.tool_use_id"),
    "tool": (messages, {"messages": [USER], "tools": [{"input_schema": {}}]}, "tools[0].name"),
    "call": (responses, item(type="function_call", call_id="c", arguments="{}"), "input[1].name"),
    "cut": (
        responses,
        item(type="function_call", call_id="c", name="f", arguments="{"),
        "input[1].arguments",
    ),
    "output": (responses, item(type="function_call_output", output=""), "input[1].call_id"),
}


@pytest.mark.parametrize(("api", "body", "place"), OTHERS.values(), ids=OTHERS)
def test_the_other_apis_name_their_own_places(api, body, place):
    options = {"counts": False} if api is messages else {}
    with pytest.raises(ValueError) as error:
        api.as_chat({"max_tokens": 1} | body, **options)
    assert str(error.value).startswith(f"{place}: expected ")


def test_tools_that_nobody_would_run_are_ignored_beside_others():
    """Alone they are refused: the client expects their answers."""
    own = {"name": "f", "input_schema": {}}, {"type": "function", "name": "f"}
    for api, tool in zip((messages, responses), own, strict=True):
        options = {"counts": False} if api is messages else {}
        body = {"messages": [USER], "max_tokens": 1} if api is messages else {"input": "a"}
        search = {"type": "web_search_1", "name": "web_search"}
        found = api.as_chat(body | {"tools": [search, tool]}, **options)
        assert [each["function"]["name"] for each in found["tools"]] == ["f"]
        assert read(found, True, 1)[1] == ["tools.web_search_1"]
        with pytest.raises(ValueError, match=r"tools: expected .* got .*tools.web_search_1"):
            api.as_chat(body | {"tools": [search]}, **options)
        forced = (
            {"type": "tool", "name": "web_search"} if api is messages else {"type": "web_search_1"}
        )
        chat = api.as_chat(body | {"tools": [search, tool], "tool_choice": forced}, **options)
        if api is responses:
            with refusing(), pytest.raises(ValueError, match="tool_choice: expected"):
                read(chat, True, 1)
        else:
            assert read(chat, True, 1)[0]["tool_name"] == "web_search"  # which no tool has

"""Anthropic's Messages API: what today's clients send, and what they read."""

import json
import re

import pytest
from jsonschema import validate

from tests.support.commands.server_harness import (
    MODEL,
    SCHEMA,
    TEMPLATE,
    TIMEOUT,
    demo,
    exchange,
    live,
    post,
    solo,
    tool_format,
    written,
)

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--chat-template", TEMPLATE
ANTHROPIC = {"anthropic-version": "2023-06-01"}
USER = [{"role": "user", "content": "def f"}]
PROMPT = "user: def f\n"
CLAUDE_TOOLS = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("f", "g")]


@pytest.fixture(scope="module")
def claude(server):
    anthropic = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{server.address[1]}"
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=TIMEOUT)


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


TEXT = {"type": "text", "text": "so?"}


def document(source, **more):
    return {"type": "document", "source": source} | more


PLAIN = {"type": "text", "media_type": "text/plain", "data": "a\nb"}
OF_BLOCKS = {"type": "content", "content": [{"type": "text", "text": t} for t in ("c", "d")]}


@pytest.mark.parametrize(
    ("blocks", "prompt"),
    [
        ([document(PLAIN)], "a\nb"),
        ([document(PLAIN), TEXT], "a\nb\n\nso?"),
        ([TEXT, document(PLAIN), document(OF_BLOCKS), TEXT], "so?\n\na\nb\n\ncd\n\nso?"),
        ([document(PLAIN, title="T", context="from C"), TEXT, TEXT], "T\nfrom C\na\nb\n\nso?so?"),
        ([document({"type": "content", "content": "c"}, title=None), TEXT], "c\n\nso?"),
    ],
)
@pytest.mark.parametrize("in_result", [False, True])
def test_documents_of_text_become_text(server, blocks, prompt, in_result):
    messages, text = [{"role": "user", "content": blocks}], f"user: {prompt}\n"
    if in_result:
        messages = [
            *USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}],
            },
        ]
        messages[1]["content"][0]["input"] = {}
        text = f"user: def f\nassistant: f{{}}\ntool: {prompt}\n"
    body = {"messages": messages, "max_tokens": 9}
    status, headers, answer = post(server, body, "/v1/messages")
    assert status == 200 and answer["content"][0]["text"] == solo(text, 9)[0]
    assert headers["x-ignored-fields"] is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (document({"type": "base64", "media_type": "application/pdf", "data": "JVB"}), "/pdf"),
        (document({"type": "url", "url": "http://a/b.pdf"}), "'url'"),
        (document({"type": "file", "file_id": "f"}), "'file'"),
        (document({"type": "text", "media_type": "text/plain", "data": 1}), "documents of text"),
        (document({"type": "content", "content": [{"type": "image"}]}), "'image'"),
        (document(None), "documents of text"),
        (document(PLAIN, title=1), "title"),
        (document(PLAIN, context={}), "context"),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_result", [False, True])
def test_other_documents_are_refused_by_name(server, given, told, in_result):
    result = {"type": "tool_result", "tool_use_id": "t", "content": [given]}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [given]}]}
    if in_result:
        body["messages"] = [{"role": "user", "content": [result]}]
    status, _, answer = post(server, body, "/v1/messages")
    message = answer["error"]["message"]
    assert (
        status == 400 and message.startswith("messages[0].content: expected ") and told in message
    )


def test_citations_that_are_asked_for_are_ignored_by_name(server):
    for wanted, told in ((True, "document.citations"), (False, None)):
        given = document(PLAIN, citations={"enabled": wanted})
        body = {"messages": [{"role": "user", "content": [given]}], "max_tokens": 1}
        status, headers, _ = post(server, body, "/v1/messages")
        assert (status, headers["x-ignored-fields"]) == (200, told)


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
    continues = roles[-1] == "a"
    text = written(prompt, 9) if continues else solo(prompt, 9)[0]
    assert message.content[0].text == text


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
    error = refused("/v1/messages", many, 8)
    assert error["message"] == f"prompt is too long: {count} tokens > 2047 maximum"
    assert error["type"] == "invalid_request_error"
    huge = [{"role": "user", "content": "a" * 1_000_000}]
    found = re.fullmatch(
        r"prompt is too long: (\d+) tokens > 2047 maximum",
        refused("/v1/messages", huge, 8)["message"],
    )
    assert 2047 < int(found[1]) <= 1_000_010
    error = refused("/v1/chat/completions", many, 8)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    expected = f"maximum context length is 2048 tokens. However, you requested {count + 8} tokens"
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
    with tool_format(server, "json_tools"):
        if streams:
            with claude.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = claude.messages.create(**options)
    (block,) = message.content
    assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
    assert block.name in (("f", "g") if choice["type"] == "any" else ("g",))
    validate(block.input, SCHEMA)


def test_a_whole_message_has_the_order_of_its_stream(server, claude):
    """What is cut off after a call is text behind it."""
    options = {"model": MODEL, "messages": USER, "tools": CLAUDE_TOOLS}
    options["tool_choice"] = {"type": "any"}
    found = 0
    with tool_format(server, "json_tools"):
        for seed in range(6):
            options |= {"max_tokens": 40 + 4 * seed}
            options["extra_body"] = {"seed": seed, "temperature": 1}
            whole = claude.messages.create(**options)
            with claude.messages.stream(**options) as stream:
                streamed = stream.get_final_message()
            blocks, told = (
                [block.to_dict() | {"id": ""} for block in message.content]
                for message in (whole, streamed)
            )
            assert blocks == told
            found += [block["type"] for block in blocks][-2:] == ["tool_use", "text"]
    assert found > 1


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


def num_tokens(claude, **options):
    return claude.messages.count_tokens(model=MODEL, **options).input_tokens


def test_a_result_that_is_an_error_says_so(claude):
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no file", "is_error": True}
    turns = [*USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    prompt = f"{PROMPT}assistant: f{{'a': 1}}\ntool: Error: no file\n"
    assert num_tokens(claude, messages=turns) == len(demo()[1].encode(prompt))


def test_thoughts_of_earlier_turns_reach_templates_that_take_them():
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}\n{% endfor %}"
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "yes"}]}
    body = {"messages": [*USER, said, *USER], "max_tokens": 1}
    with live("--chat-template", template) as own:
        _, _, answer = post(own, body, "/v1/messages/count_tokens")
    assert answer["input_tokens"] == len(demo()[1].encode("|def f\nhm|yes\n|def f\n"))


def test_models_have_the_form_of_the_client(server, claude):
    (model,) = claude.models.list()
    assert claude.models.retrieve(model.id) == model
    assert model.type == "model" and model.display_name == model.id
    assert model.created_at.year >= 2026
    _, _, content = exchange(server, "GET", "/v1/models")
    assert json.loads(content)["data"][0]["object"] == "model"
    status, _, content = exchange(server, "GET", "/v1/models/none", headers=ANTHROPIC)
    assert (status, json.loads(content)["error"]["type"]) == (404, "not_found_error")


def test_a_missing_key_is_an_authentication_error():
    anthropic = pytest.importorskip("anthropic")
    with live("--api-key", "secret") as own:
        url = f"http://127.0.0.1:{own.address[1]}"
        stranger = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(model=MODEL, max_tokens=1, messages=USER)
        assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            stranger.models.list()


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"effort": None, "other": 1}}, "output_config.other"),
        ({"service_tier": "standard_only", "metadata": {"user_id": "x"}}, None),
        ({"speed": "fast", "container": "x"}, "container, speed"),
    ],
    ids=str,
)
def test_what_this_model_cannot_do_is_named(server, fields, ignored):
    """The demo model never thinks."""
    body = {"max_tokens": 1, "messages": USER} | fields
    status, headers, answer = post(server, body, "/v1/messages")
    assert status == 200, answer
    found = headers.get("x-ignored-fields")
    assert found == ignored if ignored != "thinking.budget_tokens" else ignored in found


MISTAKES = [
    ({"thinking": {"type": "much"}}, "thinking: expected adaptive"),
    ({"thinking": 7}, "thinking: expected an object"),
    ({"thinking": "enabled"}, "thinking: expected an object"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens: expected"),
    ({"output_config": "x"}, "output_config: expected an object"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=str)
def test_mistakes_about_thinking_are_refused(server, fields, message):
    body = {"max_tokens": 1, "messages": USER} | fields
    status, _, answer = post(server, body, "/v1/messages")
    assert status == 400 and message in answer["error"]["message"]

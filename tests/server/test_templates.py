"""A chat template is tried when its model is loaded."""

import http.client
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_paged.chat.rendering import reserved_names
from mlx_paged.formats.choice import chosen
from mlx_paged.protocol.templates import Abilities, tried
from tests.support import TIMEOUT
from tests.support.commands.server_harness import demo, live, only_model, post

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 4}
TURNS = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "CALLS{% endfor %}\n{% endfor %}"
)
GOOD = (
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
)
CALLS = {
    "good": (GOOD, None),
    "other name": (GOOD.replace("call.function.name", "'other'"), "is read as {'name': 'other'"),
    "other arguments": (GOOD.replace(" | tojson", ".values() | list | tojson"), "is not read"),
    "no JSON": (GOOD.replace('"name"', "name"), "is not read"),
    "no marks": (GOOD.replace("tool_call>", "call>"), "is not read"),
    "fails": ("{{ raise_exception('no calls') }}", "is not read: TemplateError"),
}


@pytest.fixture
def tokenizer():
    """The demo model's, whose template may be changed."""
    tokenizer = demo()[1]
    before = tokenizer.chat_template, dict(vars(tokenizer))
    vars(tokenizer)["has_chat_template"] = True
    yield tokenizer
    tokenizer.chat_template = before[0]
    vars(tokenizer).update(before[1])


@pytest.mark.parametrize(("call", "problem"), CALLS.values(), ids=CALLS)
def test_a_call_that_is_not_read_as_it_is_written_is_a_problem(tokenizer, call, problem):
    tokenizer.chat_template = TURNS.replace("CALLS", call)
    found = chosen(tokenizer, "json_tools").problem
    assert found is None if problem is None else problem in found


SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("content", ["def f", [{"type": "text", "text": "def f"}]])
def test_a_template_that_knows_only_parts_gets_the_text_as_one(content):
    with live("--chat-template", SMOLVLM) as server:
        body = BODY | {"messages": [{"role": "user", "content": content}]}
        _, _, answer = post(server, body, "/v1/chat/completions")
        text = "<|im_start|>User: def f<end_of_utterance>\nAssistant:"
        tokens = only_model(server).tokenizer.encode(text, add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_what_a_template_takes_is_found_by_trying(tokenizer):
    tokenizer.chat_template = "{# enable_thinking #}" + TURNS
    assert tried(tokenizer)[:2] == (None, False)
    tokenizer.chat_template = TURNS + "{{ thinking }}{{ reasoning_effort }}"
    assert tried(tokenizer)[:2] == ("thinking", True)
    tokenizer.chat_template = TURNS + "{% if enable_thinking %}<think>{% endif %}"
    assert tried(tokenizer)[:2] == ("enable_thinking", False)
    tokenizer.chat_template = "{{ raise_exception('x') }}"
    assert tried(tokenizer)[:2] == (None, False)
    vars(tokenizer)["has_chat_template"] = False
    assert tried(tokenizer) == Abilities()


def test_a_template_that_ignores_tools_is_told_at_load_and_refuses_them(caplog):
    caplog.set_level(logging.WARNING)
    with live("--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}") as server:
        (line,) = [text for text in caplog.messages if "takes no tools" in text]
        assert line.endswith("the chat template of the model ignores tools")
        status, _, answer = post(server, BODY | {"tools": [TOOL]}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "the chat template of the model ignores tools" in answer["error"]["message"]
        fields = {"tools": [TOOL], "tool_choice": "none"}
        assert post(server, BODY | fields, "/v1/chat/completions")[0] == 200


def test_a_template_without_a_known_parser_refuses_tools():
    with live("--chat-template", TURNS) as server:
        status, _, answer = post(server, BODY | {"tools": [TOOL]}, "/v1/chat/completions")
        assert status == 400 and "no parser is known" in answer["error"]["message"]


def test_a_template_whose_calls_are_read_takes_tools():
    named = TURNS.replace("CALLS", GOOD).replace("call", "tool_call").replace("tool_tool_", "tool_")
    named = named.replace("call.function.name", "call.function['name']") + "{# tool_call.name #}"
    with live("--chat-template", named) as server:
        status, _, answer = post(server, BODY | {"tools": [TOOL]}, "/v1/chat/completions")
        assert status == 200, answer


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = f"{{% if messages[0].content == 'loop' %}}{LOOPS}{{% endif %}}{TURNS}"


def test_templates_without_an_end_stop_no_other_request():
    """A hundred at a time, of whose clients half do not wait."""
    loop = json.dumps({"messages": [{"role": "user", "content": "loop"}], "max_tokens": 1})
    with live("--chat-template", ENDLESS) as server, ThreadPoolExecutor(50) as pool:

        def ask(waits):
            connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=TIMEOUT)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", loop, headers)
            status = connection.getresponse().status if waits else None
            connection.close()
            return status

        assert set(pool.map(ask, [True, False] * 50)) == {400, None}
        assert post(server, BODY, "/v1/chat/completions")[0] == 200
        _, _, answer = post(server, json.loads(loop), "/v1/chat/completions")
        assert "the chat template takes more than" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_client_sets_arguments_of_the_template_only(path):
    plain = {"messages": BODY["messages"], "max_tokens": 1}
    plain |= {"input": "def f", "max_output_tokens": 1} if path == "/v1/responses" else {}
    if path == "/v1/responses":
        del plain["messages"], plain["max_tokens"]
    with live("--chat-template", TURNS + "{{ documents }}{{ other }}") as server:
        for name in sorted(reserved_names()):
            body = plain | {"chat_template_kwargs": {name: "x"}}
            status, _, answer = post(server, body, path)
            message = answer["error"]["message"]
            assert status == 400 and message.startswith(f"chat_template_kwargs.{name}: expected ")
            own = name in ("tools", "add_generation_prompt", "continue_final_message")
            assert own is (f"the request's field {name}" in message)
        given = {"documents": [{"title": "t", "text": "x"}], "other": 1}
        assert post(server, plain | {"chat_template_kwargs": given}, path)[0] == 200

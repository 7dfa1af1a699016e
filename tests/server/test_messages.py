"""What today's clients of Anthropic's Messages API send, and what they read."""

import json

import pytest

from tests.server.test_structured_server import PROMPT, USER, claude, server  # noqa: F401
from tests.support.commands.server_harness import MODEL, demo, exchange, live, post

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def num_tokens(claude, **options):  # noqa: F811
    return claude.messages.count_tokens(model=MODEL, **options).input_tokens


def test_a_result_that_is_an_error_says_so(claude):  # noqa: F811
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


def test_models_have_the_form_of_the_client(server, claude):  # noqa: F811
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
def test_what_this_model_cannot_do_is_named(server, fields, ignored):  # noqa: F811
    """The demo model never thinks."""
    body = {"max_tokens": 1, "messages": USER} | fields
    status, headers, answer = post(server, body, "/v1/messages")
    assert status == 200, answer
    found = headers.get("x-ignored-fields")
    assert found == ignored if ignored != "thinking.budget_tokens" else ignored in found


MISTAKES = [
    ({"thinking": {"type": "much"}}, "thinking: expected adaptive"),
    ({"thinking": 7}, "thinking: expected adaptive"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking_budget: expected"),
    ({"output_config": "x"}, "output_config: expected an object"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=str)
def test_mistakes_about_thinking_are_refused(server, fields, message):  # noqa: F811
    body = {"max_tokens": 1, "messages": USER} | fields
    status, _, answer = post(server, body, "/v1/messages")
    assert status == 400 and message in answer["error"]["message"]

"""Names of control tokens in what clients send are text, in each API."""

import pytest

from mlx_paged.protocol import prompts
from tests.support.commands.server_harness import TEMPLATE, demo, live, only_model, post

NAME = demo()[1].eos_token
NUMBER = demo()[1].eos_token_id
WRITING = TEMPLATE.replace("{{ '\n' }}", NAME)
"""A chat template that writes the control token behind each message."""
USER = {"role": "user", "content": f"what is {NAME}?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{NAME}"}}'}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": f"{NAME} in a file"}

BODIES = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]},
    ),
    "parts": (
        "/v1/chat/completions",
        {"messages": [USER | {"content": [{"type": "text", "text": x} for x in (NAME, "b")]}]},
    ),
    "messages": ("/v1/messages", {"system": NAME, "messages": [USER]}),
    "responses": ("/v1/responses", {"instructions": NAME, "input": f"what is {NAME}?"}),
}


@pytest.fixture(scope="module")
def server():
    with live("--chat-template", WRITING) as made:
        yield made


@pytest.fixture
def encoded(monkeypatch):
    """The prompts that the server makes."""
    found, encode = [], prompts.encode

    def recorded(*args):
        made = encode(*args)
        found.extend(made)
        return made

    monkeypatch.setattr(prompts, "encode", recorded)
    return found


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_only_the_template_writes_control_tokens(
    server, encoded, monkeypatch, path, body, has_states
):
    monkeypatch.setattr(only_model(server), "has_states", has_states)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    status, _, answer = post(server, body | {limit: 1, "model": "default_model"}, path)
    assert status == 200, answer
    (prompt,) = encoded
    text, tokens = demo()[1].decode(prompt.tokens), prompt.tokens
    num_messages = text.count("user: ") + text.count("assistant: ") + text.count("tool: ")
    num_messages += text.count("system: ")
    assert tokens.count(NUMBER) == num_messages < text.count(NAME)
    if has_states:
        assert prompt.turn_ends and all(tokens[end - 1] == NUMBER for end in prompt.turn_ends[-1:])


def test_the_prompt_of_a_completion_is_raw(server, encoded):
    assert post(server, {"prompt": f"a{NAME}b", "max_tokens": 1})[0] == 200
    assert encoded[0].tokens == demo()[1].encode(f"a{NAME}b") and NUMBER in encoded[0].tokens


def test_a_model_without_a_template_gets_text(encoded):
    with live() as server:
        body = {"messages": [USER], "max_tokens": 1}
        assert post(server, body, "/v1/chat/completions")[0] == 200
    (prompt,) = encoded
    assert NUMBER not in prompt.tokens and NAME in demo()[1].decode(prompt.tokens)

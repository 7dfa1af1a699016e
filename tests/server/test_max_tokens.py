"""How many tokens may follow a prompt: as many as fit, or fewer."""

import json

import pytest

from tests.support.commands.server_harness import TEMPLATE, exchange, live, post

LIMIT = 64
PROMPT = [5] * 40
ROOM = LIMIT - len(PROMPT)
CHAT = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
TEXT = "/v1/completions"
FIELDS = {"/v1/responses": "max_output_tokens"}
USAGES = {"/v1/messages": "output_tokens", "/v1/responses": "output_tokens"}


@pytest.fixture(scope="module")
def server():
    with live("--max-context", str(LIMIT), "--chat-template", TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def strict():
    with live(
        "--max-context", str(LIMIT), "--chat-template", TEMPLATE, "--strict-fields"
    ) as server:
        yield server


def body_of(path, most):
    if path == TEXT:
        return {"prompt": PROMPT, "ignore_eos": True, "max_tokens": most}
    chat = dict(CHAT)
    if path == "/v1/responses":
        chat["input"] = chat.pop("messages")
    return chat | {FIELDS.get(path, "max_tokens"): most}


def usage_of(path, answer):
    """Tokens of the prompt and of the answer."""
    usage = answer["usage"]
    if path in USAGES:
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage[USAGES[path]]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("path", [TEXT, *CHATS])
@pytest.mark.parametrize("most", [-1, 10**9, 10**40])
def test_an_answer_has_as_many_tokens_as_fit(server, path, most):
    status, headers, answer = post(server, body_of(path, most), path)
    assert status == 200
    num_prompt, num_new = usage_of(path, answer)
    assert num_prompt + num_new == LIMIT
    assert headers["x-max-tokens"] == str(num_new)


def test_max_completion_tokens_is_the_same_field(server):
    body = CHAT | {"max_completion_tokens": -1}
    status, headers, answer = post(server, body, "/v1/chat/completions")
    assert status == 200
    assert sum(usage_of("", answer)) == LIMIT and headers["x-max-tokens"]


def test_a_stream_has_the_header_too(server):
    body = body_of("/v1/messages", 10_000) | {"stream": True}
    status, headers, _ = exchange(server, "POST", "/v1/messages", json.dumps(body))
    assert status == 200 and 0 < int(headers["x-max-tokens"]) < LIMIT


@pytest.mark.parametrize("most", [1, ROOM])
def test_what_fits_is_not_told(server, most):
    status, headers, answer = post(server, body_of(TEXT, most))
    assert status == 200 and headers["x-max-tokens"] is None
    assert usage_of(TEXT, answer) == (len(PROMPT), most)


def test_of_several_prompts_the_least_is_told(server):
    body = {"prompt": [[5] * 40, [5] * 50], "ignore_eos": True, "max_tokens": -1}
    status, headers, answer = post(server, body)
    assert status == 200 and headers["x-max-tokens"] == "14"
    assert usage_of(TEXT, answer) == (90, 14 + 24)


@pytest.mark.parametrize(
    ("most", "least", "is_wrong"),
    [(-1, ROOM, False), (100, ROOM, False), (-1, ROOM + 1, True), (100, ROOM + 1, True)],
)
@pytest.mark.parametrize("names_most", [True, False])
def test_min_tokens_must_fit(server, most, least, is_wrong, names_most):
    body = body_of(TEXT, most) | {"min_tokens": least}
    if not names_most:
        del body["max_tokens"]
    status, _, answer = post(server, body)
    assert status == (400 if is_wrong else 200)
    if is_wrong:
        assert answer["error"]["param"] == "min_tokens"
        assert f"at most {ROOM}" in answer["error"]["message"]


@pytest.mark.parametrize("most", [8, 32_000])
@pytest.mark.parametrize("server_kind", ["server", "strict"])
def test_a_prompt_that_alone_is_too_long_is_told_as_ever(request, server_kind, most):
    server = request.getfixturevalue(server_kind)
    status, _, answer = post(server, {"prompt": [5] * LIMIT, "max_tokens": most})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"requested {LIMIT + most} tokens ({LIMIT} in the messages, {most} in" in str(error)


@pytest.mark.parametrize("path", [TEXT, *CHATS])
@pytest.mark.parametrize("most", [-1, 10_000])
def test_strict_fields_refuse_what_does_not_fit(strict, path, most):
    status, _, answer = post(strict, body_of(path, most), path)
    message, name = answer["error"]["message"], FIELDS.get(path, "max_tokens")
    assert status == 400
    if most == -1:
        assert message == f"{name}: expected an integer >= 1, got -1"
    elif path == "/v1/messages":
        assert "input length and `max_tokens` exceed context limit:" in message
        assert f"+ {most} > {LIMIT}," in message
    else:
        assert answer["error"]["param"] == name
        assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [TEXT, *CHATS])
@pytest.mark.parametrize("most", [0, -2, True, -1.0, "1"])
def test_other_numbers_are_refused(server, path, most):
    name = FIELDS.get(path, "max_tokens")
    status, _, answer = post(server, body_of(path, most), path)
    assert status == 400 and answer["error"]["message"].startswith(f"{name}: expected ")


def test_a_text_that_is_only_scored_may_fill_the_context(server):
    body = {"prompt": [5] * LIMIT, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, headers, answer = post(server, body)
    assert status == 200 and headers["x-max-tokens"] is None
    assert usage_of(TEXT, answer) == (LIMIT, 0)

"""The server refuses wrong requests, and those that come too often or from others."""

import json
from urllib.parse import quote

import openai
import pytest

from mlx_paged.protocol.choices import CompletionChoice
from tests.support.commands.server_harness import (
    CODE,
    MODEL,
    client,
    exchange,
    live,
    metric,
    only_model,
    post,
    wait_until,
)

LONG = {"max_tokens": 1500, "prompt": CODE, "logit_bias": {"1791": -100}}  # 1791 ends a text
pytest_plugins = ["tests.support.commands.server_fixtures"]
SAY = {"type": "function", "function": {"name": "say", "parameters": {}}}
SAID = {"role": "user", "content": "a"}
BAD_BODIES = {
    "no JSON": (b"{", "not JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "a list": ([1], "not a JSON object"),
    "no prompt": ({}, "prompt: expected"),
    "prompt": ({"prompt": {"a": 1}}, "prompt: expected"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt: expected"),
    "stop tokens": ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids: expected"),
    "best_of": ({"prompt": "a", "n": 3, "best_of": 2}, "best_of: expected from n to 16"),
    "a stream of the best": ({"prompt": "a", "best_of": 2, "stream": True}, "best_of: expected"),
    "min_tokens": ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens: expected"),
    "priority": ({"prompt": "a", "priority": 1}, "without --policy priority"),
    "no tools": (
        {"messages": [{"role": "user", "content": "a"}], "tools": [SAY]},
        "tools: expected",
    ),
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "unknown token": ({"prompt": [10**6]}, "prompt has token 1000000"),
    "n": ({"prompt": "a", "n": 0}, "n: expected an integer >= 1"),
    "many": ({"prompt": "a", "n": 17}, "n: expected an integer from 1 to 16"),
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature is -1: expected"),
    "hot": (
        b'{"prompt": "a", "temperature": Infinity}',
        "temperature: expected finite numbers, got inf",
    ),
    "max_tokens": ({"prompt": "a", "max_tokens": "7"}, "max_tokens: expected an integer"),
    "stop": ({"prompt": "a", "stop": [7]}, "stop: expected"),
    "stops": (
        {"prompt": "a", "stop": ["x"] * 257},
        "stop: expected a non-empty string, or at most",
    ),
    "a long stop": ({"prompt": "a", "stop": "x" * 16385}, "stop: expected a non-empty string, or"),
    "long stops": ({"prompt": "a", "stop": ["x" * 200] * 82}, "with 16384 characters in all"),
    "roles": (
        {"messages": [SAID], "role_mapping": {str(i): "x" for i in range(101)}},
        "role_mapping: expected an object with texts for at most 100 roles",
    ),
    "a role": ({"messages": [SAID], "role_mapping": {"user": 1}}, "role_mapping: expected an obj"),
    "arguments of a template": (
        {"messages": [SAID], "chat_template_kwargs": {str(i): 1 for i in range(1001)}},
        "chat_template_kwargs: expected at most 1000 arguments",
    ),
    "names in messages": (
        {"messages": [SAID | {f"{i}-{j}": 1 for i in range(501)} for j in range(2)]},
        "messages: expected at most 1000 names beside role, content",
    ),
    "logit_bias": (
        {"prompt": "a", "logit_bias": {"x": 1}},
        "logit_bias: expected numbers by token id",
    ),
    "biased token": ({"prompt": "a", "logit_bias": {"9999": 1}}, "token ids below 1792"),
    "seed": ({"prompt": "a", "seed": 2**64}, "seed: expected from -9223372036854775808 to 1844"),
    "presence": ({"prompt": "a", "presence_penalty": 3}, "presence_penalty: expected from -2 to 2"),
    "frequency": (
        {"prompt": "a", "frequency_penalty": -2.5},
        "frequency_penalty: expected from -2 to 2",
    ),
    "stream": ({"prompt": "a", "stream": "yes"}, "stream: expected true or false"),
    "obfuscation": (
        {"prompt": "a", "stream_options": {"include_obfuscation": True}},
        "stream_options: expected",
    ),
    "stream_options": ({"prompt": "a", "stream_options": 1}, "stream_options: expected"),
    "too long": ({"prompt": [5] * 2048, "max_tokens": 1}, "maximum context length is 2048 tokens"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role: expected"),
    "no messages": ({"messages": []}, "messages: expected a list"),
    "images": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0]: expected a URL data:image",
    ),
    "unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "messages[0].content: expected text",
    ),
    "no text": ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: expected"),
    "half a character": ({"prompt": "\ud800"}, "prompt: expected text without half a character"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("body", "message"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_malformed_request_is_answered_with_what_is_wrong(server, body, message):
    is_chat = isinstance(body, dict) and "messages" in body
    counted = metric(server, 'mlx_paged_http_responses_total{code="400"}') or 0
    status, _, answer = post(server, body, "/v1/chat/completions" if is_chat else "/v1/completions")
    assert status == 400
    assert metric(server, 'mlx_paged_http_responses_total{code="400"}') == counted + 1
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_made_ends_alone(server, openai_client, monkeypatch, stream):
    def fail(self, output):
        raise KeyError("no such tool")

    with monkeypatch.context() as patch:
        patch.setattr(CompletionChoice, "add", fail)
        with pytest.raises(openai.APIError, match="the answer could not be made"):
            list(openai_client.completions.create(model=MODEL, prompt="a", stream=stream))
    assert openai_client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_the_client_raises_its_own_errors_for_ours(server, openai_client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        openai_client.completions.create(model=MODEL, prompt="a", temperature=-1)
    expected = "'gpt-5' is not served here: expected .*default_model or another name of /v1/models"
    with pytest.raises(openai.NotFoundError, match=expected) as error:
        openai_client.completions.create(model="gpt-5", prompt="a")
    assert error.value.param == "model"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (("POST", "/v1/nothing", b"{}"), 404),
        (("GET", "/v1/nothing"), 404),
        (("PUT", "/v1/completions", b"{}"), 405),
        (("GET", "/v1/completions"), 405),
        (("DELETE", "/health"), 405),
    ],
    ids=["post", "get", "put", "completions", "delete"],
)
def test_other_places_and_methods_are_refused_in_the_same_form(server, request_line, status):
    found, _, content = exchange(server, *request_line)
    assert found == status and json.loads(content)["error"]["message"]


REFUSED = {
    "response_format": {"type": "xml"},
    "guided_json": "",
    "guided_choice": [],
    "guided_decoding_backend": "outlines",
    "grammar": "root",
    "suffix": "x",
    "use_beam_search": True,
}
REFUSED_IN_CHATS = {
    "tool_choice": "required",
    "function_call": {"name": "a"},
    "modalities": ["audio"],
}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(("name", "value"), (REFUSED | REFUSED_IN_CHATS).items())
def test_a_field_that_cannot_be_obeyed_is_refused_by_name(server, name, value):
    status, _, answer = post(server, CHAT | {name: value}, "/v1/chat/completions")
    assert status == 400 and f"{name}: expected" in answer["error"]["message"]
    assert answer["error"]["param"] == name
    if name in REFUSED:
        assert post(server, {"prompt": "a", name: value})[0] == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "guided_regex": "(a"}, "guided_regex"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"prompt": "a", "guided_json": {"not": {}}}, "guided_json"),
        ({"prompt": "a", "structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    ],
    ids=str,
)
def test_an_error_says_which_field_is_wrong_if_that_is_known(server, body, field):
    status, _, answer = post(server, body)
    assert status == 400 and answer["error"]["param"] == field


def test_fields_that_ask_for_nothing_are_accepted(server):
    fields = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "user": "me",
        "seed": None,
    }
    status, headers, _ = post(server, CHAT | fields, "/v1/chat/completions")
    assert status == 200 and "x-ignored-fields" not in headers


def test_fields_that_change_no_answer_are_ignored_and_named(server):
    fields = {"store": True, "service_tier": "scale"}
    status, headers, _ = post(server, CHAT | fields, "/v1/chat/completions")
    assert (status, headers["x-ignored-fields"]) == (200, "service_tier, store")
    fields = {"store": False, "service_tier": "flex", "priority": "background"}
    status, headers, _ = post(server, CHAT | fields, "/v1/chat/completions")
    assert status == 200 and "x-ignored-fields" not in headers


@pytest.mark.parametrize(
    ("body", "path", "line"),
    [
        ({"prompt": "a", "n": 0}, "/v1/completions", "'/v1/completions': 400, n: expected an"),
        (CHAT | {"model": "a\nb"}, "/v1/chat/completions", "404, model 'a\\nb' is not served"),
        ({}, "/v1/none", "'/v1/none': 404, Not Found"),
    ],
    ids=["field", "model", "path"],
)
def test_the_log_has_the_reason_of_a_refusal(server, caplog, body, path, line):
    caplog.set_level("INFO")
    post(server, body, path)

    def told():
        return [each for each in caplog.messages if each.startswith("POST ") and line in each]

    wait_until(told)  # the line comes after the answer; that of an earlier request may come now
    (found,) = told()
    assert "\n" not in found


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(server, caplog, stream):
    body = {"prompt": "a", "max_tokens": 1, "stream": stream, f"new_{stream}": 1, "b\r\nX: 1": 2}
    for _ in range(2):
        status, headers, _ = exchange(server, "POST", "/v1/completions", json.dumps(body))
        assert status == 200 and headers["x-ignored-fields"] == f"b%0D%0AX%3A%201, new_{stream}"
    assert caplog.text.count(f"new_{stream}") == 1
    with live("--strict-fields") as strict:
        status, _, answer = post(strict, body)
        assert status == 400 and f"new_{stream}" in answer["error"]["message"]
        error = post(strict, {"prompt": "a", "new": 1})[2]["error"]
        assert error["param"] == "new"


def test_health_models_and_metrics_are_told(server, openai_client):
    assert exchange(server, "GET", "/ready")[0] == 200
    assert exchange(server, "GET", "/health")[0] == 200
    (model,) = openai_client.models.list()
    assert openai_client.models.retrieve(model.id) == model
    status, _, content = exchange(server, "GET", f"/v1/models/{quote(model.id, safe='')}")
    assert status == 200 and json.loads(content)["id"] == model.id
    assert openai_client.completions.create(model=model.id, prompt="a", max_tokens=1).choices
    assert metric(server, "mlx_paged_up") == 1
    assert metric(server, "mlx_paged_kv_blocks") > 100
    assert metric(server, 'mlx_paged_http_responses_total{code="200"}') > 0
    assert metric(server, "mlx_paged_time_to_first_token_seconds_count") > 0


@pytest.fixture(scope="module")
def guarded():
    flags = ["--api-key", "secret", "--max-request-bytes", "1000", "--max-context", "64"]
    with live(*flags, "--decode-concurrency", "1", "--max-queue", "1") as running:
        yield running


def test_without_the_key_nothing_but_health_is_told(guarded):
    assert exchange(guarded, "GET", "/health")[0] == 200
    for method, path, body in (
        ("GET", "/metrics", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/completions", json.dumps({"prompt": "a"})),
        ("POST", "/v1/completions", "x" * 3_000_000),
    ):
        for headers in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "secret"},
            {"X-API-Key": "secre"},
            {"X-API-Key": "secre", "Authorization": "secret"},
        ):
            status, found, content = exchange(guarded, method, path, body, headers)
            assert status == 401 and found["WWW-Authenticate"] == "Bearer"
            assert json.loads(content)["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client(guarded, "wrong").models.list()
    with client(guarded, "secret") as own:
        assert own.completions.create(model=MODEL, prompt=CODE, max_tokens=4).choices


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "bearer secret"},
        {"authorization": "BEARER  secret"},
        {"X-API-KEY": "secret"},
        {"X-API-KEY": "none", "Authorization": "Bearer secret"},
        {"X-API-KEY": "secret", "Authorization": "Bearer none"},
    ],
    ids=str,
)
def test_the_key_may_come_in_any_usual_form(guarded, headers):
    assert exchange(guarded, "GET", "/v1/models", headers=headers)[0] == 200


KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("size", [1001, 3_000_000])
def test_a_large_body_is_refused(guarded, size):
    status, _, answer = post(guarded, b"x" * size, headers=KEY)
    assert status == 413 and f"the body has {size} bytes" in answer["error"]["message"]


def test_prompt_and_completion_are_bounded_together(guarded):
    status, _, answer = post(guarded, {"prompt": [5] * 64, "max_tokens": 62}, headers=KEY)
    assert status == 400 and "maximum context length is 64 tokens" in answer["error"]["message"]


def test_when_the_queue_is_full_the_client_is_told_to_come_again():
    with live("--decode-concurrency", "1", "--max-queue", "1") as server, client(server) as own:
        streams = [own.completions.create(model=MODEL, stream=True, **LONG) for _ in range(2)]
        next(iter(streams[0]))
        status, headers, answer = post(server, {"prompt": CODE, "max_tokens": 4})
        assert status == 503 and headers["Retry-After"] == "1"
        assert answer["error"]["code"] == "overloaded"
        streams[0].close()
        assert next(iter(streams[1])).choices
        streams[1].close()
        wait_until(lambda: post(server, {"prompt": CODE, "max_tokens": 4})[0] == 200)


def test_a_stream_cut_off_by_the_end_of_the_server_says_so():
    with live() as server, client(server) as own:
        stream = own.completions.create(model=MODEL, stream=True, **LONG)
        next(iter(stream))
        only_model(server).service.close()
        with pytest.raises(openai.APIError, match="ended early: the server is stopping"):
            list(stream)
        assert post(server, {"prompt": "a"})[0] == 503
        assert metric(server, "mlx_paged_up") == 0
        assert exchange(server, "GET", "/health")[0] == 503


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"a" * 50_000: 1}},
        {"guided_" + "a" * 50_000: "a"},
        {
            "tool_choice": {"function": {"name": "a" * 50_000}},
            "tools": [{"function": {"name": "f"}}],
        },
    ],
)
def test_an_error_tells_a_part_of_a_long_name(server, fields):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields
    status, _, content = post(server, body, "/v1/chat/completions")
    assert status == 400 and 100 < len(json.dumps(content)) < 2500


def test_an_error_tells_a_part_of_a_long_path(server):
    status, _, content = exchange(server, "GET", "/" + "a" * 50_000)
    assert status == 404 and len(content) < 500

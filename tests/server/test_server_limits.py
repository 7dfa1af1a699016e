"""The server refuses wrong requests and flags; it starts and stops cleanly."""

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import mlx_lm.server
import openai
import pytest
from server_harness import (
    CODE,
    MODEL,
    TIMEOUT,
    client,
    exchange,
    live,
    metric,
    only_model,
    post,
    wait_until,
)

import mlx_paged
from mlx_paged.server import arguments
from mlx_paged.server.__main__ import main
from mlx_paged.server.choices import CompletionChoice

LONG = {"max_tokens": 1500, "prompt": CODE, "logit_bias": {"1791": -100}}  # 1791 ends a text
pytest_plugins = ["server_fixtures"]


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
    "echo": ({"prompt": "a", "echo": True, "logprobs": 1}, "nothing beside echo"),
    "no tools": (
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
        "tools: expected",
    ),
    "empty prompt": ({"prompt": ""}, "prompt is empty"),
    "unknown token": ({"prompt": [10**6]}, "prompt has token 1000000"),
    "n": ({"prompt": "a", "n": 0}, "n: expected an integer >= 1"),
    "many": ({"prompt": "a", "n": 17}, "n: expected an integer from 1 to 16"),
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature is -1: expected"),
    "hot": (b'{"prompt": "a", "temperature": Infinity}', "temperature is inf: expected"),
    "max_tokens": ({"prompt": "a", "max_tokens": "7"}, "max_tokens: expected an integer"),
    "stop": ({"prompt": "a", "stop": [7]}, "stop: expected"),
    "logit_bias": (
        {"prompt": "a", "logit_bias": {"x": 1}},
        "logit_bias: expected numbers by token id",
    ),
    "biased token": ({"prompt": "a", "logit_bias": {"9999": 1}}, "token ids below 1792"),
    "stream": ({"prompt": "a", "stream": "yes"}, "stream: expected true or false"),
    "obfuscation": (
        {"prompt": "a", "stream_options": {"include_obfuscation": True}},
        "stream_options: expected",
    ),
    "stream_options": ({"prompt": "a", "stream_options": 1}, "stream_options: expected"),
    "adapters": ({"prompt": "a", "adapters": "/etc"}, "adapters: expected 'default_model'"),
    "too long": ({"prompt": "a", "max_tokens": 10**6}, "are more than the 2048 that"),
    "no role": ({"messages": [{"content": "a"}]}, "messages: expected objects with a role"),
    "no messages": ({"messages": []}, "messages: expected a list"),
    "images": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages: expected content that is text",
    ),
    "unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        "messages: expected content that is text",
    ),
    "no text": ({"messages": [{"role": "user", "content": 7}]}, "content that is text"),
    "half a character": ({"prompt": "\ud800"}, "no prompt can be made of the request"),
}


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
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        openai_client.completions.create(model="gpt-5", prompt="a")


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


def raw_answer(server, text):
    """All that the server sends in answer to some bytes."""
    with socket.create_connection(server.address, TIMEOUT) as connection:
        connection.sendall(text)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


CLOSE = "Host: localhost\r\nConnection: close\r\n"
JSON = "Content-Type: application/json\r\n"
BODY = '{"prompt": "a", "max_tokens": 1}'


@pytest.mark.parametrize("length", ["-1", "x", "9" * 5000])
def test_a_body_without_a_proper_length_is_refused(server, length):
    head = f"POST /v1/completions HTTP/1.1\r\n{CLOSE}{JSON}Content-Length: {length}\r\n\r\n"
    assert raw_answer(server, head.encode()).startswith(b"HTTP/1.1 400 ")


def test_a_body_may_come_in_chunks(server):
    chunks = f"5\r\n{BODY[:5]}\r\n{len(BODY) - 5:x}\r\n{BODY[5:]}\r\n0\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{CLOSE}{JSON}Transfer-Encoding: chunked\r\n\r\n"
    answer = raw_answer(server, (head + chunks).encode())
    assert answer.startswith(b"HTTP/1.1 200 ") and b"text_completion" in answer


def test_a_stream_comes_in_chunks_whose_end_a_client_sees(server):
    body = BODY[:-1] + ', "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\n{CLOSE}{JSON}Content-Length: {len(body)}\r\n\r\n"
    answer = raw_answer(server, (head + body).encode())
    assert b"transfer-encoding: chunked" in answer.lower() and answer.endswith(b"\r\n0\r\n\r\n")


def test_one_connection_takes_several_requests(server):
    connection = http.client.HTTPConnection(*server.address, timeout=TIMEOUT)
    sockets = set()
    for method, path in (("GET", "/health?x=1"), ("HEAD", "/health"), ("GET", "/v1/models")):
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == 200 and bool(response.read()) == (method == "GET")
        sockets.add(connection.sock.getsockname())
    connection.close()
    assert len(sockets) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost:99"}, 200),
        ({"Host": "[::1]:99"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
    ],
    ids=str,
)
def test_web_pages_cannot_drive_a_local_server(server, headers, status):
    found, sent, content = exchange(server, "POST", "/v1/completions", BODY, headers)
    assert found == status and ("error" in json.loads(content)) == (status != 200)
    assert "Access-Control-Allow-Origin" not in sent


def test_origins_and_hosts_may_be_allowed():
    flags = ["--allowed-origins", "http://a,http://b", "--allowed-hosts", "example.com"]
    with live(*flags, "--api-key", "secret") as server:
        asked = {"Access-Control-Request-Method": "POST"}
        for origin, status in (("http://b", 200), ("http://c", 400)):
            headers = {"Host": "example.com", "Origin": origin, **asked}
            found, sent, _ = exchange(server, "OPTIONS", "/v1/completions", headers=headers)
            assert found == status
            assert sent["Access-Control-Allow-Origin"] == ("http://b" if status == 200 else None)


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
    if name in REFUSED:
        assert post(server, {"prompt": "a", name: value})[0] == 400


def test_fields_that_ask_for_nothing_are_accepted(server):
    fields = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "user": "me",
        "seed": None,
    }
    status, headers, _ = post(server, CHAT | fields, "/v1/chat/completions")
    assert status == 200 and "x-ignored-fields" not in headers


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(server, caplog, stream):
    body = json.loads(BODY) | {"stream": stream, f"new_{stream}": 1, "b\r\nX: 1": 2}
    for _ in range(2):
        status, headers, _ = exchange(server, "POST", "/v1/completions", json.dumps(body))
        assert status == 200 and headers["x-ignored-fields"] == f"b%0D%0AX%3A%201, new_{stream}"
    assert caplog.text.count(f"new_{stream}") == 1
    with live("--strict-fields") as strict:
        status, _, answer = post(strict, body)
        assert status == 400 and f"new_{stream}" in answer["error"]["message"]


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
    status, _, answer = post(guarded, {"prompt": CODE, "max_tokens": 62}, headers=KEY)
    assert status == 400 and "more than the 64" in answer["error"]["message"]


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
        with pytest.raises(openai.APIError, match="taken back"):
            list(stream)
        assert post(server, {"prompt": "a"})[0] == 503
        assert metric(server, "mlx_paged_up") == 0
        assert exchange(server, "GET", "/health")[0] == 503


@pytest.mark.parametrize(
    ("how", "flags", "end"),
    [
        (signal.SIGINT, ["--drain-seconds", "0.2"], b"taken back"),
        (signal.SIGTERM, ["--drain-seconds", "0.2"], b"taken back"),
        (signal.SIGTERM, [], b"[DONE]"),
    ],
    ids=["interrupted", "short", "finished"],
)
def test_a_signal_ends_the_server_cleanly_in_the_middle_of_a_stream(how, flags, end):
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_paged.server", "--port", "0", "--kv-memory", "0.05", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in process.stderr if "serving" in line)
    host, port = line.rsplit("//", 1)[1].split(":")
    assert host == "127.0.0.1"
    body = json.dumps(LONG | {"stream": True}).encode()
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        begun = b""
        while b"data:" not in begun:  # headers and comments come before
            begun += connection.recv(4096) or pytest.fail("the stream ended")
        os.kill(process.pid, how)
        _, errors = process.communicate(timeout=TIMEOUT)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert end in answer and answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-draft-tokens", "0"], "expected a whole number from 1 to 15"),
        (["--kv-bits", "4"], "argument --kv-bits: kv_bits is '4': expected 8"),
        (["--kv-group-size", "32"], "argument --kv-group-size: expected 64, got '32'"),
        (["--quantized-kv-start", "9"], "argument --quantized-kv-start: expected 5000, got '9'"),
        (["--prompt-concurrency", "2"], "--prompt-concurrency is given"),
        (["--prompt-cache-size", "3"], "--prompt-cache-size: expected 0 or 10"),
        (["--ssl-certfile", "x"], "expected both or none"),
        (["--pipeline"], "--pipeline is given: more than one device is not supported"),
        (["--max-queue", "-1"], "expected a whole number >= 0"),
        (["--max-stall-ms", "-1"], "expected a number of milliseconds >= 0"),
        (["--prompt-cache-bytes", "much"], "expected a size such as 2GB"),
        (["--chat-template-args", "[]"], "expected a JSON object"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_flags_that_cannot_be_served_are_named(capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        arguments.parse(flags)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--policy", "--preempt"])
def test_a_choice_that_does_not_exist_is_answered_with_those_that_do(capsys, flag):
    with pytest.raises(SystemExit):
        arguments.parse([flag, "x"])
    assert "<" not in capsys.readouterr().err  # as in <Policy.FCFS: 'fcfs'>


@pytest.mark.parametrize(
    ("flags", "option", "value"),
    [
        (["--prompt-cache-bytes", "2MB"], "kv_memory", 2_000_000),
        (["--prompt-cache-bytes", "2MB", "--kv-memory", "0.5"], "kv_memory", 500_000_000),
        ([], "kv_memory", None),
        (["--prompt-cache-size", "0"], "prefix_cache", False),
        (["--no-prefix-cache"], "prefix_cache", False),
        ([], "prefix_cache", True),
        (["--decode-concurrency", "3"], "max_running", 3),
        (["--prefill-step-size", "7"], "prefill_chunk", 7),
        ([], "max_stall_ms", 150.0),
        (["--max-stall-ms", "40"], "max_stall_ms", 40.0),
        (["--max-stall-ms", "0"], "max_stall_ms", None),
    ],
    ids=str,
)
def test_flags_become_options_of_the_engine(flags, option, value):
    assert arguments.engine_options(arguments.parse(flags))[option] == value


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(arguments.API_KEY_VARIABLE, "secret")
    assert arguments.parse([]).api_key == "secret"
    assert arguments.parse(["--api-key", "other"]).api_key == "other"


def parser_of_mlx_lms_server(monkeypatch) -> argparse.ArgumentParser:
    class Caught(Exception):
        pass

    def catch(parser):
        raise Caught(parser)

    with monkeypatch.context() as patch, pytest.raises(Caught) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_args", catch)
        mlx_lm.server.main()
    return caught.value.args[0]


OTHER_DEFAULTS = {"--prefill-step-size": (2048, 512), "--allowed-origins": ("*", None)}
"""Their default and ours; docs/server.md names each of these flags."""


def test_every_flag_of_mlx_lms_server_is_known_with_its_default(monkeypatch):
    theirs = parser_of_mlx_lms_server(monkeypatch)
    ours = arguments.make_parser()
    flags = set(theirs._option_string_actions)
    assert len(flags) > 20 and flags <= set(ours._option_string_actions)
    for flag in flags:
        a, b = (parser._option_string_actions[flag] for parser in (theirs, ours))
        assert (a.nargs, a.const, a.choices) == (b.nargs, b.const, b.choices), flag
        assert b.dest == a.dest and not b.required, flag
        expected = OTHER_DEFAULTS.get(flag, (a.default, a.default))
        assert (a.default, b.default) == expected, flag
    documented = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    for flag, (_, default) in OTHER_DEFAULTS.items():
        assert f"`{flag}` defaults to {default}" in documented


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", "some/model"),
        ("--adapter-path", "adapters"),
        ("--host", "0.0.0.0"),
        ("--port", "80"),
        ("--allowed-origins", "http://a,http://b"),
        ("--trust-remote-code", None),
        ("--log-level", "DEBUG"),
        ("--chat-template", "{{ x }}"),
        ("--use-default-chat-template", None),
        ("--temp", "0.5"),
        ("--top-p", "0.9"),
        ("--top-k", "40"),
        ("--min-p", "0.1"),
        ("--max-tokens", "64"),
        ("--chat-template-args", '{"enable_thinking": false}'),
        ("--decode-concurrency", "4"),
        ("--prefill-step-size", "128"),
        ("--prompt-cache-size", "0"),
        ("--prompt-cache-bytes", "2GB"),
    ],
)
def test_values_of_mlx_lms_flags_are_read_as_there(monkeypatch, flag, value):
    given = [flag] if value is None else [flag, value]
    theirs, _ = parser_of_mlx_lms_server(monkeypatch).parse_known_args(given)
    ours = arguments.parse(given)
    name = flag.removeprefix("--").replace("-", "_")
    assert getattr(ours, name) == getattr(theirs, name) != arguments.parse([]).__dict__[name]


def test_nothing_from_the_network_is_unpickled():
    for path in Path(mlx_paged.__file__).parent.glob("server/*.py"):
        source = path.read_text()
        assert "pickle" not in source and "_share_" not in source and "eval(" not in source


def test_what_cannot_be_served_is_reported_in_one_line(server, capsys):
    taken = str(server.address[1])
    for flags, message in (
        (["--model", "/nowhere"], "model /nowhere"),
        (["--port", taken, "--kv-memory", "0.05"], "Address already in use"),
        (["--kv-memory", "1e-9"], "expected at least"),
    ):
        threads = threading.active_count()
        assert main(["--port", "0", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mlx_paged.server: error: ") and message in line
        assert threading.active_count() == threads


def test_a_server_that_is_open_to_others_without_a_key_warns(caplog):
    with live("--host", "0.0.0.0"):
        assert "0.0.0.0 is open to others" in caplog.text
    caplog.clear()
    with live("--host", "0.0.0.0", "--api-key", "secret"), live():
        assert "open to others" not in caplog.text


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    for name in ("answers", "app", "listener", "metrics", "models"):
        monkeypatch.delitem(sys.modules, f"mlx_paged.server.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["--port", "0"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install 'mlx_paged[server]'" in error

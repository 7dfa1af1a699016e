"""Who gets an answer: every endpoint with every trick of a header or a target, with and without a
key. `python -m scripts.server_versions` runs this file with other versions of starlette and
uvicorn."""

import json
import logging
import re
import socket
from functools import cache

import pytest

from mlx_paged.server import flags as server_flags
from tests.support import TIMEOUT
from tests.support.commands.server_harness import live, wait_until

KEY = "s3cret"
OPEN = {"/", "/health", "/ready", "/openapi.json"}
ENDPOINTS = [
    *(("GET", path) for path in ("/", "/health", "/ready", "/metrics", "/status")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/default_model")),
    *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/chat/completions")),
    *(("POST", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")),
    *(("GET", path) for path in ("/v1/cache", "/openapi.json")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", "/apply-template", "/v1/estimate")),
]
JSON = "Content-Type: application/json"
LOCAL = "Host: 127.0.0.1"
BARE = "{path}"

HEADS: dict[str, tuple[str, list[str]]] = {
    "plain": (BARE, [LOCAL]),
    **{
        f"host {host}": (BARE, [f"Host: {host}"])
        for host in (
            *("127.0.0.1/health?", "127.0.0.1/health#", "127.0.0.1/?", "127.0.0.1:80/ready?x="),
            *("/health?", "?/health", "#", "@/health?", "127.0.0.1\\health", "a b/health?"),
            *("127.0.0.1%2fhealth%3f", "[::1]/health?", "[/health?", "http://127.0.0.1/health?"),
            *(
                "",
                "x" * 300,
                "127.0.0.1:99999/health?",
                "127.0.0.1;/health",
                "health",
                "\xff/ready",
            ),
        )
    },
    **{
        f"header {line}": (BARE, [LOCAL, line])
        for line in (
            *("X-Forwarded-Host: 127.0.0.1/health?", "X-Forwarded-Prefix: /health"),
            *("X-Forwarded-Path: /health", "X-Original-URL: /health", "X-Rewrite-URL: /health"),
            *("X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1"),
            *("X-HTTP-Method-Override: GET", "X-HTTP-Method: HEAD", "Upgrade: websocket"),
            *("Origin: http://127.0.0.1", "Referer: http://127.0.0.1/health", "Cookie: key=1"),
            *("Authorization:", "Authorization: Bearer", "Authorization: Bearer  ", "X-Api-Key:"),
            *("Authorization: Basic czNjcmV0", "Authorization: s3cret", "Authorization: null"),
            *("Authorization: Bearer s3cre", "Authorization: Bearer s3crett", "X-Api-Key: S3CRET"),
            *("Authorization: Bearer None", "X-Api-Key: None", "X-Api-Key: \xff", "X-Api-Key: *"),
            *("Authorization: Bearer \xff", "Authorization: Bearer s3cret,", "Api-Key: s3cret"),
            *("Connection: X-Api-Key", "Transfer-Encoding: identity", "Content-Encoding: gzip"),
        )
    },
    "twice": (BARE, [LOCAL, "X-Api-Key: a", "X-Api-Key: b", "Authorization: Bearer c"]),
    **{
        f"target {target}": (target, [LOCAL])
        for target in (
            *("{path}?/health", "{path}#/health", "{path}?x=/../health", "//health/..{path}"),
            *("/health/..{path}", "/health%2f..{path}", "{path};/health", "{path}/../health"),
            *("http://127.0.0.1/health?{path}", "http://127.0.0.1{path}", "/.{path}", "/{path}"),
            *("{path}%3f/health", "{path}/", "{path}%00", "{path}%20", "/%2e{path}", "*"),
        )
    },
}
"""Targets and headers without a key."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Any Host may come, so that nothing but the key protects."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# comment\n\nann {KEY}\nbob other\nthird\n")
    flags = "--allowed-hosts", "*", "--api-key", "of-flag", "--api-key-file", str(path)
    with live(*flags) as running:
        yield running


def answer(server, method, target, lines, version="1.1", body="{}"):
    """Status, headers and body of one answer to a request that is written as it stands."""
    if method == "POST":
        lines = [*lines, JSON, f"Content-Length: {len(body)}"]
    head = "\r\n".join([f"{method} {target} HTTP/{version}", *lines, "Connection: close", "", ""])
    with socket.create_connection(server.address, TIMEOUT) as connection:
        connection.sendall((head + (body if method == "POST" else "")).encode("latin-1"))
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    top, _, content = found.partition(b"\r\n\r\n")
    return int(top.split()[1]), top.decode("latin-1").lower(), content


@cache
def plain(server, method, path):
    """Status of an endpoint with the key."""
    status = answer(server, method, path, [LOCAL, f"X-Api-Key: {KEY}"])[0]
    assert status == (200 if method == "GET" else 400)  # of a body without its fields
    return status


def test_the_endpoints_are_those_of_the_server(server):
    """So that a new one is tried, too."""
    routes = {(m, r.path) for r in server.app.routes for m in r.methods - {"HEAD"}}
    known = {(method, path.replace("default_model", "{name:path}")) for method, path in ENDPOINTS}
    assert routes == known


@pytest.mark.parametrize("trick", HEADS)
def test_no_trick_is_a_key(server, trick):
    target, lines = HEADS[trick]
    for method, path in ENDPOINTS:
        aim = target.format(path=path)
        status, _, content = answer(server, method, aim, lines)
        is_open = path in OPEN or aim in OPEN
        assert status < 500
        if not is_open:
            assert status in (400, 401), (method, aim, lines, status, content[:200])
            assert b"mlx_paged_" not in content and b"default_model" not in content


@pytest.mark.parametrize("trick", [name for name in HEADS if HEADS[name][0] == BARE])
def test_with_a_key_a_trick_changes_nothing(server, trick):
    """Unless HTTP refuses the request, with and without a key."""
    _, lines = HEADS[trick]
    own = [line for line in lines if re.match("(?i)x-api-key|authorization", line)]
    lines = [line for line in lines if line not in own]
    of_http = answer(server, "GET", "/health", lines)[0]
    for method, path in ENDPOINTS:
        expected = of_http if of_http != 200 else plain(server, method, path)
        if trick == "header Content-Encoding: gzip" and method == "POST":
            expected = 415
        status, _, content = answer(server, method, path, [f"X-Api-Key: {KEY}", *lines, *own])
        assert status == expected, (method, path, content[:200])


@pytest.mark.parametrize("key", [KEY, "other", "third", "of-flag"])
@pytest.mark.parametrize("header", ["X-Api-Key: {}", "Authorization: Bearer {}"])
def test_each_key_opens_every_endpoint(server, key, header):
    for method, path in ENDPOINTS:
        status, _, _ = answer(server, method, path, [LOCAL, header.format(key)])
        assert status == plain(server, method, path)


def test_the_log_names_whose_key_it_was(server, caplog):
    caplog.set_level(logging.INFO)
    for key, told in ((KEY, "key ann, "), ("third", "key line 5, "), ("of-flag", ""), ("no", "")):
        caplog.clear()
        answer(server, "GET", "/v1/models", [LOCAL, f"X-Api-Key: {key}"])
        wait_until(lambda: any(text.startswith("GET ") for text in caplog.messages))
        (line,) = [text for text in caplog.messages if text.startswith("GET ")]
        status = "401, no valid API key was given" if key == "no" else "200"
        assert re.fullmatch(rf"GET '/v1/models': {status}, {told}\d.\d+ s, id \w+", line)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one key"),
        ("# only a comment\n\n", "expected at least one key"),
        ("a b c", "line 1: expected a key, or a name and a key"),
        ("a b\na c", "line 2: expected a name"),
        ("a b\nk\xe9y", "line 2: expected a key of printable ASCII"),
        ("\x1b[31m b", "line 1: expected a name"),
        (None, "No such file"),
        (b"\xff\xfe", "expected a text file"),
    ],
    ids=repr,
)
def test_a_file_without_proper_keys_is_a_mistake(tmp_path, capsys, text, message):
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as ended:
        server_flags.parse(["--api-key-file", str(path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--api-key-file: " in line and message in line


@pytest.mark.parametrize("key", ["", " ", "a b", "caf\xe9", "\udcff", "a\n"])
@pytest.mark.parametrize("flag", ["--api-key", server_flags.API_KEY_VARIABLE])
def test_a_key_that_no_client_can_send_is_a_mistake(monkeypatch, capsys, flag, key):
    """An empty one, of a variable that is not set, would open the server."""
    given = ["--api-key", key] if flag == "--api-key" else []
    monkeypatch.setenv(server_flags.API_KEY_VARIABLE, "good" if given else key)
    with pytest.raises(SystemExit) as ended:
        server_flags.parse(given)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag}: expected a key" in line


def test_the_variable_counts_without_a_flag_only(monkeypatch, tmp_path):
    path = tmp_path / "keys"
    path.write_text("mine k\n")
    monkeypatch.setenv(server_flags.API_KEY_VARIABLE, "of-variable")
    given = {(): {"": "of-variable"}, ("--api-key-file", str(path)): {"mine": "k"}}
    for flags, keys in given.items():
        assert server_flags.parse([*flags]).api_keys == keys


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (["--api-key", "k"], {"": "k"}),
        (["--api-key", "ann=k", "--api-key", "bob=l", "--api-key", "m"], dict(ann="k", bob="l")),
        (["--api-key", "a.b-c_1=x=y=="], {"a.b-c_1": "x=y=="}),
        (["--api-key", "czNjcmV0=="], {"": "czNjcmV0=="}),
        (["--api-key", "+/z=k"], {"": "+/z=k"}),
    ],
)
def test_keys_of_flags_may_have_names(flags, keys):
    extra = {"": "m"} if len(flags) == 6 else {}
    assert server_flags.parse(flags).api_keys == keys | extra


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", "a", "--api-key", "b"], "--api-key: expected several keys as NAME=KEY"),
        (["--api-key", "n=a", "--api-key", "n=b"], "--api-key: expected several keys as NAME=KEY"),
        (["--api-key", "n=a", "--api-key", "m=a"], "--api-key: expected a different key"),
        (["--api-key", "n=a b"], "--api-key: expected a key of printable ASCII"),
        (["--api-key", "a", "--admin-key", "a"], "--admin-key: expected another key"),
        (["--api-key", "admin=a", "--admin-key", "b"], "--admin-key: expected no other key"),
        (["--admin-key", ""], "--admin-key: expected a key"),
    ],
)
def test_two_keys_are_told_apart_or_refused(capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        server_flags.parse(flags)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_name_among_the_keys_of_clients_opens_no_more():
    """The name of the admin's key is one that a client's key may have, too."""
    for flags, status in (
        (["--api-key", "admin=a", "--api-key", "ann=b"], (200, 200, 401)),
        (["--api-key", "ann=b", "--admin-key", "a"], (200, 200, 401)),
        (["--admin-key", "a"], (200, 200, 200)),
    ):
        with live("--allowed-hosts", "*", *flags) as server:
            found = [
                answer(server, "GET", "/v1/cache", [LOCAL, f"X-Api-Key: {key}"])
                for key in ("a", "b", "none")
            ]
            assert tuple(each[0] for each in found) == status
            post(server, {"prompt": "x = 1\n" * 9, "max_tokens": 1, "cache_salt": "s"}, key="a")
            views = [answer(server, "GET", "/v1/cache", [LOCAL, f"X-Api-Key: {k}"]) for k in "ab"]
            sees = [b'"num_chains": 1' in content for *_, content in views]
            assert sees == ["--admin-key" in flags, False]


def post(server, body, key):
    head = [LOCAL, f"X-Api-Key: {key}"]
    assert answer(server, "POST", "/v1/completions", head, body=json.dumps(body))[0] == 200

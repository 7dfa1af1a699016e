"""What is held for clients has a common limit, and clients that are too slow do not stay."""

import http.client
import json
import socket
import threading
import time

import pytest

from mlx_paged.protocol.request_body import Refusal
from mlx_paged.protocol.responses import MAX_ECHO
from mlx_paged.server import answers, bodies, listener, tickets
from mlx_paged.server.held_bytes import FREE, HeldBytes, Share
from tests.support.commands.server_harness import (
    CODE,
    exchange,
    live,
    only_model,
    post,
    wait_until,
)

pytest_plugins = ["tests.support.commands.server_fixtures"]
FLAGS = "--max-held-bytes", "2000000", "--max-request-bytes", "4000000"
PATHS = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"


def opened(server, path="/v1/completions", length=1_000_000, body=b"", small=False):
    """A connection with the head of a request, and a part of its body."""
    connection = socket.socket()
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(30)
    connection.connect(server.address)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


def answered(connection):
    """Status line and the rest of all that comes before the connection ends."""
    found = b""
    while piece := connection.recv(1 << 16):
        found += piece
    return found


def test_shares_have_one_limit_and_give_back_what_they_held():
    held = HeldBytes(1000)
    small, first, second = Share(held), Share(held), Share(held)
    small.grow(FREE, "it")
    assert held.size == 0
    first.grow(FREE + 600, "it")
    with pytest.raises(Refusal, match="try again later") as refused:
        second.grow(FREE + 600, "it")
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    with pytest.raises(
        Refusal, match="it takes 1001 bytes: expected at most --max-held-bytes 1000"
    ) as refused:
        second.grow(FREE + 1001, "it", 413)
    assert (refused.value.status, refused.value.code) == (413, None)
    first.grow(400, "it")
    assert held.size == 1000
    first.close()
    second.grow(FREE + 1000, "it")
    second.close()
    assert held.size == 0


@pytest.mark.parametrize("path", PATHS)
def test_unfinished_bodies_have_a_common_limit(server, path):
    started = [opened(server, path, body=b"x" * 900_000) for _ in range(2)]
    time.sleep(0.2)
    try:
        big = {"metadata": {"a": "x" * 500_000}, "prompt": "a", "max_tokens": 1}
        status, headers, answer = post(server, big, path)
        assert status == 503 and headers["Retry-After"] == "1"
        assert "2000000" not in json.dumps(answer) and "--max-held-bytes" in json.dumps(answer)
        assert post(server, {"prompt": CODE, "max_tokens": 1})[0] == 200  # small ones pass
    finally:
        for connection in started:
            connection.close()
    wait_until(lambda: post(server, big)[0] == 200)


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_can_never_be_held_is_refused_with_the_flag(server, path):
    for body in (b"x" * 3_000_000, b'{"a":[' + b"[]," * 50_000 + b"1]}"):
        status, headers, answer = post(server, body, path)
        assert status == 413 and headers["Retry-After"] is None
        assert "--max-held-bytes 2000000" in answer["error"]["message"]
    status, _, answer = post(server, b"x" * 4_000_001, path)
    assert status == 413 and "--max-request-bytes 4000000" in answer["error"]["message"]


def test_an_answer_that_can_never_be_held_is_refused_with_the_flag(server, monkeypatch):
    scored = {"prompt": CODE * 100, "max_tokens": 0, "echo": True, "logprobs": 20}
    many = {"prompt": [CODE] * 16, "max_tokens": 200, "logprobs": 20, "ignore_eos": True}
    for body in (scored, scored | {"prompt": [CODE * 100] * 2}, many):
        status, headers, answer = post(server, body)
        assert status == 400 and headers["Retry-After"] is None, answer
        assert "the answer takes" in answer["error"]["message"]
        assert "--max-held-bytes 2000000" in answer["error"]["message"]
    few = {"prompt": CODE, "max_tokens": 9, "logprobs": 20}
    assert post(server, few)[0] == 200
    monkeypatch.setattr(answers, "ENTRY_BYTES", 20_000)  # so that only the entries are too many
    assert post(server, few)[0] == 400


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("begin", [b"", b"x" * 100_000], ids=["slow", "then slow"])
def test_a_slow_body_ends_with_408(server, path, drips, begin, monkeypatch):
    monkeypatch.setattr(bodies, "PACE_S", 0.3)
    connection = opened(server, path, body=b'{"prompt": "' + begin)
    begun = time.monotonic()

    def drip():
        while time.monotonic() < begun + 2:
            try:
                connection.sendall(b"a" * 10)
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=drip if drips else lambda: None)
    thread.start()
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(1 << 16)
    assert found.startswith(b"HTTP/1.1 408 ") and b"connection: close" in found.lower()
    assert time.monotonic() < begun + 2
    thread.join()
    connection.close()


def test_a_body_with_the_pace_may_take_longer(server, monkeypatch):
    monkeypatch.setattr(bodies, "PACE_S", 0.4)
    monkeypatch.setattr(bodies, "PACE_BYTES", 100)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 1000}).encode()
    connection = opened(server, length=len(body))
    for start in range(0, len(body), 50):
        connection.sendall(body[start : start + 50])
        time.sleep(0.05)
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    connection.close()


@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_the_rest_of_a_body_that_nobody_reads_does_not_keep_a_connection(server, path, monkeypatch):
    monkeypatch.setattr(listener, "REST_S", 0.3)
    connection = socket.create_connection(server.address, 10)
    kind = "Content-Type: text/plain\r\nContent-Length: 100000\r\n"
    method = "GET" if path == "/health" else "POST"
    connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n".encode())
    begun = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() < begun + 8:
            connection.sendall(b"a")
            time.sleep(0.05)
    assert time.monotonic() < begun + 5
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut_off_and_its_request_ends(monkeypatch, stream):
    monkeypatch.setattr(listener, "WRITE_S", 1.5)
    with live() as server:
        body = {"prompt": ["a"] * 60, "n": 1, "max_tokens": 40, "ignore_eos": True}
        body |= {"stream": stream, "logprobs": 20}
        raw = json.dumps(body).encode()
        connection = opened(server, length=len(raw), body=raw, small=True)
        wait_until(lambda: only_model(server).taken)
        begun = time.monotonic()
        wait_until(lambda: not server.server_state.connections)
        wait_until(lambda: not only_model(server).taken)
        assert time.monotonic() - begun < 55
        connection.close()
        assert exchange(server, "GET", "/health")[0] == 200


def test_a_slow_reader_that_reads_gets_its_whole_answer(monkeypatch):
    monkeypatch.setattr(listener, "WRITE_S", 1.5)
    with live() as server:
        body = {"prompt": ["a"] * 60, "max_tokens": 40, "logprobs": 20, "ignore_eos": True}
        raw = json.dumps(body).encode()
        connection = opened(server, length=len(raw), body=raw, small=True)
        answer, begun = http.client.HTTPResponse(connection), time.monotonic()
        answer.begin()
        found = b""
        while piece := answer.read(500_000):
            found += piece
            time.sleep(0.3)
        assert len(json.loads(found)["choices"]) == 60
        assert time.monotonic() > begun + 2  # longer than a client may read nothing
        connection.close()


class Unread:
    """Stands for the completions of a request."""

    def __init__(self, num_unread):
        self.num_unread, self.is_closed = num_unread, False

    def close(self):
        self.is_closed = True


def test_unread_outputs_of_all_requests_have_a_limit():
    few, many = Unread(tickets.MAX_UNREAD // 3), Unread(tickets.MAX_UNREAD // 2)
    tickets.end_unread({few, many})
    assert not few.is_closed and not many.is_closed
    more = Unread(tickets.MAX_UNREAD // 3)
    tickets.end_unread({few, many, more})
    assert many.is_closed and not few.is_closed and not more.is_closed


def test_an_answer_repeats_fields_once_and_no_long_ones(server):
    short = {"a": "unlike any other"}
    base = {"input": "def f", "max_output_tokens": 1, "instructions": "unlike others"}
    tools = [{"type": "function", "name": "f", "description": "unlike tools"}]
    base |= {"metadata": short, "tools": tools, "tool_choice": "none"}
    raw = json.dumps(base | {"stream": True})
    _, _, content = exchange(server, "POST", "/v1/responses", raw)
    assert content.count(b"unlike any other") == content.count(b"unlike tools") == 1
    assert content.count(b"unlike others") == 1
    last = json.loads(content.rpartition(b"data: ")[2])["response"]
    assert (last["metadata"], last["tools"]) == (short, tools)
    long = {
        "metadata": {"a": "x" * (MAX_ECHO + 1)},
        "tools": [{**tools[0], "description": "y" * (MAX_ECHO + 1)}],
    }
    status, _, answer = post(server, base | long, "/v1/responses")
    assert status == 200 and (answer["metadata"], answer["tools"]) == ({}, [])
    _, _, content = exchange(
        server, "POST", "/v1/responses", json.dumps(base | long | {"stream": True})
    )
    assert len(content) < MAX_ECHO

"""Bodies, connections, hosts and origins: what the server takes of HTTP."""

import http.client
import json
import socket

import pytest

from tests.support.commands.server_harness import TIMEOUT, exchange, live, post

pytest_plugins = ["tests.support.commands.server_fixtures"]


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


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(server):
    """What comes after it may be meant as another request by a proxy."""
    lengths = f"Content-Length: {len(BODY)}\r\nTransfer-Encoding: chunked\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}{lengths}\r\n"
    chunks = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
    answer = raw_answer(server, (head + chunks).encode()).lower()
    assert answer.startswith(b"http/1.1 400 ") and answer.count(b"http/1.1") == 1
    assert b"connection: close" in answer and b"content-length and transfer-encoding" in answer


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
        for key, status in (("secret", 200), ("wrong", 401)):
            headers = {"Host": "example.com", "Origin": "http://a", "X-Api-Key": key}
            body = {"prompt": "a", "max_tokens": 1, "extra": 1}
            found, sent, _ = post(server, body, headers=headers)
            assert found == status
            readable = sent["Access-Control-Expose-Headers"].split(", ")
            assert {"x-request-id", "request-id", "x-ignored-fields", "retry-after"} == {*readable}
            assert sent["x-request-id"] == sent["request-id"]
            assert sent["x-ignored-fields"] == ("extra" if status == 200 else None)

"""Bodies, connections, hosts and origins: what the server takes of HTTP."""

import gzip
import http.client
import json
import logging
import socket

import pytest

from mlx_paged.server import listener
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


CHUNKED = f"Host: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"


def test_a_body_of_many_tiny_chunks_is_refused(server):
    """Each chunk takes as long as kilobytes, and the event loop takes all that come at once."""
    head = f"POST /v1/completions HTTP/1.1\r\n{CHUNKED}".encode()
    few, tiny = b"1\r\n \r\n", listener.FREE_CHUNKS * b"1\r\n \r\n"
    large = b"10000\r\n" + b" " * 65536 + b"\r\n"
    body = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n".encode()
    close = head.replace(b"Host", b"Connection: close\r\nHost")
    assert raw_answer(server, head + tiny + few).startswith(b"HTTP/1.1 400 ")
    assert raw_answer(server, close + large + tiny + body).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("pause", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("path", ["/health", "/v1/completions"])
def test_a_bad_chunk_around_an_answer_raises_nothing(server, caplog, path, pause):
    """The answer of the application comes after that of the parser, or the other way round."""
    head, bad = f"GET {path} HTTP/1.1\r\n{CHUNKED}".encode(), b"zz\r\n"
    with socket.create_connection(server.address, TIMEOUT) as connection:
        connection.sendall(head if pause else head + bad)
        assert connection.recv(12).startswith(b"HTTP/1.1 ")
        if pause:
            connection.sendall(bad)
        while connection.recv(1 << 16):
            pass
    assert exchange(server, "GET", "/health")[0] == 200
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_stream_comes_in_chunks_whose_end_a_client_sees(server):
    body = BODY[:-1] + ', "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\n{CLOSE}{JSON}Content-Length: {len(body)}\r\n\r\n"
    answer = raw_answer(server, (head + body).encode())
    assert b"transfer-encoding: chunked" in answer.lower() and answer.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ],
)
def test_nginx_is_told_to_send_events_as_they_come(server, path, field):
    body = {"stream": True} | ({} if "input" in field else {"max_tokens": 1}) | field
    status, headers, _ = exchange(server, "POST", path, json.dumps(body))
    assert (status, headers["X-Accel-Buffering"]) == (200, "no")


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
        ({"Host": "LOCALHOST"}, 200),
        *(
            ({"Host": host}, 421)
            for host in (
                *("", ":80", "[]", "127.0.0.1@evil.com", "evil.com/x?", "localhost/", "localhost?"),
                *("localhost#", "[::1", "::1", "[::1]x", "[localhost", "localhost:80:80", "a b"),
                *("localhost, evil.com", "localhost:x", "evil.com@localhost", "localhost%00"),
            )
        ),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Content-Encoding": "identity, br"}, 415),
        ({"Content-Encoding": "Identity"}, 200),
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


@pytest.mark.parametrize(("version", "status"), [("1.0", 200), ("1.1", 400)])
def test_checks_of_health_without_a_host_are_answered(server, version, status):
    """HAProxy sends them so, in HTTP/1.0."""
    answer = raw_answer(server, f"GET /health HTTP/{version}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def test_a_body_that_curl_sends_without_a_header_is_told_the_header(server):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    _, _, content = exchange(server, "POST", "/v1/completions", BODY, headers)
    assert "-H 'Content-Type: application/json'" in json.loads(content)["error"]["message"]


def test_a_body_with_an_encoding_is_refused_by_name(server):
    body = gzip.compress(BODY.encode())
    headers = {"Content-Encoding": "gzip"}
    _, _, content = exchange(server, "POST", "/v1/completions", body, headers)
    assert "Content-Encoding is 'gzip'" in json.loads(content)["error"]["message"]


def test_origins_and_hosts_may_be_allowed():
    flags = ["--allowed-origins", "http://a,http://b", "--allowed-hosts", "Example.com,"]
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
            assert {*readable} == {
                "x-request-id",
                "request-id",
                "x-ignored-fields",
                "x-max-tokens",
                "retry-after",
            }
            assert sent["x-request-id"] == sent["request-id"]
            assert sent["x-ignored-fields"] == ("extra" if status == 200 else None)

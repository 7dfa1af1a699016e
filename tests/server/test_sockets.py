"""Where the server listens: ports of addresses, Unix sockets."""

import http.client
import json
import logging
import os
import socket
import stat

import pytest

from mlx_paged.server import flags as server_flags
from mlx_paged.server import loaded_model, sockets
from mlx_paged.server.__main__ import main
from tests.support import TIMEOUT
from tests.support.commands.server_harness import running


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Of a socket: relative, because an absolute one may be too long for a socket."""
    monkeypatch.chdir(tmp_path)
    return "own.sock"


def asked(path, method="GET", target="/health", body=None, headers=()):
    connection = http.client.HTTPConnection("any.example", timeout=TIMEOUT)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(TIMEOUT)
    connection.sock.connect(path)
    connection.request(method, target, body, {"Content-Type": "application/json", **dict(headers)})
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_a_unix_socket_answers_and_goes_with_the_server(path, caplog):
    caplog.set_level(logging.INFO)
    with running("--uds", path, "--api-key", "k") as server:
        assert server.address == path and server.url == f"http+unix:{path}"
        assert asked(path)[0] == 200
        body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
        assert asked(path, "POST", "/v1/completions", body)[0] == 401
        status, content = asked(path, "POST", "/v1/completions", body, {"X-Api-Key": "k"})
        assert status == 200 and content.endswith(b"data: [DONE]\n\n")
    assert not os.path.exists(path)
    assert "open to others" not in caplog.text


def test_a_socket_of_a_killed_server_is_replaced(path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    with running("--uds", path):
        assert asked(path)[0] == 200


@pytest.mark.parametrize("taken", ["a file", "a server", "a server that loads", "", "x" * 200])
def test_a_path_that_cannot_be_had_is_told_before_the_model_is_loaded(
    path, taken, monkeypatch, capsys
):
    monkeypatch.setattr(loaded_model, "load_with_config", None)
    with socket.socket(socket.AF_UNIX) as other:
        if taken == "a file":
            path_of_file = path
            with open(path_of_file, "w") as file:
                file.write("mine")
        elif taken.startswith("a server"):
            args = server_flags.parse(["--uds", path])
            other = sockets.bound(args)  # nobody accepts yet
        else:
            path = taken
        assert main(["--uds", path]) == 2
        other.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlx_paged.server: error: --uds {path}: ")
    if taken == "a file":
        with open(path) as file:
            assert file.read() == "mine"


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_urls_have_addresses_of_ipv6_in_brackets(host, shown):
    try:
        listener = sockets.bound(server_flags.parse(["--host", host, "--port", "0"]))
    except ValueError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        port = listener.getsockname()[1]
        assert sockets.url_of(listener, "http") == f"http://{shown}:{port}"


def test_a_port_where_another_server_has_begun_to_listen_names_its_flags():
    """Two servers may have one port until one of them listens: both load their models first."""
    with sockets.bound(server_flags.parse(["--port", "0"])) as first:
        port = str(sockets.address_of(first)[1])
        args = server_flags.parse(["--port", port])
        with sockets.bound(args) as second:
            sockets.listen(first, args)
            with pytest.raises(
                ValueError, match=f"--port {port}: Address already in use: expected"
            ):
                sockets.listen(second, args)

"""The server loads models on demand, unloads them, and keeps to their positions."""

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
import weakref
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.engine import Engine
from mlx_paged.runner.positions import positions as positions_of
from mlx_paged.server import answers
from mlx_paged.server import flags as server_flags
from mlx_paged.server.__main__ import serving
from mlx_paged.server.models import Models
from tests.support.commands.server_harness import (
    CODE,
    TIMEOUT,
    client,
    exchange,
    live,
    metric,
    only_model,
    post,
    wait_until,
    written,
)
from tests.support.documents import ROOT

PROCESS = Path("/proc/self/status")
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def other(tmp_path):
    """A second model: a copy of the demo model."""
    return str(shutil.copytree(demo_model_path(), tmp_path / "other"))


def ask(server, model, **options):
    return post(server, {"model": model, "prompt": CODE, "max_tokens": 8} | options)


def test_a_server_is_warm_when_it_listens(monkeypatch):
    """Else its first request would wait for what the service traces."""
    done = threading.Event()
    monkeypatch.setattr(Engine, "warm_up", lambda engine: done.wait(0.5) or done.set())
    with serving(server_flags.parse(["--port", "0", "--kv-memory", "0.05"])):
        assert done.is_set()


def test_a_warm_up_that_fails_is_a_mistake_of_the_start(monkeypatch):
    def fail(engine):
        raise OSError("no kernel")

    monkeypatch.setattr(Engine, "warm_up", fail)
    args = server_flags.parse(["--port", "0", "--kv-memory", "0.05"])
    with pytest.raises(ValueError, match=r"^model .*demo_model: OSError: no kernel"), serving(args):
        pass


def test_a_model_whose_client_leaves_while_it_loads_is_kept(monkeypatch):
    begun, may_end, made = threading.Event(), threading.Event(), []

    def make(path, args, places, trusts):
        made.append(path)
        begun.set()
        assert may_end.wait(TIMEOUT)
        return SimpleNamespace(taken=0, take=lambda count: None, max_context=1)

    monkeypatch.setattr("mlx_paged.server.loaded_model.make", make)
    models = Models(server_flags.parse(["--port", "0", "--model", "none"]))

    async def leave():
        async def wait():
            async with models.use("model", 1):
                pass

        client = asyncio.ensure_future(wait())
        await asyncio.to_thread(begun.wait, TIMEOUT)
        client.cancel()
        threading.Timer(0.1, may_end.set).start()
        await wait()  # another client's request for the model
        with pytest.raises(asyncio.CancelledError):
            await client

    asyncio.run(leave())
    assert [*models.loaded] == made == ["model"]


@pytest.mark.slow
def test_the_model_of_a_request_is_loaded_in_place_of_another(other):
    flags = ["--served-model-name", "coder,default", "--prompt-cache-size", "0"]
    flags += ["--unpin-default", "--allow-models", other]
    with live(*flags) as server:
        text = written(CODE, 8)
        for name in ("coder", other, "default", other, None):
            status, _, answer = ask(server, name)
            assert status == 200 and answer["choices"][0]["text"] == text
            assert answer["model"] == (name or "default_model")
            assert len(server.models.loaded) == 1
        ids = [
            model["id"] for model in json.loads(exchange(server, "GET", "/v1/models")[2])["data"]
        ]
        assert ids == ["coder", "default", other]
        assert ask(server, "no/such-model")[0] == ask(server, "/nowhere")[0] == 404


@pytest.mark.slow
def test_a_model_is_kept_until_its_answers_have_ended(other):
    flags = ["--unpin-default", "--allow-models", other, "--swap-seconds", "0"]
    with live(*flags) as server, client(server) as own:
        stream = own.completions.create(
            model="default_model", prompt=CODE, max_tokens=300, stream=True
        )
        next(iter(stream))
        assert ask(server, other)[0] == 200
        assert "".join(packet.choices[0].text for packet in stream)
        assert [*server.models.loaded] == [other]


@pytest.mark.slow
def test_two_models_may_be_held_and_share_the_memory(other):
    with live("--max-models", "2", "--allow-models", other) as server:
        blocks = metric(server, "mlx_paged_kv_blocks")
        assert ask(server, other)[0] == ask(server, "default_model")[0] == 200
        assert len(server.models.loaded) == 2
        assert metric(server, "mlx_paged_kv_blocks") == 2 * blocks
        assert metric(server, "mlx_paged_generation_tokens_total") == 16
        name = f'vllm:num_requests_running{{model_name="{other}"}}'
        assert metric(server, name) == 0
    with live() as alone:
        assert metric(alone, "mlx_paged_kv_blocks") == pytest.approx(2 * blocks, abs=2)


@pytest.mark.slow
@pytest.mark.skipif(not PROCESS.exists(), reason="reads /proc")
def test_swaps_leave_threads_and_memory_as_they_were(other):
    """A hundred swaps beside the second one, within 20 MB."""

    def held(name):
        found = re.search(rf"^{name}:\s+(\d+)", PROCESS.read_text(), re.MULTILINE)
        return int(found[1])

    with live("--unpin-default", "--allow-models", other) as server:
        for workers in server.app.state.workers.values():  # else they begin when they are needed
            count = workers._max_workers
            everyone = threading.Barrier(count)
            wait([workers.submit(everyone.wait, TIMEOUT) for _ in range(count)])
        for i in range(102):
            assert ask(server, None if i % 2 else other)[0] == 200
            if i == 1:
                threads, kilobytes = held("Threads"), held("VmRSS")
        assert held("Threads") <= threads and held("VmRSS") <= kilobytes + 20_000


def test_no_other_model_is_loaded_if_none_may_be(other):
    with live("--max-models", "0", "--allow-models", other) as server:
        assert ask(server, other)[0] == 404 and ask(server, None)[0] == 200


@pytest.mark.slow
def test_an_idle_model_is_unloaded_and_loaded_again():
    with live("--idle-seconds", "0.3") as server:
        assert ask(server, None)[0] == 200
        kept = [weakref.ref(model.service) for model in server.models.loaded.values()]
        kept += [weakref.ref(model.tokenizer) for model in server.models.loaded.values()]
        wait_until(lambda: not server.models.loaded)
        wait_until(lambda: not any(reference() for reference in kept))
        assert kept and exchange(server, "GET", "/ready")[0] == 200
        assert json.loads(exchange(server, "GET", "/status")[2])["models"] == []
        assert ask(server, None)[2]["choices"][0]["text"] == written(CODE, 8)
        assert ask(server, None, max_tokens=300, ignore_eos=True)[0] == 200


@pytest.mark.slow
def test_the_context_is_what_the_model_has_positions_for(caplog):
    with live() as server:
        status, _, answer = ask(server, None, prompt=[5] * 2048, max_tokens=8)
        assert (
            status == 400 and "maximum context length is 2048 tokens" in answer["error"]["message"]
        )
        long = ask(server, None, prompt=[5] * 2047, max_tokens=None)
        assert long[2]["usage"]["completion_tokens"] == 1
    with live("--max-context", "3000") as server:
        assert ask(server, None, prompt=[5] * 2100, max_tokens=1)[0] == 200
        assert "--max-context is 3000, but" in caplog.text and "has 2048 positions" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_pool_cannot_serve_is_refused_as_a_full_context(stream, caplog):
    with live("--kv-memory", "0.004") as server:
        limit = 16 * only_model(server).service.call(lambda e: e.stats.num_blocks) + 1
        assert f"the KV pool has room for {limit} of 2048 tokens" in caplog.text
        options = {"stream": stream, "ignore_eos": True}
        long = {"prompt": [5] * (limit - 4)} | options
        body = json.dumps(long | {"max_tokens": 4})
        assert exchange(server, "POST", "/v1/completions", body)[0] == 200
        body = json.dumps(long | {"max_tokens": 5})
        status, headers, _ = exchange(server, "POST", "/v1/completions", body)
        assert (status, headers["x-max-tokens"]) == (200, "4")
        error = ask(server, None, prompt=[5] * limit, max_tokens=1, stream=stream)[2]["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        body = {"messages": [{"role": "user", "content": "a " * 3000}], "max_tokens": 1}
        error = post(server, body | {"stream": stream}, "/v1/messages")[2]["error"]
        assert re.match(rf"prompt is too long: \d+ tokens > {limit - 1} maximum", error["message"])


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 100}}, 100),
        ({"n_positions": 100}, 100),
        ({}, None),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4}}, 400),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 80,
                },
            },
            320,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "llama3", "factor": 8}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": None}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": "linear"}, 100),
    ],
    ids=str,
)
def test_scaled_positions_count(config, positions):
    assert positions_of(config) == positions


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    with live() as server:
        (model,) = server.models.loaded.values()
        monkeypatch.setattr(type(model.tokenizer), "encode", None, raising=False)
        status, _, answer = ask(server, None, prompt="a" * 10_000_000)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["param"] == "prompt"


def test_a_stream_gets_comments_until_its_first_token(monkeypatch):
    """The first one soon: not after the time between two."""
    assert answers.COMMENT_AFTER_S < 1
    monkeypatch.setattr(answers, "COMMENT_EVERY_S", 10 * TIMEOUT)
    with live("--decode-concurrency", "1") as server, client(server) as own:
        running = own.completions.create(
            model="default_model",
            prompt=CODE,
            max_tokens=1500,
            stream=True,
            logit_bias={"1791": -100},
        )
        next(iter(running))
        body = json.dumps({"prompt": CODE, "max_tokens": 1, "stream": True}).encode()
        url = f"http://127.0.0.1:{server.address[1]}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            assert response.readline().startswith(b": ")
            running.close()
            assert b"data: [DONE]" in response.read()


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


def certified(directory, ends="-nodes"):
    """Files of a new certificate and its key."""
    directory.mkdir(exist_ok=True)
    key, certificate = str(directory / "key.pem"), str(directory / "cert.pem")
    command = f"openssl req -x509 -newkey rsa:2048 {ends} -keyout {key} -out {certificate} -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@needs_openssl
def test_a_wrong_file_of_tls_is_named_with_its_flag(tmp_path, capsys):
    certificate, key = certified(tmp_path)
    _, other = certified(tmp_path / "other")
    _, locked = certified(tmp_path / "locked", "-passout pass:secret")
    gone, text = str(tmp_path / "gone.pem"), str(tmp_path / "text.pem")
    Path(text).write_text("no certificate")
    for files, message in {
        (gone, key): f"--ssl-certfile {gone}: No such file or directory",
        (certificate, gone): f"--ssl-keyfile {gone}: No such file or directory",
        (certificate, str(tmp_path)): f"--ssl-keyfile {tmp_path}: Is a directory",
        (text, key): f"--ssl-certfile {text}: expected a certificate (PEM)",
        (key, key): f"--ssl-certfile {key}: expected a certificate (PEM)",
        (certificate, text): f"--ssl-keyfile {text}: expected a private key (PEM)",
        (certificate, certificate): f"--ssl-keyfile {certificate}: expected a private key (PEM)",
        (certificate, locked): f"--ssl-keyfile {locked}: expected a private key (PEM) without",
        (certificate, other): f"--ssl-keyfile {other}: expected the private key of --ssl-certfile",
    }.items():
        with pytest.raises(SystemExit):
            server_flags.parse(["--ssl-certfile", files[0], "--ssl-keyfile", files[1]])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mlx_paged.server: error: {message}")


@needs_openssl
def test_the_server_speaks_tls(tmp_path):
    certificate, key = certified(tmp_path)
    flags = ["--ssl-certfile", certificate, "--ssl-keyfile", key]
    context = ssl.create_default_context(cafile=certificate)

    with serving(server_flags.parse(["--port", "0", "--kv-memory", "0.05", *flags])) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        url = f"https://localhost:{server.address[1]}/health"
        with urllib.request.urlopen(url, timeout=TIMEOUT, context=context) as response:
            assert json.load(response) == {"status": "ok"}
        server.should_exit = True
        thread.join()


def test_the_page_explains_every_cause_of_a_spike():
    page = (ROOT / "mlx_paged" / "server" / "status.html").read_text()
    meanings = page.partition("MEANING = {")[2].partition("};")[0]
    table = (
        (ROOT / "docs" / "metrics.md").read_text().partition("| cause |")[2].partition("\n\n")[0]
    )
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    causes = re.findall(r"`(\w+)`", "".join(cells))
    assert re.findall(r'(\w+): "', meanings) == causes


def test_the_page_needs_nothing_from_elsewhere():
    with live("--api-key", "secret") as server:
        status, headers, page = exchange(server, "GET", "/")
        assert status == 200 and headers["Content-Type"].startswith("text/html")
        assert b"//" not in page.replace(b"<!doctype", b"") and b'fetch("status"' in page
        assert exchange(server, "GET", "/status")[0] == 401
        _, _, found = exchange(server, "GET", "/status", headers={"x-api-key": "secret"})
        status = json.loads(found)
        (model,) = status["models"]
        assert 0 <= status["uptime_s"] < 600
        for name in re.findall(rb"\bm\.(\w+)", page):
            assert name.decode() in model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", [b"", BEGUN, BEGUN + b"Content-Length: 9\r\n\r\n{"])
def test_a_request_that_does_not_come_in_time_is_given_up(monkeypatch, first):
    """Bytes that trickle in do not prolong the time of a head or of a body."""
    monkeypatch.setattr("mlx_paged.server.listener.KEEP_ALIVE_S", 0.3)
    monkeypatch.setattr("mlx_paged.server.listener.HEAD_S", 0.3)
    monkeypatch.setattr("mlx_paged.server.bodies.WHOLE_S", 0.3)
    with live() as server, socket.create_connection(server.address, TIMEOUT) as connection:
        connection.sendall(first)
        connection.settimeout(0.05)
        answer = b""
        for _ in range(20 * TIMEOUT):
            try:
                piece = connection.recv(1 << 16)
                answer += piece
                if not piece:
                    break
            except TimeoutError:
                with suppress(ConnectionError):  # what the server has said can still be read
                    connection.sendall(b"a" if first else b"")
            except ConnectionError:
                break
        else:
            pytest.fail("the connection stays open")
        assert (b" 408 " in answer) is first.endswith(b"{")


def test_a_head_may_come_in_pieces_on_a_connection_that_is_kept():
    with live() as server, socket.create_connection(server.address, TIMEOUT) as connection:
        for _ in range(2):
            for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n":
                connection.sendall(bytes([byte]))
            seen = b""
            while b'"ok"}' not in seen:
                seen += connection.recv(1 << 16) or pytest.fail("the connection is closed")


def test_connections_above_the_limit_are_refused():
    with live("--max-connections", "3") as server:
        idle = [socket.create_connection(server.address) for _ in range(3)]
        status, _, _ = exchange(server, "GET", "/health")
        assert status == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: exchange(server, "GET", "/health")[0] == 200)

"""The attack on a server: each fault that a stand-in for the server has is found."""

import argparse
import contextlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_paged.protocol.fields import all_fields
from scripts import attack_server
from scripts.attack import canary as canary_module
from scripts.attack import connections, kinds, mutations, wire
from scripts.attack.canary import Canary
from scripts.attack.wire import REFUSED, Reply, Request

JSON, EVENTS = {"content-type": "application/json"}, {"content-type": "text/event-stream"}
ERROR = b'{"error": {"message": "n: expected 1"}}'
END = b"data: [DONE]\n\n"
TARGET = kinds.Target("key", ("default_model",), ("nosuch",), 1792)


def answered(
    status: int = 200, body: bytes = b"{}", headers: dict[str, str] | None = None, error: str = ""
) -> Reply:
    return Reply(status, JSON if headers is None else headers, body, 0.1, error)


def asked(**changes: object) -> Request:
    return Request(**{"raw": b"", "patience": 5.0, **changes})


class TestAnswers:
    @pytest.mark.parametrize(
        "reply",
        [
            answered(),
            answered(400, ERROR),
            answered(503, ERROR, JSON | {"retry-after": "1"}),
            answered(body=b": wait\n\nevent: a\ndata: {}\n\n" + END, headers=EVENTS),
            answered(body=b'data: {"type": "message_stop"}\n\n', headers=EVENTS),
            answered(body=b'data: {"error": {"message": "x"}}\n\n', headers=EVENTS),
        ],
    )
    def test_right_ones(self, reply):
        assert wire.complaint(asked(), reply) == ""

    @pytest.mark.parametrize(
        ("reply", "expected"),
        [
            (answered(500, b"Internal Server Error", {}), "status 500"),
            (answered(500, ERROR), "status 500"),
            (answered(503, ERROR), "status 503"),
            (answered(400, b"Invalid request", {"content-type": "text/plain"}), "text/plain"),
            (answered(400, b'{"error": {"message": ""}}'), "without a message"),
            (answered(400, b"{}"), "error"),
            (answered(body=b'{"a": NaN}'), "NaN is no JSON"),
            (answered(body=b'{"a": "\\ud800"}'), "surrogates not allowed"),
            (answered(body=b"{"), "Expecting"),
            (answered(body=b"data: {}\n\n", headers=EVENTS), "no last event"),
            (answered(body=b"data: {}\n\ndata: [DONE]", headers=EVENTS), "within an event"),
            (answered(body=b"data: {\n\n" + END, headers=EVENTS), "Expecting"),
            (answered(body=b'data: {"a": Infinity}\n\n' + END, headers=EVENTS), "no JSON"),
            (answered(body=b"hello\n\n" + END, headers=EVENTS), "a line of a stream"),
            (answered(body=END + b"data: {}\n\n", headers=EVENTS), "after the last one"),
            (answered(0, b"", {}), "no answer"),
            (answered(0, b"", {}, "ConnectionResetError: reset"), "reset"),
        ],
    )
    def test_wrong_ones_are_named(self, reply, expected):
        assert expected in wire.complaint(asked(), reply)

    def test_an_answer_in_place_of_a_refusal_is_named(self):
        assert "expected a refusal" in wire.complaint(asked(wanted=REFUSED), answered())
        assert wire.complaint(asked(wanted=REFUSED), answered(400, ERROR)) == ""
        assert "expected [200]" in wire.complaint(asked(wanted=(200,)), answered(400, ERROR))

    def test_what_is_no_http_may_be_closed_but_not_kept_open(self):
        closed, late = answered(0, b"", {}, "closed"), answered(0, b"", {}, "no whole answer")
        late.seconds = 6.0
        assert wire.complaint(asked(is_http=False), closed) == ""
        assert wire.complaint(asked(is_http=False), late) == "no whole answer"
        assert wire.complaint(asked(may_leave=True), late) == ""

    def test_a_server_that_does_not_answer_is_left_in_time(self):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            reply = wire.exchange(listening.getsockname()[1], asked(raw=b"GET", patience=0.2))
        assert reply.error == "no whole answer within 0.2 s" and 0.2 <= reply.seconds < 5

    @pytest.mark.parametrize("sent", [0, 100, 30 << 20])
    def test_a_connection_that_the_server_closes_is_told_from_an_open_one(self, sent):
        """Also while nobody reads what it has sent."""
        with connected_pair() as (ours, theirs):
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                theirs.sendall(bytes(sent))
            assert not connections.is_ended(ours)
            theirs.close()
            assert connections.is_ended(ours)

    def test_a_connection_that_the_server_resets_is_ended(self):
        with connected_pair() as (ours, theirs):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, connections.RESET)
            theirs.close()
            with contextlib.suppress(ConnectionResetError):
                ours.recv(1)
            assert connections.is_ended(ours)


@contextmanager
def connected_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over loopback."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours = stack.enter_context(wire.connected(listening.getsockname()[1]))
        theirs = stack.enter_context(listening.accept()[0])
        yield ours, theirs


class TestRequests:
    @pytest.mark.parametrize("name", kinds.REQUESTS)
    def test_the_seed_makes_them(self, name):
        def drawn(seed: int) -> list[bytes]:
            rngs = [random.Random(f"{seed}:{number}") for number in range(4)]
            return [kinds.REQUESTS[name](rng, TARGET).raw for rng in rngs]

        assert drawn(1) == drawn(1) != drawn(2)
        assert len({*drawn(1)}) > 1

    def test_mutations_reach_every_field_and_every_api(self):
        bodies = [mutations.mutated(random.Random(i), "key").raw for i in range(4000)]
        seen = {name for name in all_fields() if any(f'"{name}":'.encode() in b for b in bodies)}
        assert all_fields() - seen <= {name for name in all_fields() if name.startswith("max_")}
        paths = {body.split()[1].decode() for body in bodies}
        assert paths == {*mutations.PATHS.values(), mutations.COUNT_TOKENS, *mutations.TOKEN_PATHS}
        whole = sum(b'"stream":false' in body or b'"stream":true' in body for body in bodies)
        assert whole > 2000  # the most are still like requests

    def test_they_have_what_json_cannot_say(self):
        text = mutations.dumped({"a": float("nan"), "b": "\ud800", "c": 10**5000, "d": [1]})
        assert text.startswith(b'{"a":NaN,"b":"\\ud800","c":1000') and text.endswith(b',"d":[1]}')
        assert mutations.dumped([mutations.RAW + "[[1]]"]) == b"[[[1]]]"


Change = Callable[[str, bytes], tuple[int, bytes] | None]


@contextmanager
def stand_in(change: Change) -> Iterator[int]:
    """The port of a server that answers as the real one, but for what `change` says of a path and
    an answer: another status and answer, or None for none."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = change(self.path, right_answer(self.path, body["stream"]))
            if given is None:
                return
            self.send_response(given[0])
            kind = EVENTS if body["stream"] and given[0] == 200 else JSON
            self.send_header("Content-Type", kind["content-type"])
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(given[1])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def right_answer(path: str, is_stream: bool) -> bytes:
    if path == "/v1/messages":
        parts = [
            {"type": "content_block_delta", "delta": {"text": "hi"}},
            {"type": "message_stop"},
        ]
        whole: dict[str, object] = {"content": [{"type": "text", "text": "hi"}]}
    elif path == "/v1/responses":
        parts = [
            {"type": "response.output_text.delta", "delta": "hi"},
            {"type": "response.completed"},
        ]
        whole = {"output": [{"content": [{"text": "hi"}]}]}
    elif path == "/v1/completions":
        parts, whole = [{"choices": [{"text": "hi"}]}], {"choices": [{"text": "hi"}]}
    else:
        parts = [{"choices": [{"delta": {"content": "hi"}}]}]
        whole = {"choices": [{"message": {"content": "hi"}}]}
    if not is_stream:
        return json.dumps(whole).encode()
    sent = b"".join(b"data: %s\n\n" % json.dumps(part).encode() for part in parts)
    return sent if path in ("/v1/messages", "/v1/responses") else sent + END


def findings_of(change: Change, monkeypatch: pytest.MonkeyPatch, bound: float = 5.0) -> Canary:
    """A canary after two more rounds of its questions, or its first finding."""
    monkeypatch.setattr(canary_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(canary_module, "RETRY_S", 0.0)
    is_first = True

    def later(path: str, answer: bytes) -> tuple[int, bytes] | None:
        return (200, answer) if is_first else change(path, answer)

    with stand_in(later) as port:
        canary = Canary(port, "key", bound)
        canary.start()
        is_first = False
        until = time.monotonic() + 20
        while len(canary.seconds) < 48 and not canary.findings and time.monotonic() < until:
            time.sleep(0.01)
        canary.stop()
    return canary


class TestCanary:
    def test_a_right_server_has_no_findings(self, monkeypatch):
        canary = findings_of(lambda _, answer: (200, answer), monkeypatch)
        assert canary.findings == [] and len(canary.seconds) >= 48 and canary.num_busy == 0

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
    def test_another_answer_is_found(self, path, monkeypatch):
        def change(of: str, answer: bytes) -> tuple[int, bytes]:
            return 200, answer.replace(b"hi", b"ho") if of == path else answer

        assert "answer 'ho': expected 'hi'" in findings_of(change, monkeypatch).findings[0]

    def test_a_stream_alone_that_is_cut_is_found(self, monkeypatch):
        canary = findings_of(lambda _, answer: (200, answer.replace(END, b"")), monkeypatch)
        assert ", streamed: text/event-stream: no last event" in canary.findings[0]

    def test_a_refusal_is_found(self, monkeypatch):
        canary = findings_of(lambda *_: (404, ERROR), monkeypatch)
        assert "status 404: expected [200]" in canary.findings[0]

    def test_a_slow_answer_is_found(self, monkeypatch):
        def slow(_: str, answer: bytes) -> tuple[int, bytes]:
            time.sleep(0.6)
            return 200, answer

        assert "expected at most 0.5 s" in findings_of(slow, monkeypatch, 0.5).findings[0]

    def test_it_asks_again_while_the_server_is_busy(self, monkeypatch):
        rng = random.Random(0)

        def change(_: str, answer: bytes) -> tuple[int, bytes]:
            return (503, ERROR) if rng.random() < 0.3 else (200, answer)

        canary = findings_of(change, monkeypatch)
        assert canary.findings == [] and canary.num_busy > 0

    def test_a_server_that_is_always_busy_is_found(self, monkeypatch):
        canary = findings_of(lambda *_: (503, ERROR), monkeypatch, 0.1)
        assert canary.findings[0].endswith("503")


class FakeServer:
    """A stand-in for the child process, which "ends" when a request comes that has `fatal`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.exit_status: int | None = None
        self.held = {"rss_mib": 100.0, "descriptors": 10, "threads": 5}
        self.blocks, self.num_starts = 0.0, 0

    def holds(self) -> dict[str, float]:
        return dict(self.held)

    def start(self) -> None:
        self.exit_status, self.num_starts = None, self.num_starts + 1

    def kill(self) -> None:
        pass

    def stop(self) -> int:
        return 0

    def total(self, _: str) -> float:
        return self.blocks


@contextmanager
def attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change | None = None
) -> Iterator[attack_server.Attack]:
    """An attack of which no wave has begun."""
    monkeypatch.setattr(canary_module, "PAUSE_S", 0.0)
    for name, seconds in {"WAVE_S": 0.2, "FLOOD_S": 0.0, "HANG_S": 1.0, "SETTLE_S": 0.1}.items():
        monkeypatch.setattr(attack_server, name, seconds)
    log = tmp_path / "log"
    log.write_text("serving\n")
    args = argparse.Namespace(seed=0, minutes=0.001, bound=5.0, only=["one"], first=1)
    with stand_in(change or (lambda _, answer: (200, answer))) as port:
        attack = attack_server.Attack(FakeServer(port), TARGET, log, args)
        attack.kinds["one"] = attack_server.Kind()
        yield attack


def one(raw: bytes = b"", **changes: object) -> kinds.Kind:
    body = {"prompt": "a", "stream": False}
    request = Request(**{"raw": raw or wire.post("/v1/completions", body, ""), **changes})
    return lambda rng, target: request


class TestAttack:
    def run(self, attack: attack_server.Attack, kind: kinds.Kind, monkeypatch) -> list[str]:
        monkeypatch.setitem(attack_server.REQUESTS, "one", kind)
        attack.run()
        attack.settle()
        return attack.findings

    def test_a_right_server_has_no_findings(self, tmp_path, monkeypatch):
        with attacked(tmp_path, monkeypatch) as attack:
            assert self.run(attack, one(), monkeypatch) == []
            report = attack.report()
        assert report["restarts"] == 0 and report["canary"]["answers"] > 0
        assert report["kinds"]["one"]["statuses"].keys() == {"200"}
        assert json.loads(json.dumps(report)) == report
        assert "one" in attack_server.table(attack.kinds)

    def test_the_request_of_a_wrong_answer_is_shown(self, tmp_path, monkeypatch):
        with attacked(tmp_path, monkeypatch) as attack:
            found = self.run(attack, one(wanted=REFUSED), monkeypatch)
        assert re.match(r"one \d: status 200: expected a refusal", found[0])
        assert '"prompt": "a"' in found[0]
        assert len(found) == attack_server.MAX_ALIKE < attack.kinds["one"].findings

    def test_an_end_of_the_process_is_found_with_the_requests_under_way(
        self, tmp_path, monkeypatch
    ):
        def fatal(rng: random.Random, target: kinds.Target) -> Request:
            attack._server.exit_status = -11
            return one()(rng, target)

        with attacked(tmp_path, monkeypatch) as attack:
            found = self.run(attack, fatal, monkeypatch)
        assert "one the server was started again: exit status -11" in found[0]
        assert "one 1: b'POST /v1/completions" in found[0]
        assert attack.num_restarts == attack._server.num_starts >= 1

    def test_a_server_that_answers_nobody_is_found_and_started_again(self, tmp_path, monkeypatch):
        stuck = threading.Event()

        def change(_: str, answer: bytes) -> tuple[int, bytes] | None:
            return None if stuck.is_set() else (200, answer)

        def harm(rng: random.Random, target: kinds.Target) -> Request:
            stuck.set()
            return one(is_http=False)(rng, target)

        with attacked(tmp_path, monkeypatch, change) as attack:
            attack._server.start = lambda: stuck.clear()
            found = self.run(attack, harm, monkeypatch)
        assert any("started again: no answer for 1 s" in line for line in found)

    @pytest.mark.parametrize(
        "line", ["Traceback (most recent call last):", "INFO - unloading models/a", "GET \x1b[31m"]
    )
    def test_the_log_is_read(self, line, tmp_path, monkeypatch):
        with attacked(tmp_path, monkeypatch) as attack:
            (tmp_path / "log").write_text(f"serving\n{line}\n")
            assert "the log has" in self.run(attack, one(), monkeypatch)[0]

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", attack_server.LIMITS)
    def test_what_the_process_holds_at_the_end_is_compared(self, name, tmp_path, monkeypatch):
        def more(rng: random.Random, target: kinds.Target) -> Request:
            if attack.warm is not None:
                attack._server.held[name] = 1000.0
            return one()(rng, target)

        with attacked(tmp_path, monkeypatch) as attack:
            attack._args.minutes = 0.02
            (found,) = self.run(attack, more, monkeypatch)
        assert found.startswith(f"{name} from ") and found.endswith("to 1000.0")

    def test_blocks_that_stay_in_use_are_found(self, tmp_path, monkeypatch):
        with attacked(tmp_path, monkeypatch) as attack:
            attack._server.blocks = 3.0
            assert self.run(attack, one(), monkeypatch) == ["3 blocks are in use at the end"]

    def test_connections_that_the_server_does_not_end_are_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr(attack_server, "HELD_S", 0.0)
        with attacked(tmp_path, monkeypatch) as attack, connected_pair() as (ours, _):
            attack._held.append((0.0, "one", [ours], SimpleNamespace(close=ours.close)))
            attack._close_held(0.0)
        assert attack.findings == ["one 1 of 1 connections are open after 0 s"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--model", "nowhere"], "--model: expected a directory of a model, got 'nowhere'"),
            (["--only", "nothing"], "--only: expected one of ids, "),
            (["--minutes", "0"], "--minutes"),
        ],
    )
    def test_they_are_named_in_one_line(self, arguments, expected, capsys):
        with pytest.raises(SystemExit) as exit_:
            attack_server.main(arguments)
        assert exit_.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line

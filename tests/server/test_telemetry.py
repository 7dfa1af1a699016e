"""--otlp-traces-endpoint: a span of OpenTelemetry for each request, which delays no answer."""

import ast
import http.server
import json
import logging
import socket
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import mlx_paged
from mlx_paged.loading import load_model
from mlx_paged.server import __main__ as command
from mlx_paged.server import flags as server_flags
from tests.support import TIMEOUT
from tests.support.commands.server_harness import CODE, exchange, live, metric, post, wait_until
from tests.support.models.adapters import random_arrays, write_adapter

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from mlx_paged.server import telemetry
from mlx_paged.server.telemetry import CLOSE_S, Telemetry, parent_of

BODY = {"prompt": CODE, "max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": CODE}], "max_tokens": 3}
APIS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": CODE, "max_output_tokens": 3},
}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
DEAD = "http://127.0.0.1:1"
SECRET = "XyZZy"
NAMES = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}


@contextmanager
def remembered(*flags):
    """A server, and the exporter that keeps the spans of its requests."""
    kept = InMemorySpanExporter()
    with pytest.MonkeyPatch.context() as patch:
        made = classmethod(lambda cls, _, operations: cls(operations, SimpleSpanProcessor(kept)))
        patch.setattr(Telemetry, "to", made)
        with live("--otlp-traces-endpoint", DEAD, *flags) as server:
            patch.undo()
            yield server, kept


@pytest.fixture(scope="module")
def traced():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with remembered("--chat-template", template) as (server, kept):
        yield server, kept


@pytest.fixture
def spans(traced):
    """The spans of a request that the test makes: its own, and its parts by name."""
    server, kept = traced
    kept.clear()

    def found(count=1):
        def own():
            return [s for s in kept.get_finished_spans() if s.kind is SpanKind.SERVER]

        wait_until(lambda: len(own()) >= count)
        (span,) = own()
        parts = {s.name: s for s in kept.get_finished_spans() if s is not span}
        assert all(s.parent.span_id == span.context.span_id for s in parts.values())
        return span, parts

    return server, found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_request_has_a_span_with_its_numbers(spans, path, stream):
    server, found = spans
    raw = json.dumps(APIS[path] | {"stream": stream}).encode()
    status, _, content = exchange(server, "POST", path, raw)
    assert status == 200
    span, _ = found()
    operation = "text_completion" if path == "/v1/completions" else "chat"
    told = dict(span.attributes)
    label = server.models.names.served[0]
    assert span.name == f"{operation} {label}"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == label
    assert (told["http.response.status_code"], told["url.path"]) == (200, path)
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["gen_ai.request.max_tokens"] == told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.request.stream"] is stream
    if not stream:
        usage = json.loads(content)["usage"]
        cached = told["gen_ai.usage.cache_read.input_tokens"]
        # Anthropic's API tells cached tokens apart.
        beside = cached if path == "/v1/messages" else 0
        own = usage.get("prompt_tokens", usage.get("input_tokens"))
        assert told["gen_ai.usage.input_tokens"] == own + beside
    assert {name for name in told if name.startswith("gen_ai.")} <= NAMES
    assert span.status.status_code is StatusCode.UNSET and "error.type" not in told


def test_queue_prefill_and_decode_follow_each_other_within_the_request(spans):
    server, found = spans
    post(server, BODY)
    span, parts = found()
    queue, prefill, decode = (parts[name] for name in ("queue", "prefill", "decode"))
    (event,) = span.events
    assert event.name == "first token"
    times = [
        *(span.start_time, queue.start_time, queue.end_time),
        *(prefill.start_time, prefill.end_time),
        *(event.timestamp, decode.start_time, decode.end_time, span.end_time),
    ]
    assert times == sorted(times)
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert prefill.start_time < prefill.end_time < decode.end_time


def test_the_parts_of_several_choices_are_those_of_all(spans):
    server, found = spans
    post(server, BODY | {"prompt": [CODE, "import os", "class Stack:"], "n": 2})
    span, parts = found()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",) * 6
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.usage.output_tokens"] == 18
    assert parts.keys() == {"queue", "prefill", "decode"}


def test_finish_reasons_are_bounded(spans):
    server, found = spans
    post(server, BODY | {"prompt": [CODE] * 20, "max_tokens": 1})
    assert len(found()[0].attributes["gen_ai.response.finish_reasons"]) == 16


def test_the_header_names_the_parent(spans):
    server, found = spans
    post(server, BODY, headers={"traceparent": PARENT})
    span, parts = found()
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == f"{TRACE}-{SPAN}"
    assert {s.context.trace_id for s in (span, *parts.values())} == {int(TRACE, 16)}


def test_a_parent_that_is_not_sampled_has_no_spans(traced):
    server, kept = traced
    kept.clear()
    post(server, BODY, headers={"traceparent": PARENT[:-1] + "0"})
    post(server, BODY)
    wait_until(kept.get_finished_spans)
    assert all(s.context.trace_id != int(TRACE, 16) for s in kept.get_finished_spans())


GOOD = [PARENT, f" {PARENT} ", f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what-comes"]
BAD = [
    *("", "00", PARENT[:-1], f"{PARENT}-", f"{PARENT}-x", PARENT.upper(), f"ff{PARENT[2:]}"),
    *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", PARENT.replace("-", "_")),
    *(f"cc-{TRACE}-{SPAN}-01-{'x' * 256}", f"{PARENT}\n", f"cc{PARENT[2:]}x"),
]


@pytest.mark.parametrize("given", [[each] for each in BAD[:-2]] + [[], [PARENT, PARENT]])
def test_a_malformed_parent_is_ignored(given):
    assert not parent_of(given)


@pytest.mark.parametrize("given", GOOD)
def test_a_well_formed_parent_is_taken(given):
    assert parent_of([given])


def test_a_malformed_header_begins_a_trace(spans):
    server, found = spans
    status, _, _ = post(server, BODY, headers={"traceparent": "00-zz"})
    assert status == 200 and found()[0].parent is None


def test_spans_have_no_text_of_clients(spans):
    server, found = spans
    tool = {"type": "function", "function": {"name": SECRET, "parameters": {"type": "object"}}}
    body = {
        "messages": [{"role": "user", "content": SECRET, "name": SECRET}],
        **{"stop": [SECRET], "user": SECRET, "metadata": {SECRET: SECRET}, SECRET: 1},
        **{"tools": [tool], "tool_choice": "none", "cache_salt": SECRET, "max_tokens": 2},
    }
    path = f"/v1/chat/completions?{SECRET}"
    status, _, _ = post(server, body, path, {"User-Agent": SECRET, "tracestate": f"a={SECRET}"})
    assert status == 200
    span, parts = found()
    assert all(SECRET not in each.to_json() for each in (span, *parts.values()))


def test_a_span_has_an_adapter_under_one_name(tmp_path):
    write_adapter(tmp_path / "one", random_arrays(load_model()[0], 1))
    with remembered("--adapters-dir", str(tmp_path)) as (server, kept):
        body = {"prompt": "a", "max_tokens": 1, "adapters": f"./{SECRET}/../one"}
        assert post(server, body)[0] == 200
        wait_until(kept.get_finished_spans)
        (span,) = (s for s in kept.get_finished_spans() if s.kind is SpanKind.SERVER)
    assert span.attributes["gen_ai.request.model"] == "one" and SECRET not in span.to_json()


@pytest.mark.parametrize(
    ("body", "status"),
    [({"n": SECRET}, 400), ({"model": SECRET}, 404), ({"prompt": [1] * 10**5}, 400)],
)
def test_a_refused_request_has_a_span_without_numbers(spans, body, status):
    server, found = spans
    assert post(server, BODY | body)[0] == status
    span, parts = found()
    assert span.name == "text_completion" and parts == {}
    assert span.attributes["error.type"] == str(status)
    assert not any("usage" in name for name in span.attributes)
    assert SECRET not in span.to_json()


def test_numbers_beyond_64_bits_are_left_out(spans):
    server, found = spans
    status, _, _ = post(server, BODY | {"temperature": 1e300, "top_k": 5, "seed": 2**64 - 1})
    told = found()[0].attributes
    assert status == 200 and told["gen_ai.request.top_k"] == 5
    assert not any(isinstance(value, float) and value > 1e299 for value in told.values())


def test_a_client_that_goes_away_is_an_abort(spans):
    server, found = spans
    body = BODY | {"max_tokens": 1500, "stream": True, "logit_bias": {"1791": -100}}
    raw = json.dumps(body).encode()
    with socket.create_connection(server.address, TIMEOUT) as link:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        link.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        while b"data: " not in link.recv(1 << 16):
            pass
    span, _ = found()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.attributes["gen_ai.usage.output_tokens"] < 1500
    assert [event.name for event in span.events] == ["first token"]


def test_other_paths_have_no_span(spans):
    server, found = spans
    for path in ("/health", "/v1/models", "/v1/completions"):
        exchange(server, "GET", path)
    assert post(server, {"prompt": CODE}, "/tokenize")[0] == 200
    post(server, BODY)
    assert found()[0].attributes["url.path"] == "/v1/completions"


def test_a_path_of_a_proxy_is_left_out():
    with remembered("--root-path", "/llm") as (server, kept):
        assert post(server, BODY, "/llm/v1/completions")[0] == 200
        wait_until(kept.get_finished_spans)
        (path,) = {s.attributes.get("url.path") for s in kept.get_finished_spans()} - {None}
        assert path == "/v1/completions"


class Collector(http.server.ThreadingHTTPServer):
    """Takes traces on a free port; answers when `answers` is set."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Taker)
        self.got, self.answers = [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Taker(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(raw)))
        self.server.answers.wait()
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # ms
    made = Collector()
    yield made
    made.answers.set()
    made.shutdown()
    made.server_close()


def test_a_collector_gets_the_spans(collector):
    collector.answers.set()
    with live("--otlp-traces-endpoint", collector.url) as server:
        post(server, BODY)
    path, request = collector.got[0]
    (resource,) = request.resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert path == "/v1/traces" and named["service.name"] == "mlx_paged"
    (scope,) = resource.scope_spans
    assert [s.name for s in scope.spans][:3] == ["queue", "prefill", "decode"]


def test_a_collector_that_never_answers_is_not_waited_for(collector, monkeypatch):
    """Nor is a queue that is full."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    with live("--otlp-traces-endpoint", collector.url) as server:
        post(server, BODY)
        wait_until(lambda: collector.got)
        for _ in range(4):  # 16 spans
            assert post(server, BODY)[0] == 200
        assert len(collector.got) == 1 and not collector.answers.is_set()
    assert len(collector.got) == 1


def test_a_collector_that_is_down_costs_no_answer(monkeypatch):
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    with live("--otlp-traces-endpoint", DEAD) as server:
        assert [post(server, BODY)[0] for _ in range(3)] == [200] * 3
        assert metric(server, "mlx_paged_up") == 1
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    assert not exporter.isEnabledFor(logging.WARNING), "a line for each attempt"


def test_the_end_does_not_wait_for_an_exporter(monkeypatch):
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    over = threading.Event()

    class Stuck(SimpleSpanProcessor):
        def shutdown(self):
            over.wait()

    made = Telemetry({}, Stuck(InMemorySpanExporter()))
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT)
    is_stuck = closing.is_alive()
    over.set()
    assert not is_stuck and 0 < CLOSE_S < 5


@pytest.mark.parametrize(
    "url",
    ["", "localhost:4318", "ftp://h/v1/traces", "http://", "http://h:x", "http://[", "http://h:0"],
)
def test_a_url_that_is_none_is_refused(url, capsys):
    with pytest.raises(SystemExit) as stopped:
        server_flags.parse(["--otlp-traces-endpoint", url])
    last = capsys.readouterr().err.splitlines()[-1]
    expected = "expected a URL such as http://localhost:4318/v1/traces, got"
    assert stopped.value.code == 2 and f"--otlp-traces-endpoint: {expected} {url!r}" in last


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:1", "http://h:1/v1/traces"),
        ("https://h/", "https://h/v1/traces"),
        ("http://[::1]:4318/own", "http://[::1]:4318/own"),
    ],
)
def test_a_url_without_a_path_means_that_of_otlp(given, url):
    assert server_flags.parse(["--otlp-traces-endpoint", given]).otlp_traces_endpoint == url


def test_without_the_package_the_flag_is_refused(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "mlx_paged.server.telemetry")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    given = ["--port", "0", "--otlp-traces-endpoint", DEAD, "--log-level", "CRITICAL"]
    assert command.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlx_paged.server: error: opentelemetry")
    assert line.endswith("expected pip install '.[otel]' in a clone of mlx_paged")


def test_one_file_knows_opentelemetry():
    root = Path(mlx_paged.__file__).parent
    known = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
            module = getattr(node, "module", None) or ""
            if any(name.startswith("opentelemetry") for name in (module, *map(str, names))):
                known.add(path.relative_to(root).as_posix())
    assert known == {"server/telemetry.py"}

"""python -m bench.serving --url: servers over HTTP, measured as their clients see them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlx_lm
import pytest

from bench.flags.limits import Slo
from bench.serving import __main__ as serving
from bench.serving.http_engine import WARM_UP, Endpoint
from bench.serving.measures import itls_ms, summarize, tpots_ms, ttfts_ms
from bench.serving.run import Run
from bench.serving.trace import Job, make_trace
from bench.serving.workload import ClosedLoop, OpenLoop
from mlx_paged.loading import load_model
from tests.support import TIMEOUT

pytest.importorskip("aiohttp")
ROOT = Path(__file__).parents[2]
FIRST_S, GAP_S = 0.12, 0.03


class Fake(BaseHTTPRequestHandler):
    """Answers `max_tokens` tokens in pieces of two; `server.plan` says what goes wrong, when."""

    disable_nagle_algorithm = True  # each piece is sent at once

    def do_GET(self):
        self.answer(200, {"data": [{"id": "fake"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        index = len(self.server.asked)
        self.server.asked.append((time.perf_counter(), self.path, body, dict(self.headers)))
        wrong = self.server.plan.get(index - len(WARM_UP))
        if wrong == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if wrong == "together":
            self.server.together.wait(TIMEOUT)
        if wrong == "status":
            return self.answer(503, {"error": "full\nup"})
        self.send_response(200)
        self.end_headers()
        time.sleep(FIRST_S)
        for i in range(0, body["max_tokens"], 2):
            time.sleep(GAP_S if i else 0)
            if wrong == "event" and i:
                return self.event({"error": {"message": "lost"}})
            if wrong == "break" and i:
                return None
            piece = f"{index}ab"[: min(2, body["max_tokens"] - i) + 1]
            name = {"delta": {"content": piece}} if "chat" in self.path else {"text": piece}
            choice = {"index": 0, "finish_reason": None} | name
            so_far = {"usage": {"prompt_tokens": 9, "completion_tokens": i}}
            self.event({"choices": [choice]} | (so_far if self.server.has_usage else {}))
        if self.server.has_usage:
            usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"]}
            usage["prompt_tokens_details"] = {"cached_tokens": 4}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value):
        self.wfile.write(b": comment\n\ndata: " + json.dumps(value).encode() + b"\n\n")

    def answer(self, status, value):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *args):
        pass


class FakeServer(ThreadingHTTPServer):
    """Its threads end with it: none writes to stderr while a later test reads that."""

    daemon_threads = False

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may go away
            super().handle_error(request, client_address)


@contextmanager
def fake(plan=None, has_usage=True):
    with FakeServer(("127.0.0.1", 0), Fake) as server:
        server.plan, server.has_usage, server.asked = plan or {}, has_usage, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def play(url, trace, source=None, api="completions"):
    run = Run(url)
    Endpoint(url, api, None).play(run, source or OpenLoop(trace), lambda count: None)
    return run


def jobs(arrivals_s, max_tokens=7, samples=1):
    every = [Job(0, (1, 2, i), max_tokens, samples) for i, _ in enumerate(arrivals_s)]
    return make_trace(every, arrivals_s)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_times_are_those_of_the_clients(api):
    with fake() as (server, url):
        run = play(url, jobs([0.0, 0.05, 0.1]), api=api)
    assert [stream.num_tokens for stream in run.streams] == [7] * 3 and not run.failures
    assert all(stream.is_done and len(stream.times_s) == 4 for stream in run.streams)
    assert all(1000 * FIRST_S <= ttft <= 1000 * run.wall_s for ttft in ttfts_ms(run.streams))
    for stream in run.streams:
        assert FIRST_S + 3 * GAP_S <= stream.times_s[-1] - stream.arrival_s <= run.wall_s
    gaps = itls_ms(run.streams)
    assert len(gaps) == 9 and min(gaps) >= 0
    # Seven tokens in four pieces: six times between tokens in three gaps.
    three_gaps = [sum(gaps[i : i + 3]) for i in (0, 3, 6)]
    assert tpots_ms(run.streams) == pytest.approx([gap / 6 for gap in three_gaps])
    assert (run.counters.prompt_tokens, run.counters.cached_prompt_tokens) == (15, 12)
    assert run.output_tokens == 21 and run.wall_s >= 0.1 + FIRST_S + 3 * GAP_S
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    for _, asked, body, _ in server.asked:
        assert asked == path and body["stream"] and body["model"] == "fake"
        assert body["temperature"] == 0 and body["ignore_eos"]


@pytest.mark.slow
def test_requests_are_sent_when_they_are_due_and_wait_for_no_other():
    arrivals = [0.0, 0.25, 0.5]
    with fake(dict.fromkeys(range(3), "together")) as (server, url):
        endpoint, run = Endpoint(url, "completions", None), Run(url)
        server.together = threading.Barrier(3)  # nobody gets an answer before all have asked
        start = time.perf_counter()
        endpoint.play(run, OpenLoop(jobs(arrivals)), lambda count: None)
        sent = [at - start for at, *_ in server.asked[len(WARM_UP) :]]
    assert all(at >= due for at, due in zip(sent, arrivals, strict=True))
    assert not run.failures and [stream.arrival_s for stream in run.streams] == arrivals


def test_a_closed_loop_has_so_many_clients():
    with fake() as (_, url):
        trace = jobs([0.0] * 4, max_tokens=4)
        run = play(url, trace, ClosedLoop(trace, clients=2))
    first, second, third, _ = run.streams
    assert first.arrival_s == second.arrival_s < first.times_s[0]
    assert third.arrival_s >= min(first.times_s[-1], second.times_s[-1])


def test_without_counts_a_piece_is_a_token():
    with fake(has_usage=False) as (_, url):
        run = play(url, jobs([0.0]))
    assert run.output_tokens == 4 and run.counters.prompt_tokens == 0


def test_samples_are_streams_of_their_own():
    with fake() as (server, url):
        run = play(url, jobs([0.0], samples=3))
    assert [stream.job for stream in run.streams] == [0, 0, 0] and run.output_tokens == 21
    assert len(server.asked) == len(WARM_UP) + 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("status", "status 503: "), ("event", "lost"), ("break", "a stream broke off")],
)
def test_a_stream_that_fails_is_counted_and_the_others_go_on(wrong, reason):
    with fake({1: wrong}) as (_, url):
        run = play(url, jobs([0.0, 0.05, 0.1]))
    assert [stream.is_done for stream in run.streams] == [True, False, True]
    assert len(run.failures) == 1 and reason in run.failures[0] and "\n" not in run.failures[0]
    row = summarize(run, 4, Slo(ttft=9.0))
    assert row["failures"] == run.failures and row["streams_finished"] == 2
    assert row["goodput"]["attainment"] == pytest.approx(2 / 3, abs=1e-3)


def test_a_key_of_the_environment_is_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with fake() as (server, url):
        play(url, jobs([0.0]))
    assert all(headers["Authorization"] == "Bearer secret" for *_, headers in server.asked)


@pytest.mark.slow
def test_equal_tokens_are_equal_words_and_every_round_has_others():
    with fake() as (server, url):
        endpoint, trace = Endpoint(url, "completions", None), jobs([0.0, 0.1])
        for _ in range(2):
            endpoint.play(Run(url), OpenLoop(trace), lambda count: None)
    texts = [body["prompt"].split() for _, _, body, _ in server.asked[len(WARM_UP) :]]
    assert all(len(words) == 3 for words in texts)
    assert texts[0][:2] == texts[1][:2] and texts[0][2] != texts[1][2]
    assert texts[0] != texts[2] and texts[2][:2] == texts[3][:2]


def run_main(capsys, *options):
    status = serving.main(options)
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last), status


@pytest.mark.slow
def test_urls_stand_side_by_side_with_their_ratio_and_a_report(capsys, tmp_path):
    with fake() as (_, one), fake({0: "status"}) as (_, other):
        options = ["--requests=3", "--request-rate=30", "--rounds=2", f"--report={tmp_path}"]
        lines, result, status = run_main(capsys, "--url", one, f"{other}/v1/", *options)
    assert status == 0 and list(result["engines"]) == [one, other]
    row = result["engines"][one]
    assert row["output_tokens"] == result["work"]["output_tokens"] and row["client_cpu_s"] > 0
    assert row["ttft_ms"]["p50"] >= 1000 * FIRST_S and row["itl_ms"]["p99"] > 0
    assert row["phases"] is None and row["kv_held_peak_mib"] is None
    assert result["ratios"][f"{one} / {other}"]["output_tokens_per_sec"] > 0
    text = "\n".join(lines)
    assert re.search(r"^Ceiling over HTTP: the load asks for \d+ output tokens/s\.$", text, re.M)
    assert f"{other}: 1 of 6 streams failed; the first: status 503: " in text
    assert "K/V in MiB" not in text and " static" not in text and "tick" not in text
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 4 and "Time of every step" not in page  # there are no steps


@pytest.mark.slow
def test_ctrl_c_writes_what_was_measured_so_far(capsys):
    with fake({6: "interrupt"}) as (_, url):
        _, result, status = run_main(capsys, "--url", url, "--requests=40", "--request-rate=5")
    row = result["engines"][url]
    assert status == 130 and result["partial"]
    assert 0 < row["output_tokens"] < result["work"]["output_tokens"] and row["streams"] < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "--url: http://127.0.0.1:1: no OpenAI-compatible server"),
        (["--url", "localhost:80"], "--url: expected http://HOST:PORT, got 'localhost:80'"),
        (["--api", "chat"], "--api, --served-model: expected --url with them"),
        (["--url", "http://x", "--arrivals-by-step=5"], "--url: a server has no steps for"),
        (["--url", "http://x", "--api", "soap"], "--api: invalid choice: 'soap'"),
    ],
)
def test_a_mistake_is_reported_in_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        serving.main(options)
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == ""
    assert err.startswith("bench.serving: error: ") and err.count("\n") == 1 and message in err


def test_a_page_that_is_no_api_is_a_mistake(capsys):
    with fake({-2: "status"}) as (_, url), pytest.raises(SystemExit) as exit_info:
        serving.main(["--url", url])
    assert exit_info.value.code == 2
    assert f"--url: {url}: no OpenAI-compatible server: status 503" in capsys.readouterr().err


@pytest.fixture(scope="module")
def own_server():
    """This package's server on the demo model, in a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_paged.server", "--port", str(port), "--kv-memory=0.05"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        try:
            deadline = time.monotonic() + TIMEOUT
            while time.monotonic() < deadline and process.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.slow
def test_our_server_gives_each_stream_the_text_of_mlx_lm(own_server):
    endpoint = Endpoint(own_server, "completions", None)
    trace = make_trace([Job(0, tuple(range(i, 3 * i + 4)), 12) for i in range(6)], [0.0] * 6)
    run = Run(own_server)
    endpoint.play(run, OpenLoop(trace), lambda count: None)
    model, tokenizer = load_model()
    assert not run.failures
    for job, stream in zip(trace, run.streams, strict=True):
        prompt = endpoint.text_of(job)
        expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
        text = "".join(stream.tokens).removeprefix(" ")  # which mlx_lm.generate leaves out
        assert text == expected and stream.num_tokens <= 12
        assert stream.arrival_s == 0 < stream.times_s[0] and stream.is_done
    lengths = [len(tokenizer.encode(endpoint.text_of(job))) for job in trace]
    assert run.counters.prompt_tokens + run.counters.cached_prompt_tokens == sum(lengths)


@pytest.mark.slow
def test_our_server_is_measured_beside_the_engine_alone(own_server, capsys):
    options = ["--engines=mlx_paged", "--no-static", "--requests=4", "--preset=fork-heavy"]
    lines, result, status = run_main(capsys, *options, "--url", own_server)
    alone, served = result["engines"].values()
    assert status == 0 and list(result["engines"]) == ["mlx_paged", own_server]
    assert served["streams"] == alone["streams"] == served["streams_finished"] == 32
    assert served["output_tokens"] > 0 and served["ttft_ms"]["p50"] > 0
    assert served["streams_as_first"] is None  # text beside ids
    assert any(line.startswith(f"{own_server}: ") and "p50 / p99 in ms" in line for line in lines)


@pytest.mark.slow
def test_without_aiohttp_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_info:
        serving.main(["--url", "http://127.0.0.1:1"])
    assert exit_info.value.code == 2
    assert "--url: aiohttp is missing: expected pip install '.[bench]'" in capsys.readouterr().err

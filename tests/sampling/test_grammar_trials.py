"""Sources that llguidance compiles without end are stopped in a process apart."""

import json
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_paged import SamplingParams
from mlx_paged.sampling import grammar as compiler
from mlx_paged.sampling import grammar_trials
from mlx_paged.sampling_params import CompilerBusy
from tests.support.commands.server_harness import demo, live, post

LONG = [f"(.|\\n)*a(.|\\n){{{i}}}" for i in range(59)]
ENDLESS = {
    "intersection": {"grammar": "start: T\nT: " + " & ".join(f"/{each}/" for each in LONG)},
    "lengths": {
        "grammar": "start: T\nT: " + " & ".join(f"/(.{{{i}}})*/" for i in range(2, 61)),
    },
    "schema": {"json_schema": {"allOf": [{"type": "string", "pattern": each} for each in LONG]}},
    "schema in a grammar": {
        "grammar": 'start: %json {"allOf": ['
        + ", ".join(f'{{"type": "string", "pattern": "{each}"}}' for each in LONG).replace(
            "\\n", "\\\\n"
        )
        + "]}"
    },
}
"""Without trials each takes gigabytes and a processor until the process ends."""


@pytest.fixture
def trials(monkeypatch):
    trials = grammar_trials.Trials()
    monkeypatch.setattr(compiler, "TRIALS", trials)
    yield trials
    trials.close()


@pytest.fixture
def grammars(trials):
    return compiler.Grammars(demo()[1], None)


@pytest.mark.heavy
def test_endless_sources_are_refused_and_cost_this_process_nothing(grammars):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sources = [SamplingParams(**each) for each in ENDLESS.values()]

    def refusal(params):
        with pytest.raises(ValueError, match="the compiler takes more than 2 s or 200 MiB") as told:
            grammars.compile(params)
        assert str(told.value).startswith(f"[SamplingParams] {params.constraint[0]}: ")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(refusal, sources))
    assert not grammars._late
    if sys.platform != "darwin":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    refusal(sources[0])  # known, so at once
    good = SamplingParams(regex="[ab]{3}")
    assert grammars.compile(good)
    assert grammars.knows(good) and not grammars.knows(sources[0])


def test_other_sources_are_compiled_meanwhile(grammars):
    ended = []

    def refused():
        with pytest.raises(ValueError, match="takes more than"):
            grammars.compile(SamplingParams(**ENDLESS["schema"]))
        ended.append(1)

    thread = threading.Thread(target=refused)
    thread.start()
    for count in range(3):
        assert grammars.compile(SamplingParams(regex=f"a{{{count + 1}}}"))
    assert not ended
    thread.join()
    assert ended


def test_a_source_that_has_passed_never_waits_again(grammars, monkeypatch):
    """The engine's thread compiles it again if it was forgotten."""
    params = SamplingParams(regex="ab")
    grammars.compile(params)
    grammars._compiled.clear()
    monkeypatch.setattr(grammar_trials, "MAX_WAITING", -grammar_trials.MAX_PROCESSES)
    assert grammars.compile(params)
    with pytest.raises(CompilerBusy, match="the compiler is busy"):
        grammars.compile(SamplingParams(regex="abc"))


@pytest.mark.parametrize("program", ["/nowhere", sys.executable])
def test_without_a_process_sources_are_compiled_here(grammars, monkeypatch, program):
    """One cannot be started, or ends at once."""
    monkeypatch.setattr(sys, "executable", program)
    monkeypatch.setattr(grammar_trials, "__file__", "/nowhere.py")
    assert grammars.compile(SamplingParams(regex="[ab]{3}"))


def test_a_process_that_was_ended_is_replaced(grammars, trials):
    grammars.compile(SamplingParams(regex="a"))
    (process,) = trials._idle
    process.kill()
    process.wait()
    assert grammars.compile(SamplingParams(regex="ab"))


@pytest.mark.heavy
def test_the_server_refuses_them_by_field_and_tells_when_it_is_busy(trials, monkeypatch):
    with live() as server:
        body = {"prompt": "a", "max_tokens": 2}
        schema = ENDLESS["schema"]["json_schema"]
        status, headers, answer = post(server, body | {"guided_json": schema})
        assert status == 400 and answer["error"]["param"] == "guided_json"
        assert headers["Retry-After"] is None
        assert post(server, body | {"guided_regex": "ab"})[0] == 200
        monkeypatch.setattr(grammar_trials, "MAX_WAITING", -grammar_trials.MAX_PROCESSES)
        status, headers, answer = post(server, body | {"guided_regex": "abc"})
        assert status == 503 and headers["Retry-After"] == "1"
        assert answer["error"]["code"] == "overloaded"
        assert post(server, body | {"guided_regex": "ab"})[0] == 200


def processor_ticks(pid: int) -> int:
    """Time of processors that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_source_that_waits_for_a_processor_is_not_refused(trials):
    """Other processes may take all processors for longer than the source needs."""
    trials.check("regex", "a")
    process = trials._idle[0]
    keys = {f"p{i}x": {"type": "integer"} for i in range(2000)}
    schema = json.dumps({"type": "object", "properties": keys, "additionalProperties": False})
    with ThreadPoolExecutor(1) as threads:
        checked = threads.submit(trials.check, "json_schema", schema)
        before = processor_ticks(process.pid)
        while not checked.done() and processor_ticks(process.pid) < before + 5:  # it compiles
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        time.sleep(grammar_trials.MAX_SECONDS + 0.5)
        process.send_signal(signal.SIGCONT)
        checked.result()

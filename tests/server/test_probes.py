"""/ready and /health fail while threads or an engine answer nothing, but not for long prompts."""

import threading

import pytest

from mlx_paged.server import workers
from tests.support.commands.server_harness import exchange, live, only_model, post, wait_until

NAMES = ("requests", "long bodies", "grammars", "images", "log-probabilities")


@pytest.fixture(scope="module")
def server():
    with live("--max-request-bytes", "1000000") as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    """As if seconds were shorter."""
    monkeypatch.setattr(workers, "PROBE_EVERY_S", 0.05)
    monkeypatch.setattr(workers, "READY_S", 1.0)


def status_of(server, path):
    return exchange(server, "GET", path)[0]


@pytest.mark.parametrize("name", [*NAMES, "an engine"])
def test_threads_that_answer_nothing_are_told(server, quick, name, monkeypatch):
    monkeypatch.setattr(workers, "READY_S", 0.5)
    may_end = threading.Event()
    if name == "an engine":
        service = only_model(server).service
        blocked = [threading.Thread(target=service.call, args=(lambda engine: may_end.wait(),))]
        blocked[0].start()
    else:
        pool = server.app.state.workers[name]
        for _ in range(pool._max_workers):
            pool.submit(may_end.wait)
    try:
        wait_until(lambda: status_of(server, "/ready") == 503)
        assert status_of(server, "/health") == 200
        with monkeypatch.context() as patch:
            patch.setattr(workers, "HEALTHY_S", 0.7)
            wait_until(lambda: status_of(server, "/health") == 503)
    finally:
        may_end.set()
    wait_until(lambda: status_of(server, "/ready") == 200)
    assert status_of(server, "/health") == 200


def test_threads_that_end_tasks_are_ready(server, quick):
    """However long the queue before the probe is."""
    pool = server.app.state.compiles
    tasks = [pool.submit(threading.Event().wait, 0.2) for _ in range(12)]
    while not tasks[-1].done():
        assert status_of(server, "/ready") == 200


def test_long_prompts_alone_are_no_failure(server, quick, monkeypatch):
    """All threads of long bodies tokenize for longer than /health waits."""
    may_end, tokenizer = threading.Event(), only_model(server).tokenizer
    begun, whole = [], tokenizer.encode

    def slow(text, **options):
        if len(text) > 70_000:
            begun.append(1)
            may_end.wait()
            return [5]
        return whole(text, **options)

    monkeypatch.setitem(vars(tokenizer), "encode", slow)
    pool, statuses = server.app.state.long_bodies, []
    long = {"prompt": " " * 4000 + "a" * 70_000, "max_tokens": 1}
    monkeypatch.setattr(only_model(server), "longest_token", 10**6)

    def ask():
        statuses.append(post(server, long)[0])

    clients = [threading.Thread(target=ask) for _ in range(pool._max_workers + 2)]
    for each in clients:
        each.start()
    try:
        wait_until(lambda: len(begun) == pool._max_workers)
        ended = threading.Event()
        monkeypatch.setattr(workers, "HEALTHY_S", 1.5)
        threading.Timer(2.5, ended.set).start()
        while not ended.is_set():
            assert status_of(server, "/ready") == status_of(server, "/health") == 200
    finally:
        may_end.set()
    for each in clients:
        each.join()
    assert set(statuses) == {200}

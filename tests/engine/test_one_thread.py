"""An engine serves one thread at a time: another one is refused, one after the other is fine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest

from mlx_paged import Engine, ops
from tests.support import TIMEOUT
from tests.support.models.tiny_models import solo_greedy

PROMPT = [5, 9, 77, 3, 21, 64, 8]
OTHER = PROMPT[::-1]

CALLS = {
    "step": lambda e: e.step(),
    "add_request": lambda e: e.add_request(OTHER),
    "add_samples": lambda e: e.add_samples(OTHER, 2),
    "add_beam_search": lambda e: e.add_beam_search(OTHER, 2),
    "fork": lambda e: e.fork(0),
    "abort": lambda e: e.abort(0),
    "release": lambda e: e.release(0),
    "reset_prefix_cache": lambda e: e.reset_prefix_cache(),
    "generate": lambda e: e.generate([OTHER], max_tokens=3),
    "sample": lambda e: e.sample([OTHER], 2, max_tokens=3),
    "beam_search": lambda e: e.beam_search(OTHER, 2, max_tokens=3),
    "stream": lambda e: e.stream(OTHER, max_tokens=3),
    "warm_up": lambda e: e.warm_up(),
    "close": lambda e: e.close(),
}


class Gate:
    """A logits processor in which the thread that steps waits until it is let go."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.opened = threading.Event()

    def __call__(self, tokens, logits):
        self.inside.set()
        assert self.opened.wait(TIMEOUT)
        return logits


@pytest.fixture
def engine(model):
    return Engine(model, block_size=4, num_blocks=64, prefill_chunk=16)


def elsewhere(function):
    """What a function returns in a thread of its own."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(function()))
    thread.start()
    thread.join(TIMEOUT)
    return returned[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_while_the_first_is_inside(model, engine, name):
    gate, done = Gate(), []
    first = threading.Thread(
        target=lambda: done.extend(
            engine.generate([PROMPT], max_tokens=8, logits_processors=[gate])
        )
    )
    first.start()
    try:
        assert gate.inside.wait(TIMEOUT)
        with pytest.raises(RuntimeError, match=rf"^\[Engine\] {name} is called while another"):
            CALLS[name](engine)
    finally:
        gate.opened.set()
        first.join(TIMEOUT)
    assert done[0].tokens == solo_greedy(model, PROMPT, 8)
    assert not engine.has_work and engine.manager.blocks_in_use == 0
    assert engine.generate([OTHER], max_tokens=8)[0].tokens == solo_greedy(model, OTHER, 8)


def test_threads_may_use_an_engine_one_after_the_other(model):
    expected = solo_greedy(model, PROMPT, 12)
    engine = elsewhere(lambda: Engine(model, block_size=4, num_blocks=64))
    engine.add_request(PROMPT, max_tokens=12)
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in elsewhere(engine.step)]
        if engine.has_work:
            tokens += [output.token for output in engine.step()]
    assert tokens == expected


def test_the_thread_that_is_inside_may_enter_again(model, engine):
    doomed = engine.add_request(OTHER, max_tokens=50)
    (completion,) = engine.generate(
        [PROMPT], max_tokens=8, on_output=lambda output: engine.abort(doomed)
    )
    assert completion.tokens == solo_greedy(model, PROMPT, 8)
    assert engine.request(doomed) is None


def test_an_error_inside_lets_the_next_thread_in(engine):
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate([[]])
    assert elsewhere(lambda: engine.add_request(PROMPT, max_tokens=3)) >= 0


def test_a_thread_that_saw_the_engine_free_is_refused_if_a_service_came_first(engine):
    occupancy = engine.occupancy

    class Lock:
        """Lets a service come while a caller waits for it."""

        def __enter__(self):
            occupancy.thread = threading.get_ident() + 1

        def __exit__(self, *exception):
            pass

    occupancy.lock = Lock()
    with pytest.raises(RuntimeError, match="another thread uses the engine"):
        engine.step()
    assert occupancy.thread == threading.get_ident() + 1


def test_threads_that_take_turns_lose_no_error_of_a_gpu(model, monkeypatch):
    """Only the thread that launched a step can ask for its errors: see csrc/metal/encode.cpp."""

    def end_of_work():
        thread = threading.get_ident()

        def wait():
            if threading.get_ident() != thread:
                raise RuntimeError("[METAL] Command buffer of another thread: planted")

        return wait

    monkeypatch.setattr(ops.metal, "end_of_work", end_of_work)
    engine, other = (Engine(model, block_size=4, num_blocks=64, prefill_chunk=16) for _ in "ab")
    for prompt in (PROMPT, OTHER):
        engine.add_request(prompt, max_tokens=12)
    done = {}
    with ThreadPoolExecutor(1) as here, ThreadPoolExecutor(1) as there:
        for thread in cycle((here, here, there, there, here, there)):
            if not engine.has_work:
                break
            for output in thread.submit(engine.step).result(TIMEOUT):
                if output.completion is not None:
                    done[output.request_id] = output.completion.tokens
    assert list(map(done.get, range(2))) == [solo_greedy(model, p, 12) for p in (PROMPT, OTHER)]
    assert engine.stats.faults > 0
    assert other.manager.runner.error is None
    assert engine.device_faults == 0 and engine.scheduler.max_running == 32


def test_each_refused_call_has_its_own_name(engine):
    """Also the calls that wait for their requests, and the end of a stream in another thread."""
    engine.occupancy.thread = threading.get_ident() + 1
    calls = CALLS | {
        "chat": lambda e: e.chat([{"role": "user", "content": "x"}]),
        "stream_chat": lambda e: e.stream_chat([{"role": "user", "content": "x"}]),
        "close of a stream": lambda e: e._abort_dropped(),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^\[Engine\] {name} is called while another"):
            call(engine)

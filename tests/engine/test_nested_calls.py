"""Calls of an engine within `on_output` of another call, and beside requests that were added: each
caller gets the outputs of its own requests, all of them, and no call waits for ever."""

import signal
from collections import defaultdict

import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.request import FinishReason
from tests.support.models.tiny_models import VOCAB, solo_greedy

PROMPTS = [[5, 9, 77, 3, 21, 64, 8], [8, 64, 21], [1, 2, 3, 4]]
INNER = [9, 8, 7]
SECONDS = 60


@pytest.fixture(params=[True, False], ids=["ahead", "plain"])
def engine(model, request):
    made = Engine(model, block_size=4, num_blocks=200, max_running=16, lookahead=request.param)
    yield made
    assert not made.has_work and not made._streams and made.manager.blocks_in_use == 0


@pytest.fixture(autouse=True)
def in_time():
    """A call that waits for ever ends with an error."""

    def late(*_):
        raise TimeoutError("a call waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tokens_of(outputs) -> dict[int, list[int]]:
    """Tokens by request id."""
    found = defaultdict(list)
    for output in outputs:
        if output.token is not None:
            found[output.request_id].append(output.token)
    return dict(found)


def run_nested(engine, inner, at=2):
    """Complete PROMPTS; with the output number `at` call `inner(engine)`, whose value is returned
    after the outputs that the outer call got have been compared with its completions."""
    seen, got = [], []

    def on_output(output):
        seen.append(output)
        if len(seen) == at:
            got.append(inner(engine))

    done = engine.generate(PROMPTS, max_tokens=8, on_output=on_output)
    assert tokens_of(seen) == {c.request_id: c.tokens for c in done}
    assert [c.tokens for c in done] == [solo_greedy(engine.runner.model, p, 8) for p in PROMPTS]
    (value,) = got
    return value


@pytest.mark.parametrize("at", [1, 2, 3, 23, 24], ids="output {}".format)
def test_a_nested_generate_shares_no_output(model, engine, at):
    def inner(engine):
        seen = []
        return engine.generate([INNER], max_tokens=5, on_output=seen.append), seen

    (done,), seen = run_nested(engine, inner, at)
    assert tokens_of(seen) == {done.request_id: done.tokens}
    assert done.tokens == solo_greedy(model, INNER, 5)


@pytest.mark.parametrize("at", [1, 3, 24], ids="output {}".format)
def test_a_nested_stream_gives_its_own_tokens(model, engine, at):
    got = run_nested(engine, lambda engine: list(engine.stream(INNER, max_tokens=9)), at)
    assert [output.token for output in got] == solo_greedy(model, INNER, 9)
    assert len({output.request_id for output in got}) == 1


def test_a_stream_outlives_the_call_that_began_it(model, engine):
    def inner(engine):
        stream = engine.stream(INNER, max_tokens=20)
        return stream, [next(stream).token for _ in range(3)]

    stream, first = run_nested(engine, inner)
    assert first + [output.token for output in stream] == solo_greedy(model, INNER, 20)


def test_a_stream_read_bit_by_bit_in_each_output(model, engine):
    streams, got = [], []

    def on_output(output):
        if not streams:
            streams.append(engine.stream(INNER, max_tokens=12))
        got.extend(output.token for output in [next(streams[0], None)] if output)

    done = engine.generate(PROMPTS, max_tokens=8, on_output=on_output)
    got += [output.token for output in streams[0]]
    assert got == solo_greedy(model, INNER, 12)
    assert [c.tokens for c in done] == [solo_greedy(model, p, 8) for p in PROMPTS]


def test_streams_within_streams(model, engine):
    outer, got = engine.stream(PROMPTS[0], max_tokens=6), []
    for output in outer:
        inner = engine.stream(INNER, max_tokens=4)
        assert [each.token for each in inner] == solo_greedy(model, INNER, 4)
        got.append(output.token)
    assert got == solo_greedy(model, PROMPTS[0], 6)


def test_nested_samples_and_beams(model, engine):
    def inner(engine):
        seen = []
        options = {"temperature": 1.0, "seed": 3, "max_tokens": 4}
        (samples,) = engine.sample([INNER], 3, on_output=seen.append, **options)
        return samples, seen, engine.beam_search(INNER, 2, max_tokens=4)

    samples, seen, best = run_nested(engine, inner)
    assert tokens_of(seen) == {c.request_id: c.tokens for c in samples}
    alone = Engine(model, num_blocks=64)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 4}
    assert [c.tokens for c in alone.sample([INNER], 3, **options)[0]] == [c.tokens for c in samples]
    expected = alone.beam_search(INNER, 2, max_tokens=4)
    assert [b.tokens for b in best.beams] == [b.tokens for b in expected.beams]


@pytest.mark.parametrize("count", [1, 5, 40], ids="{} steps".format)
def test_steps_within_a_call_give_nothing_of_it(engine, count):
    assert run_nested(engine, lambda engine: [engine.step() for _ in range(count)]) == [[]] * count


def test_a_step_in_each_output_gives_nothing_of_the_call(model, engine):
    stepped = []
    done = engine.generate(PROMPTS, max_tokens=8, on_output=lambda _: stepped.extend(engine.step()))
    assert not stepped and [c.tokens for c in done] == [solo_greedy(model, p, 8) for p in PROMPTS]


def test_a_loop_over_all_work_within_a_call_ends(engine):
    def inner(engine):
        while engine.has_work:
            assert engine.step() == []

    run_nested(engine, inner)


@pytest.mark.parametrize("how", ["stream", "generate", "sample", "beam_search", "nested"])
def test_outputs_of_added_requests_wait_for_a_step(model, engine, how):
    added = engine.add_request(PROMPTS[0], max_tokens=4)
    if how == "stream":
        list(engine.stream(INNER, max_tokens=12))
    elif how == "nested":
        engine.generate(
            [INNER], max_tokens=3, on_output=lambda _: list(engine.stream(INNER, max_tokens=3))
        )
    elif how == "beam_search":
        engine.beam_search(INNER, 2, max_tokens=6)
    else:
        options = {"n": 1} if how == "sample" else {}
        getattr(engine, how)([INNER], max_tokens=12, **options)
    assert engine.is_open(added)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == {added: solo_greedy(model, PROMPTS[0], 4)}
    assert outputs[-1].completion.tokens == solo_greedy(model, PROMPTS[0], 4)
    assert not engine.is_open(added)


def test_a_request_added_within_a_call_is_stepped_by_nobody_else(model, engine):
    added = run_nested(engine, lambda engine: engine.add_request(INNER, max_tokens=5))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == {added: solo_greedy(model, INNER, 5)}


@pytest.mark.parametrize("whose", ["own", "other", "last"])
def test_a_request_that_is_aborted_within_its_call_has_what_was_seen(model, engine, whose):
    seen = []

    def on_output(output):
        seen.append(output)
        if len(seen) == 8:
            ids = sorted({each.request_id for each in seen})
            others = [each for each in ids if each != output.request_id]
            engine.abort({"own": output.request_id, "other": others[0], "last": ids[-1]}[whose])

    done = engine.generate(PROMPTS, max_tokens=8, on_output=on_output)
    assert [c.finish_reason for c in done].count(FinishReason.ABORT) == 1
    assert tokens_of(seen) == {c.request_id: c.tokens for c in done}


def test_all_requests_aborted_within_their_call(engine):
    def on_output(output):
        for request_id in list(engine._requests):
            engine.abort(request_id)

    done = engine.generate(PROMPTS, max_tokens=8, on_output=on_output)
    assert {c.finish_reason for c in done} == {FinishReason.ABORT}


def test_a_nested_call_that_fails_ends_nothing_else(model, engine):
    def inner(engine):
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.generate([[]])
        with pytest.raises(KeyError):
            engine.generate([INNER], max_tokens=4, on_output=lambda _: {}[0])
        return engine.generate([INNER], max_tokens=4)[0].tokens

    assert run_nested(engine, inner) == solo_greedy(model, INNER, 4)


def test_an_error_of_an_outer_call_ends_its_requests_alone(model, engine):
    stream = engine.stream(INNER, max_tokens=12)

    def on_output(output):
        next(stream)
        raise KeyError

    with pytest.raises(KeyError):
        engine.generate(PROMPTS, max_tokens=8, on_output=on_output)
    assert [o.token for o in stream] == solo_greedy(model, INNER, 12)[1:]


@pytest.mark.parametrize("call", ["step", "generate", "stream", "fork"])
def test_a_step_within_a_step_ends_the_request_that_asks_for_it(model, engine, call):
    """A logits processor runs while a step is built."""
    others = engine.add_request(INNER, max_tokens=6)

    def processor(tokens, logits):
        if call == "step":
            engine.step()
        elif call == "generate":
            engine.generate([INNER], max_tokens=2)
        elif call == "stream":
            list(engine.stream(INNER, max_tokens=2))
        else:
            engine.fork(others)
        return logits

    (done,) = engine.generate([PROMPTS[1]], max_tokens=4, logits_processors=[processor])
    if done.finish_reason is FinishReason.ERROR:
        assert "RuntimeError" in done.error and "within a step" in done.error
    else:  # a fork settles only what is under way
        assert call == "fork"
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs)[others] == solo_greedy(model, INNER, 6)


class Nesting:
    """Random calls within calls; each compares what it gets with what the model says."""

    def __init__(self, engine, seed):
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.model = engine.runner.model
        self.left = 25  # calls
        self.added: dict[int, list[int]] = {}
        self.stepped, self.streams = [], []

    def expected(self, prompt, count):
        return solo_greedy(self.model, prompt, count)

    def prompt(self):
        return self.rng.integers(VOCAB, size=self.rng.integers(1, 9)).tolist()

    def act(self, depth=0):
        if self.left <= 0 or depth > 3:
            return
        self.left -= 1
        kinds = ("generate", "sample", "beams", "stream", "begin", "read", "step", "add")
        getattr(self, self.rng.choice(kinds))(depth)

    def on_output(self, seen, depth):
        def call(output):
            seen.append(output)
            if self.rng.random() < 0.2:
                self.act(depth + 1)

        return call

    def generate(self, depth):
        prompts, seen = [self.prompt() for _ in range(self.rng.integers(1, 4))], []
        call = self.on_output(seen, depth)
        done = self.engine.generate(prompts, max_tokens=5, on_output=call)
        assert tokens_of(seen) == {c.request_id: c.tokens for c in done}
        assert [c.tokens for c in done] == [self.expected(p, 5) for p in prompts]

    def sample(self, depth):
        seen, options = [], {"temperature": 1.0, "seed": 1, "max_tokens": 3}
        call = self.on_output(seen, depth)
        (done,) = self.engine.sample([self.prompt()], 2, on_output=call, **options)
        assert tokens_of(seen) == {c.request_id: c.tokens for c in done}

    def beams(self, depth):
        assert len(self.engine.beam_search(self.prompt(), 2, max_tokens=3).beams) == 2

    def stream(self, depth):
        prompt, got = self.prompt(), []
        for output in self.engine.stream(prompt, max_tokens=6):
            got.append(output.token)
            if self.rng.random() < 0.3:
                self.act(depth + 1)
        assert got == self.expected(prompt, 6)

    def begin(self, depth):
        prompt = self.prompt()
        self.streams.append((self.engine.stream(prompt, max_tokens=6), prompt, []))

    def read(self, depth):
        for stream, _, got in self.streams:
            got += [output.token for output in [next(stream, None)] if output]

    def step(self, depth):
        self.stepped += self.engine.step()

    def add(self, depth):
        prompt = self.prompt()
        self.added[self.engine.add_request(prompt, max_tokens=4)] = self.expected(prompt, 4)

    def end(self):
        for stream, prompt, got in self.streams:
            assert got + [output.token for output in stream] == self.expected(prompt, 6)
        while self.engine.has_work:
            self.step(0)
        assert tokens_of(self.stepped) == self.added


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls_within_calls(engine, seed):
    nesting = Nesting(engine, seed)
    while nesting.left > 0:
        nesting.act()
    nesting.end()

"""One bad request never takes others with it, and nothing leaks."""

import signal
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, FinishReason
from mlx_paged.engine.core import DeferredInterrupts
from tests.support.models.tiny_models import VOCAB, solo_greedy

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (9, 25, 14, 31, 6)]


@pytest.fixture(scope="module")
def expected(model):
    return [solo_greedy(model, prompt, 12) for prompt in PROMPTS]


@pytest.fixture
def engine(model):
    return Engine(model, block_size=4, num_blocks=96, prefill_chunk=16, max_running=4)


def finish(engine: Engine) -> dict:
    done = {}
    for _ in range(1000):
        if not engine.has_work:
            break
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.manager.check_integrity()
    assert not engine.has_work, "the engine hangs"
    assert engine.manager.blocks_in_use == 0
    return done


def raise_at(step: int, error: BaseException):
    """A logits processor that raises when `step` tokens have been generated."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        processor.calls += 1
        if processor.calls > step:
            raise error
        return logits

    processor.calls = 0
    return processor


def test_a_scheduler_that_fails_does_not_lose_the_step_under_way(engine, expected, monkeypatch):
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    schedule, calls = engine.scheduler.schedule, []

    def failing():
        calls.append(engine.stats.faults)
        if len(calls) == 6:
            raise ValueError("planted")
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", failing)
    done = finish(engine)
    assert [done[i].tokens for i in ids] == expected and engine.stats.faults == 1


@pytest.mark.slow
def test_a_device_that_fails_twice_loses_nothing(engine, expected, monkeypatch):
    """MLX raises once more when recovery waits for the step that was launched meanwhile."""
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    collect, synchronize = engine.runner.collect, mx.synchronize
    failures = []

    def failing_once(function):
        def call(*args):
            if function not in failures:
                failures.append(function)
                synchronize()
                raise RuntimeError("[METAL] Command buffer execution failed")
            return function(*args)

        return call

    for _ in range(3):
        engine.step()
    monkeypatch.setattr(engine.runner, "collect", failing_once(collect))
    monkeypatch.setattr(mx, "synchronize", failing_once(synchronize))
    done = finish(engine)
    assert failures == [collect, synchronize]
    assert [done[i].tokens for i in ids] == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_raising_processor_ends_its_request_alone(engine, expected, at, lookahead):
    engine.lookahead = lookahead
    processor = raise_at(at, RuntimeError("no such\nword"))
    ids = []
    for i, prompt in enumerate(PROMPTS):
        processors = [processor] if i == 2 else []
        ids.append(engine.add_request(prompt, max_tokens=12, logits_processors=processors))
    done = finish(engine)
    assert processor.calls == at + 1, "it was called again after it had raised"
    assert done[ids[2]].finish_reason is FinishReason.ERROR
    assert done[ids[2]].error == "RuntimeError: no such word"
    assert done[ids[2]].tokens == expected[2][:at]
    for i in (0, 1, 3, 4):
        assert done[ids[i]].tokens == expected[i] and done[ids[i]].error is None


def fill_from(step: int, value: float):
    """A logits processor that makes all logits `value` when `step` tokens have been generated."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        is_due = len(tokens) >= len(PROMPTS[2]) + step
        return mx.full(logits.shape, value, logits.dtype) if is_due else logits

    return processor


@pytest.mark.sampled(8)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("value", [mx.nan, -mx.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 2}], ids=str
)
def test_a_processor_that_leaves_no_token_ends_its_request_alone(
    engine, expected, lookahead, at, value, options
):
    engine.lookahead = lookahead
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS[:2]]
    bad = engine.add_request(
        PROMPTS[2], max_tokens=12, logits_processors=[fill_from(at, value)], **options
    )
    ids += [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS[3:]]
    done = finish(engine)
    assert done[bad].finish_reason is FinishReason.ERROR
    assert "logits_processors or logit_bias leave no token" in done[bad].error
    assert len(done[bad].tokens) == at and np.isfinite(done[bad].logprobs).all()
    assert [done[i].tokens for i in ids] == expected[:2] + expected[3:]
    assert engine.stats.faults == 0


def test_biases_that_forbid_every_token_end_their_request_alone(engine, expected):
    bad = engine.add_request(PROMPTS[0], logit_bias=dict.fromkeys(range(VOCAB), -mx.inf))
    other = engine.add_request(PROMPTS[1], max_tokens=12)
    done = finish(engine)
    assert done[bad].finish_reason is FinishReason.ERROR and done[bad].tokens == []
    assert done[other].tokens == expected[1]


def test_a_processor_may_leave_a_single_token(engine):
    def only_seven(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB) == 7, logits, -mx.inf)

    for options in ({}, {"temperature": 1.0}):
        (completion,) = engine.generate(
            [PROMPTS[0]], max_tokens=3, logits_processors=[only_seven], **options
        )
        assert completion.tokens == [7] * 3 and completion.error is None


def test_a_beam_search_drops_hypotheses_that_have_no_continuation(engine):
    """Where others have one: no token that ends such a hypothesis is among the answers."""
    first = engine.beam_search(PROMPTS[0], 3, max_tokens=1).tokens[0]

    def forbid_after_first(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(tokens[-1] == first, -mx.inf, logits)

    found = engine.beam_search(PROMPTS[0], 3, max_tokens=4, logits_processors=[forbid_after_first])
    assert found.finish_reason is FinishReason.LENGTH and len(found.beams) == 3
    assert all(first not in beam.tokens[:-1] for beam in found.beams)


class Saboteur:
    """Stands between the engine and its model."""

    def __init__(self, engine: Engine, monkeypatch) -> None:
        self.fails_when = lambda batch: False
        self.error: BaseException = RuntimeError("[malloc] Unable to allocate 1 bytes.")
        self.launches = 0
        forward = engine.runner._forward

        def sabotaged(batch):
            self.launches += 1
            if self.fails_when(batch):
                raise self.error
            return forward(batch)

        monkeypatch.setattr(engine.runner, "_forward", sabotaged)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_step_that_fails_once_costs_no_token(engine, expected, monkeypatch, at, lookahead):
    engine.lookahead = lookahead
    saboteur = Saboteur(engine, monkeypatch)
    saboteur.fails_when = lambda batch: saboteur.launches == at
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    done = finish(engine)
    assert [done[i].tokens for i in ids] == expected
    assert engine.stats.faults == 1


@pytest.mark.parametrize("culprit", [0, 3])
def test_a_request_on_which_the_model_fails_is_found_and_ended(
    engine, expected, monkeypatch, culprit
):
    saboteur = Saboteur(engine, monkeypatch)
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    bad = len(PROMPTS[culprit]) + 4
    saboteur.fails_when = lambda batch: any(
        seq_id == ids[culprit] and position >= bad
        for seq_id, position in zip(batch.seq_ids, batch.positions.tolist(), strict=False)
    )
    done = finish(engine)
    assert done[ids[culprit]].finish_reason is FinishReason.ERROR
    assert "Unable to allocate" in done[ids[culprit]].error
    for i in set(range(5)) - {culprit}:
        assert done[ids[i]].tokens == expected[i]


def test_a_model_that_always_fails_ends_every_request_and_hangs_none(engine, monkeypatch):
    saboteur = Saboteur(engine, monkeypatch)
    saboteur.fails_when = lambda batch: True
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    done = finish(engine)
    assert {done[i].finish_reason for i in ids} == {FinishReason.ERROR}


def test_a_failure_while_waiting_for_the_device_is_survived(engine, expected, monkeypatch):
    collect = engine.runner.collect
    calls = iter(range(10**6))

    def failing(launched):
        if next(calls) == 4:
            raise RuntimeError("command buffer execution failed")
        return collect(launched)

    monkeypatch.setattr(engine.runner, "collect", failing)
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    done = finish(engine)
    assert [done[i].tokens for i in ids] == expected


def test_beams_and_samples_survive_a_failed_step(model, monkeypatch):
    def run(fails_at: int):
        engine = Engine(model, block_size=4, num_blocks=128, prefill_chunk=16)
        saboteur = Saboteur(engine, monkeypatch)
        saboteur.fails_when = lambda batch: saboteur.launches == fails_at
        search = engine.add_beam_search(PROMPTS[0], 3, max_tokens=8)
        samples = engine.add_samples(PROMPTS[1], 3, max_tokens=8, temperature=1.0, seed=2)
        done = finish(engine)
        return [b.tokens for b in done[search].beams], [done[i].tokens for i in samples]

    expected = run(-1)
    for fails_at in (1, 3, 5, 7):
        assert run(fails_at) == expected


def test_a_beam_search_with_a_raising_processor_ends_as_one(engine, expected):
    search = engine.add_beam_search(
        PROMPTS[0], 3, max_tokens=8, logits_processors=[raise_at(4, ValueError("x"))]
    )
    other = engine.add_request(PROMPTS[1], max_tokens=12)
    done = finish(engine)
    assert done[search].finish_reason is FinishReason.ERROR
    assert done[other].tokens == expected[1]


def test_an_interrupt_from_within_a_step_costs_no_token(engine, expected, monkeypatch):
    saboteur = Saboteur(engine, monkeypatch)
    saboteur.error = KeyboardInterrupt()
    saboteur.fails_when = lambda batch: saboteur.launches in (3, 9)
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    done, interrupts = {}, 0
    while engine.has_work:
        try:
            done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        except KeyboardInterrupt:
            interrupts += 1
            engine.manager.check_integrity()
    assert interrupts == 2
    assert [done[i].tokens for i in ids] == expected


def test_ctrl_c_takes_effect_after_the_step_and_loses_no_output(engine, expected, monkeypatch):
    saboteur = Saboteur(engine, monkeypatch)

    def interrupt(batch) -> bool:
        if saboteur.launches in (2, 6):
            signal.raise_signal(signal.SIGINT)
        return False

    saboteur.fails_when = interrupt
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    interrupts = 0
    while engine.has_work:
        try:
            for output in engine.step():
                tokens[output.request_id].append(output.token)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2 and engine.stats.faults == 0
    assert [tokens[i] for i in ids] == expected
    assert engine.manager.blocks_in_use == 0


def test_ctrl_c_in_generate_takes_back_its_prompts_only(engine, expected, monkeypatch):
    mine = engine.add_request(PROMPTS[0], max_tokens=12)
    saboteur = Saboteur(engine, monkeypatch)

    def interrupt(batch) -> bool:
        if saboteur.launches == 4:
            signal.raise_signal(signal.SIGINT)
        return False

    saboteur.fails_when = interrupt
    seen = []
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[1:], max_tokens=12)
    while engine.has_work:
        seen += [output.token for output in engine.step()]
        assert all(request_id == mine for request_id in engine._requests)
    assert seen == expected[0]
    assert engine.manager.blocks_in_use == 0


def test_interrupts_are_deferred_only_where_that_means_something():
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    failures = []

    def elsewhere() -> None:
        try:
            with DeferredInterrupts():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failures
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_outputs_of_others_are_not_lost_in_generate(engine, expected):
    mine = engine.add_request(PROMPTS[0], max_tokens=5)
    engine.generate([PROMPTS[1]], max_tokens=12)
    tokens = []
    while engine.has_work:
        tokens += [o.token for o in engine.step() if o.request_id == mine]
    assert tokens == expected[0][:5]


def test_a_callback_may_abort_what_generate_waits_for(engine, expected):
    def stop_first(output) -> None:
        if output.request_id == 0:
            engine.abort(0)

    done = engine.generate(PROMPTS[:2], max_tokens=12, on_output=stop_first)
    assert done[0].finish_reason is FinishReason.ABORT and done[0].tokens == expected[0][:1]
    assert done[1].tokens == expected[1]

"""A device that fails costs no token, whoever is told of it, and no wrong token is given.

MLX tells of a device's error once: to the next one who gives the device work or waits for it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from random import Random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged import Engine, SamplingParams, ops
from mlx_paged.kv_disk import opening
from mlx_paged.runner.device_errors import waiting
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.scheduler.step import DeviceError, Step
from tests.support.engine.batch_generators import (
    PROMPTS as BATCH_PROMPTS,
)
from tests.support.engine.batch_generators import (
    model as batch_model,
)
from tests.support.engine.batch_generators import (
    paged,
    tokens_of,
)
from tests.support.engine.batch_generators import (
    run as generate_all,
)
from tests.support.engine.metal_queue import BUFFERS, MESSAGE, MetalQueue
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (9, 25, 6)]
NUM_TOKENS = 3, 8, 8


class FailingDevice:
    """Fails while it computes a step, and tells of it once.

    Args:
        at: which launch fails.
        tells: which of MLX's functions raises the error.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, tells: str) -> None:
        self.told: list[str] = []
        self._has_failed = False
        self._launches = 0
        monkeypatch.setattr(mx, tells, self._asked(tells, getattr(mx, tells)))
        launch = ModelRunner.launch

        def failing(runner: ModelRunner, step: Any, before: Any) -> LaunchedStep:
            launched = launch(runner, step, before)
            self._launches += 1
            if self._launches != at:
                return launched
            self._has_failed = True
            assert launched.sampled is not None
            wrong = (launched.sampled.tokens + 1) % VOCAB
            launched.sampled = replace(launched.sampled, tokens=wrong)
            return launched

        monkeypatch.setattr(ModelRunner, "launch", failing)

    def _asked(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def ask(*args: Any) -> None:
            function(*args)
            if self._has_failed:
                self._has_failed = False
                self.told.append(name)
                raise RuntimeError("[METAL] Command buffer execution failed")

        return ask


def run(
    model_type: str, lookahead: bool = True, num_engines: int = 1
) -> tuple[list[Engine], list[list[int]]]:
    """Engines that take turns, and the tokens of each one's requests."""
    size = {"block_size": 4, "num_blocks": 96, "prefill_chunk": 64, "prewarm": False}
    model, done, ids = tiny_model(model_type), {}, []
    engines = [Engine(model, lookahead=lookahead, **size) for _ in range(num_engines)]
    for engine in engines:
        for prompt, count in zip(PROMPTS, NUM_TOKENS, strict=True):
            ids.append((engine, engine.add_request(prompt, max_tokens=count)))
    while any(engine.has_work for engine in engines):
        for engine in engines:
            outputs = engine.step() if engine.has_work else []
            done |= {(engine, o.request_id): o.completion for o in outputs if o.completion}
    assert [done[i].error for i in ids] == [None] * len(ids)
    assert all(engine.manager.blocks_in_use == 0 for engine in engines)
    return engines, [done[i].tokens for i in ids]


def solo(model_type: str) -> list[list[int]]:
    model = tiny_model(model_type)
    return [solo_greedy(model, *request) for request in zip(PROMPTS, NUM_TOKENS, strict=True)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
@pytest.mark.parametrize("at", [1, 3, 4, 7])
@pytest.mark.parametrize(
    ("lookahead", "tells"), [(True, "async_eval"), (True, "eval"), (False, "eval")]
)
def test_a_failed_step_is_computed_again(monkeypatch, model_type, at, lookahead, tells):
    expected = solo(model_type)
    device = FailingDevice(monkeypatch, at, tells)
    (engine,), found = run(model_type, lookahead)
    assert found == expected and device.told == [tells] and engine.stats.faults == 1


def test_a_snapshot_that_a_request_leaves_may_be_what_the_device_refuses(monkeypatch):
    """The first request ends while the step that fails is under way."""
    expected = solo("jamba")
    device = FailingDevice(monkeypatch, NUM_TOKENS[0] + 1, "async_eval")
    assert run("jamba")[1] == expected and device.told == ["async_eval"]


def fails_at(monkeypatch: pytest.MonkeyPatch, seed: int, others_wait: bool = False) -> MetalQueue:
    """A queue on which a random buffer of a random launch fails."""
    random = Random(seed)
    at, buffer = random.randint(1, 8), random.choice([0, 1, BUFFERS - 1])
    queue = MetalQueue(at, buffer, seed, others_wait)
    queue.install(monkeypatch)
    return queue


@pytest.mark.sampled(50)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("seed", range(500))
def test_no_token_of_a_failed_step_leaves_the_engine(monkeypatch, seed, lookahead):
    expected = solo("llama")
    queue = fails_at(monkeypatch, seed)
    (engine,), found = run("llama", lookahead)
    assert found == expected
    assert (queue.failures, queue.told, engine.stats.faults) == (1, 1, 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_two_engines_on_one_stream_are_both_told(monkeypatch, seed):
    """The one that meets the error may not be the one whose step failed."""
    expected = solo("llama")
    queue = fails_at(monkeypatch, seed)
    engines, found = run("llama", num_engines=2)
    assert found == 2 * expected and (queue.failures, queue.told) == (1, 1)
    assert [engine.stats.faults for engine in engines] == [1, 1]


def test_an_engine_that_is_made_meanwhile_does_not_hide_the_error(monkeypatch):
    expected, model = solo("llama"), tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=64, prewarm=False)
    device = FailingDevice(monkeypatch, 0, "eval")
    ids = [engine.add_request(p, max_tokens=n) for p, n in zip(PROMPTS, NUM_TOKENS, strict=True)]
    engine.step()
    launched, device._has_failed = engine._pipeline._under_way.launched, True
    launched.sampled = replace(launched.sampled, tokens=(launched.sampled.tokens + 1) % VOCAB)
    with pytest.raises(RuntimeError, match="Command buffer"):
        Engine(model, num_blocks=8, prewarm=False)
    done = {i: engine.request(i) for i in ids}
    while engine.has_work:
        engine.step()
    assert [done[i].generated for i in ids] == expected and device.told == ["eval"]


def test_an_engine_that_opens_a_disk_meanwhile_tells_the_error(monkeypatch, tmp_path):
    def failing(*arguments: Any) -> None:
        raise RuntimeError(MESSAGE)

    model = tiny_model("llama")
    engine = Engine(model, num_blocks=96, prewarm=False)
    monkeypatch.setattr(opening, "Staging", failing)
    with pytest.raises(DeviceError, match="Command buffer"):
        Engine(model, num_blocks=8, prewarm=False, kv_disk=tmp_path)
    assert isinstance(engine.manager.runner.error, DeviceError)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_no_token_of_a_failed_step_leaves_a_batch_generator(monkeypatch, seed):
    expected = [solo_greedy(batch_model(), prompt, 6) for prompt in BATCH_PROMPTS]
    queue = fails_at(monkeypatch, seed)
    generator = paged()
    uids = generator.insert(BATCH_PROMPTS, [6] * len(BATCH_PROMPTS))
    tokens = tokens_of(generate_all(generator)[1])
    assert [tokens[uid] for uid in uids] == expected
    assert (queue.failures, queue.told) == (1, 1)


@lru_cache
def expected_caches(uid: int) -> tuple[list[int], list[tuple[mx.array, mx.array]]]:
    """All tokens of a sequence of a batch generator, and mlx-lm's K/V of them."""
    tokens = BATCH_PROMPTS[uid] + solo_greedy(batch_model(), BATCH_PROMPTS[uid], 6)
    caches = make_prompt_cache(batch_model())
    batch_model()(mx.array([tokens]), cache=caches)
    return tokens, [cache.state for cache in caches]


def check_caches(uid: int, caches: list[Any], tokens: list[int]) -> None:
    known, states = expected_caches(uid)
    assert list(tokens) == known[: len(tokens)]
    for cache, state in zip(caches, states, strict=True) if tokens else ():
        assert cache.offset == len(tokens)
        for found, want in zip(cache.state[:2], state[:2], strict=True):
            assert mx.allclose(*[kv[:, :, : len(tokens)] for kv in (found, want)], atol=1e-4)


def generate_with_caches() -> None:
    """Take all caches after each step; check them and the tokens."""
    generator = paged()
    uids = generator.insert(BATCH_PROMPTS, [6] * len(BATCH_PROMPTS))
    while responses := generator.next_generated():
        for uid, (caches, tokens) in generator.extract_cache(uids).items():
            check_caches(uid, caches, tokens)
        for ended in [r for r in responses if r.finish_reason]:
            check_caches(ended.uid, ended.prompt_cache, ended.all_tokens)
            assert ended.all_tokens == expected_caches(ended.uid)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_no_kv_of_a_failed_step_leaves_a_batch_generator(monkeypatch, seed):
    list(map(expected_caches, range(len(BATCH_PROMPTS))))
    queue = fails_at(monkeypatch, seed)
    generate_with_caches()
    assert (queue.failures, queue.told) == (1, 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_an_error_that_another_engine_is_told_of_meanwhile_is_not_hidden(monkeypatch, seed):
    """Neither from who reads tokens nor from who copies K/V."""
    list(map(expected_caches, range(len(BATCH_PROMPTS))))
    expected = solo("llama")
    with monkeypatch.context() as patch:
        fails_at(patch, seed, others_wait=True)
        generate_with_caches()
    queue = fails_at(monkeypatch, seed, others_wait=True)
    (engine,), found = run("llama")
    assert found == expected and (queue.failures, queue.told, engine.stats.faults) == (1, 1, 1)


@pytest.mark.parametrize("at", [2, 5, 6, 8])
def test_who_takes_caches_does_not_hide_the_error(monkeypatch, at):
    list(map(expected_caches, range(len(BATCH_PROMPTS))))
    device = FailingDevice(monkeypatch, at, "eval")
    generate_with_caches()
    assert device.told == ["eval"]


def test_a_step_that_is_read_when_its_event_is_signalled_gives_wrong_tokens(monkeypatch):
    """What the tests above would find."""
    expected, num_wrong = solo("llama"), 0
    for seed in range(12):
        with monkeypatch.context() as patch:
            fails_at(patch, seed).handlers_are_late = True
            patch.setattr(ops.metal, "end_of_work", lambda: None)
            num_wrong += run("llama")[1] != expected
    assert num_wrong > 0


def test_a_request_alone_outlives_one_failure_but_not_each(monkeypatch):
    model, prompt = tiny_model("llama"), PROMPTS[0]
    expected = solo_greedy(model, prompt, 4)
    with monkeypatch.context() as patch:
        MetalQueue(2, 0, seed=0).install(patch)
        (done,) = Engine(model, num_blocks=16, prewarm=False).generate([prompt], max_tokens=4)
    assert done.error is None and done.tokens == expected

    def fail() -> None:
        raise RuntimeError(MESSAGE)

    monkeypatch.setattr(ops.metal, "end_of_work", lambda: fail)
    (done,) = Engine(model, num_blocks=16, prewarm=False).generate([prompt], max_tokens=4)
    assert done.error.startswith("DeviceError: ") and not done.tokens


def test_a_callers_function_that_meets_the_error_does_not_hide_it(monkeypatch):
    """The step under way may be what failed."""
    expected = solo("llama")
    device = FailingDevice(monkeypatch, 3, "eval")
    evaluate = mx.eval

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        evaluate(mx.zeros(1))
        return logits

    engine = Engine(
        tiny_model("llama"), block_size=4, num_blocks=96, prefill_chunk=64, prewarm=False
    )
    done = engine.generate(
        PROMPTS,
        [SamplingParams(max_tokens=count, logits_processors=[processor]) for count in NUM_TOKENS],
    )
    assert [each.error for each in done] == [None] * 3
    assert [each.tokens for each in done] == expected and device.told == ["eval"]


def test_who_waits_for_work_hears_of_an_error_that_was_told_before():
    runner, ends = SimpleNamespace(error=None), []
    wait = waiting(runner, lambda: ends.append(True))
    wait()
    runner.error = DeviceError(MESSAGE)
    with pytest.raises(DeviceError, match="planted"):
        wait()
    assert ends == [True]


def test_every_launch_raises_what_was_noted():
    runner = Engine(tiny_model("llama"), num_blocks=16, prewarm=False).runner
    runner.error = DeviceError(MESSAGE)
    with pytest.raises(DeviceError, match="planted"):
        runner.launch(Step(), None)

"""An engine whose device fails goes on: with fewer requests at once, with drafts, or not at all."""

import gc
from collections.abc import Callable
from weakref import ref

import numpy as np
import pytest

from mlx_paged import Engine, EngineService
from mlx_paged.engine.service import MOST_DEVICE_FAULTS
from mlx_paged.runner import pooled_model
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.scheduler.speculation import Speculation
from mlx_paged.scheduler.step import DeviceError, Step
from tests.support import TIMEOUT
from tests.support.engine.metal_queue import MESSAGE
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.simulation.injected_drafts import every_guess

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (9, 25, 14, 31, 6, 17, 8, 12)]


def failing(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[ModelRunner, Step], bool]
) -> list[int]:
    """Let the device fail in steps that `fails` names. Returns the number of spans of each step."""
    launch, spans = ModelRunner.launch, []

    def end() -> None:
        raise RuntimeError(MESSAGE)

    def launched(runner: ModelRunner, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        found = launch(runner, step, before)
        spans.append(len(step.spans))
        if fails(runner, step):
            found.end = end
        return found

    monkeypatch.setattr(ModelRunner, "launch", launched)
    return spans


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
@pytest.mark.parametrize("most", [1, 3])
def test_a_batch_that_is_too_large_for_the_memory_does_not_form_again(
    monkeypatch, model_type, lookahead, most
):
    model = tiny_model(model_type)
    expected = [solo_greedy(model, prompt, 12) for prompt in PROMPTS]
    spans = failing(monkeypatch, lambda runner, step: len(step.spans) > most)
    engine = Engine(
        model, block_size=4, num_blocks=96, prefill_chunk=64, lookahead=lookahead, prewarm=False
    )
    done = engine.generate(PROMPTS, max_tokens=12)
    assert [each.tokens for each in done] == expected
    assert engine.stats.faults <= 3 and max(spans) > most
    engine.manager.check_integrity()


def test_more_run_again_after_some_time(monkeypatch):
    failures = iter([True])
    spans = failing(monkeypatch, lambda *_: len(_[1].spans) > 3 and next(failures, False))
    engine = Engine(
        tiny_model("llama"), block_size=4, num_blocks=600, prefill_chunk=64, prewarm=False
    )
    done = engine.generate(PROMPTS[:4], max_tokens=300)
    assert engine.stats.faults == 1 and {len(each.tokens) for each in done} == {300}
    later = spans[spans.index(4) + 10 :]
    assert set(later[:50]) == {2} and max(later) == 4


def test_a_service_ends_when_the_device_is_lost(monkeypatch):
    failing(monkeypatch, lambda *_: True)
    with EngineService(Engine(tiny_model("llama"), num_blocks=96, prewarm=False)) as service:
        few = [service.submit(prompt, max_tokens=4) for prompt in PROMPTS[:2]]
        for ticket in few:
            assert ticket.result(TIMEOUT).error.startswith("DeviceError")
        assert service.is_running
        tickets = service.adopt(lambda e: [e.add_request(p, max_tokens=4) for p in PROMPTS])
        service._thread.join(TIMEOUT)
        assert not service.is_running and isinstance(service.error, DeviceError)
        assert f"in {MOST_DEVICE_FAULTS} steps" in str(service.error)
        with pytest.raises(DeviceError):
            tickets[-1].result(TIMEOUT)


def test_drafts_go_on_after_an_error_of_the_device(monkeypatch):
    model = tiny_model("llama")
    expected = [solo_greedy(model, prompt, 24) for prompt in PROMPTS]
    monkeypatch.setattr(Speculation, "_depths", every_guess)
    engine = Engine(model, block_size=4, num_blocks=96, draft_model=model, prewarm=False)
    drafts_before = []

    def fails(runner: ModelRunner, step: Step) -> bool:
        is_drafts = runner is not engine.runner and engine.stats.drafts > 20
        if not is_drafts or drafts_before:
            return False
        drafts_before.append(engine.stats.drafts)
        return True

    failing(monkeypatch, fails)
    done = engine.generate(PROMPTS, max_tokens=24)
    assert [each.tokens for each in done] == expected and engine.stats.faults == 1
    assert engine.stats.drafts > drafts_before[0] + 20


def test_a_first_step_that_fails_leaves_nothing_behind(monkeypatch):
    failures = iter([True])
    failing(monkeypatch, lambda *_: next(failures, False))
    monkeypatch.setattr(pooled_model, "prewarm", lambda *_: 1.0)
    engine = Engine(tiny_model("llama"), num_blocks=96, prewarm=False)
    with pytest.raises(DeviceError):
        engine.warm_up()
    assert engine.manager.prewarm_seconds is None and engine.manager.blocks_in_use == 0
    assert engine.manager.runner.error is None
    engine.warm_up()
    assert engine.stats.prewarm_seconds > 1
    assert engine.generate([PROMPTS[0]], max_tokens=3)[0].error is None


@pytest.mark.parametrize("own", [True, False])
def test_a_service_starts_though_the_device_fails_meanwhile(monkeypatch, own):
    """In its own warm-up, or in another engine's step."""
    failures = iter([own])
    failing(monkeypatch, lambda *_: next(failures, False))
    monkeypatch.setattr(pooled_model, "prewarm", lambda *_: 1.0)
    model = tiny_model("llama")
    engine = Engine(model, num_blocks=96, prewarm=None)
    if not own:
        engine.manager.runner.error = DeviceError(MESSAGE)
    with EngineService(engine) as service:
        done = service.submit(PROMPTS[0], max_tokens=3).result(TIMEOUT)
    assert done.tokens == solo_greedy(model, PROMPTS[0], 3)


def test_an_error_holds_nothing_of_the_engine_that_met_it(monkeypatch):
    model = tiny_model("llama")
    idle, failed = (Engine(model, num_blocks=96, prewarm=False) for _ in range(2))
    failures = iter([True])
    failing(monkeypatch, lambda *_: next(failures, False))
    assert failed.generate([PROMPTS[0]], max_tokens=3)[0].error is None
    assert isinstance(idle.manager.runner.error, DeviceError)
    pool = ref(failed.manager.pool)
    del failed
    gc.collect()
    assert pool() is None
    assert idle.generate([PROMPTS[0]], max_tokens=3)[0].error is None


def test_recovery_gives_back_what_mlx_has_cached(monkeypatch):
    cleared = []
    monkeypatch.setattr("mlx.core.clear_cache", lambda: cleared.append(True))
    failures = iter([True])
    failing(monkeypatch, lambda *_: next(failures, False))
    Engine(tiny_model("llama"), num_blocks=96, prewarm=False).generate([PROMPTS[0]], max_tokens=3)
    assert cleared == [True]

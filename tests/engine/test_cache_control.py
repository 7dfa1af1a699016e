"""Requests that say what becomes of their K/V, and calls that pin and forget."""

import pytest

from mlx_paged import Engine
from mlx_paged.kv.pins import Pinned
from mlx_paged.sampling_params import WEEK, SamplingParams
from tests.support.engine.disk_engines import GREEDY, tokens_of
from tests.support.models.tiny_models import tiny_model

PROMPT = tokens_of(1)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def engine_of(model, **options):
    return Engine(model, **{"block_size": 4, "num_blocks": 100, "prewarm": False} | options)


def found(engine, prompt=PROMPT, **options):
    (completion,) = engine.generate([[*prompt, 1]], **GREEDY, **options)
    return completion.cached_prompt_tokens


def sweep(engine, count=40):
    for seed in range(100, 100 + count):
        engine.generate([tokens_of(seed)], **GREEDY)


@pytest.mark.parametrize("retain", ["pin", 3600])
def test_a_request_keeps_its_text(model, retain):
    engine = engine_of(model)
    (kept,) = engine.generate([PROMPT], **GREEDY, retain=retain)
    assert kept.pinned == Pinned(len(PROMPT) + 5)  # the last token is in no pool
    (plain,) = engine_of(model).generate([PROMPT], **GREEDY)
    assert plain.pinned is None and plain.tokens == kept.tokens
    sweep(engine)
    assert found(engine) == len(PROMPT)


def test_a_pin_ends_by_the_engines_clock(model):
    engine = engine_of(model)
    now = [0.0]
    engine.clock = engine.scheduler.clock = lambda: now[0]
    engine.generate([PROMPT], **GREEDY, retain=10)
    now[0] = 9.0
    sweep(engine, 1)
    assert engine.scheduler.allocator.store.idle.num_pinned > 0
    now[0] = 11.0
    sweep(engine)
    assert engine.scheduler.allocator.store.idle.num_pinned == 0
    assert found(engine) == 0


def test_a_request_drops_its_text_but_not_that_of_others(model):
    engine = engine_of(model)
    engine.generate([PROMPT], **GREEDY, retain="drop")
    assert engine.scheduler.allocator.store.num_idle == 0
    engine.generate([PROMPT], **GREEDY)
    engine.generate([[*PROMPT, *tokens_of(2, 20)]], **GREEDY, retain="drop")
    assert found(engine) == len(PROMPT)


def test_a_wish_that_is_not_granted_ends_nothing(model):
    engine = engine_of(model)
    several = [tokens_of(seed) for seed in range(8)]
    done = engine.generate(several, **GREEDY, retain="pin")
    assert all(len(each.tokens) == 6 for each in done)
    assert {each.pinned.reason for each in done} == {None, "max_pinned"}
    off = engine_of(model, prefix_cache=False)
    (alone,) = off.generate([PROMPT], **GREEDY, retain="pin")
    assert alone.pinned == Pinned(0, "not_cached") and alone.tokens


def test_calls_pin_and_forget(model):
    engine = engine_of(model)
    assert engine.pin(PROMPT) == Pinned(0, "not_cached")
    engine.generate([PROMPT], **GREEDY, cache_salt="a")
    assert engine.pin(PROMPT, seconds=60) == Pinned(0, "not_cached")
    assert engine.pin(PROMPT, seconds=60, cache_salt="a") == Pinned(len(PROMPT))
    assert engine.forget(PROMPT) == engine.forget() == 0
    assert engine.forget(cache_salt="a") > len(PROMPT)
    assert found(engine, cache_salt="a") == 0


@pytest.mark.parametrize("retain", ["keep", -1, WEEK + 1, float("nan"), True, [], "Pin"])
def test_a_wrong_wish_is_refused(retain):
    with pytest.raises(ValueError, match="retain"):
        SamplingParams(retain=retain)


def test_a_pin_of_no_seconds_ends_the_pin(model):
    engine = engine_of(model)
    engine.generate([PROMPT], **GREEDY, retain="pin")
    order = engine.scheduler.allocator.store.idle
    assert order.num_pinned > 10
    engine.pin(PROMPT, seconds=0)
    assert order.num_pinned == 1, "the block with the answer"


@pytest.mark.parametrize("seconds", [-1, WEEK + 1, float("inf"), "pin", True])
def test_wrong_seconds_are_refused(model, seconds):
    with pytest.raises(ValueError, match="seconds"):
        engine_of(model).pin(PROMPT, seconds=seconds)

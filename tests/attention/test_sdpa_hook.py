"""The attention hook: scoped, transparent, and safe when a model does something else with K/V."""

import threading
from contextlib import nullcontext

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

from mlx_paged import Engine, patched_mlx_lm
from mlx_paged.attention.causal import FULL, causal
from mlx_paged.attention.sdpa_hook import (
    AttendingCache,
    CausalMask,
    KVHandle,
    RotaryHandle,
    UnknownAttentionError,
    attention_hook,
    mlx_attention,
    mlx_where,
)
from mlx_paged.runner.model_probe import UnsupportedModelError
from tests.support.models.tiny_models import tiny_model
from tests.support.ops.paged_cases import memory_limit


class FakeCache(AttendingCache):
    """A cache that notes how it was asked."""

    sees = FULL

    def __init__(self, answer: mx.array | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[float, int | None]] = []
        self.rotary_queries: list[mx.array] = []

    def attend(self, query):
        self.asked.append((query.scale, query.sees.window))
        self.rotary_queries.append(query.rotary)
        return self.answer

    def mask(self, columns, sees):
        return mx.array([[[[True, False, False]]]])


def arrays() -> tuple[mx.array, mx.array, mx.array]:
    return tuple(mx.random.normal((1, 2, n, 8), key=mx.random.key(n)) for n in (1, 3, 3))


def handles(cache: FakeCache) -> tuple[mx.array, KVHandle, KVHandle]:
    q, k, v = arrays()
    return q, KVHandle.of(k, cache=cache, role="keys"), KVHandle.of(v, cache=cache, role="values")


def attention(*args, **kwargs):
    return mx.fast.scaled_dot_product_attention(*args, **kwargs)


def test_a_pair_of_handles_is_answered_by_its_cache():
    cache = FakeCache(answer=mx.array(7.0))
    mask = CausalMask.of(mx.array(True), sees=causal(5))
    with attention_hook():
        assert attention(*handles(cache), scale=0.5, mask=mask).item() == 7.0
        assert attention(*handles(cache), scale=0.25).item() == 7.0
    assert cache.asked == [(0.5, 5), (0.25, None)]


def test_other_calls_are_mlx_own():
    q, k, v = arrays()
    with attention_hook():
        out = attention(q, k, v, scale=0.3, mask="causal")
    assert mx.array_equal(out, mlx_attention(q, k, v, scale=0.3, mask="causal"))


def test_a_foreign_mask_gets_the_gathered_arrays():
    cache = FakeCache(answer=mx.array(7.0))
    q, k, v = handles(cache)
    bias = mx.array([[[[0.0, -1.0, 2.0]]]])
    with attention_hook():
        out = attention(q, k, v, scale=0.3, mask=bias)
    assert cache.asked == []
    assert mx.allclose(out, mlx_attention(*arrays(), scale=0.3, mask=bias))


@pytest.mark.parametrize("swap", ["roles", "caches", "values only"])
def test_mismatched_handles_get_the_gathered_arrays(swap):
    cache = FakeCache(answer=mx.array(7.0))
    q, k, v = handles(cache)
    mask = cache.make_mask(1)
    if swap == "roles":
        v.role = "keys"
    elif swap == "caches":
        v.cache = FakeCache()
    else:
        v = mx.array(v)
    with attention_hook():
        out = attention(q, k, v, scale=0.3, mask=mask)
    assert cache.asked == []
    assert mx.allclose(out, mlx_attention(*arrays(), scale=0.3, mask=mask))


def test_gathered_arrays_are_never_attended_without_a_mask():
    q, k, v = handles(FakeCache(answer=None))
    with attention_hook():
        out = attention(q, k, v, scale=0.3)
    _, _, values = arrays()
    assert mx.allclose(out, values[:, :, :1])  # the cache's mask shows the first key only


LOWEST = mx.array(mx.finfo(mx.float32).min)
MASK = mx.array([[[[True, True, False]]]])


class Latents:
    """A query, the latents and rotary keys of a cache, and the same arrays without a tag."""

    def __init__(self, cache: FakeCache) -> None:
        self.q, self.q_pe, latents, rotary = (
            mx.random.normal(shape, key=mx.random.key(i))
            for i, shape in enumerate([(1, 2, 1, 8), (1, 2, 1, 4), (1, 1, 3, 8), (1, 1, 3, 4)])
        )
        self.plain = latents, self.q_pe @ rotary.swapaxes(-1, -2)
        self.latents = KVHandle.of(latents, cache=cache, role="keys")
        self.rotary = RotaryHandle.of(rotary, cache=cache, role="values")

    def scores(self) -> mx.array:
        return self.q_pe @ self.rotary.swapaxes(-1, -2)

    def assert_gathered(self, scores: mx.array, expected_scores: mx.array) -> None:
        """Attention is MLX's own, over the arrays, with these scores."""
        with attention_hook():
            out = attention(self.q, self.latents, self.latents, scale=0.3, mask=scores)
        latents, _ = self.plain
        expected = mlx_attention(self.q, latents, latents, scale=0.3, mask=expected_scores)
        assert mx.allclose(out, expected)
        assert self.latents.cache.asked == []


@pytest.mark.parametrize("masked", [False, True])
def test_rotary_scores_and_latents_of_one_cache_are_answered_by_it(masked):
    cache = FakeCache(answer=mx.array(7.0))
    case = Latents(cache)
    with attention_hook():
        scores = case.scores()
        if masked:
            scores = mx.where(CausalMask.of(MASK, sees=causal(5)), scores, LOWEST)
        assert attention(case.q, case.latents, case.latents, scale=0.3, mask=scores).item() == 7
    assert cache.asked == [(0.3, 5 if masked else None)]
    assert mx.array_equal(cache.rotary_queries[0], case.q_pe)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: mx.where(MASK, scores, LOWEST),
        lambda scores: mx.where(CausalMask.of(MASK, sees=FULL), scores, 0.5),
        lambda scores: mx.where(CausalMask.of(MASK, sees=FULL), scores, mx.zeros((1, 2, 1, 3))),
        lambda scores: scores + 1.0,
        lambda scores: mx.maximum(scores, 0.0),
        lambda scores: scores[:, ::-1],
    ],
    ids=["foreign mask", "other value", "other values", "sum", "maximum", "slice"],
)
def test_scores_that_were_changed_get_the_gathered_arrays(change):
    case = Latents(FakeCache(answer=mx.array(7.0)))
    _, scores = case.plain
    with attention_hook():
        changed = change(case.scores())
    case.assert_gathered(changed, change(scores))


def test_scores_of_another_cache_get_the_gathered_arrays():
    case, other = (Latents(FakeCache(answer=mx.array(7.0))) for _ in range(2))
    case.assert_gathered(other.scores(), other.plain[1])


def test_scores_of_other_queries_get_the_gathered_arrays():
    case = Latents(FakeCache(answer=mx.array(7.0)))
    case.q_pe = case.q_pe[:, :1]
    case.assert_gathered(case.scores(), case.plain[1][:, :1])


def test_rotary_keys_in_other_products_are_plain_arrays():
    rotary = Latents(FakeCache()).rotary
    values = mx.array(rotary)
    assert mx.allclose(rotary.swapaxes(1, 2), values.swapaxes(1, 2))
    assert mx.allclose(
        rotary.swapaxes(-1, -2) @ mx.ones((3, 2)), values.swapaxes(2, 3).sum(-1, keepdims=True)
    )
    assert not hasattr(mx.ones((3, 1)) @ rotary.swapaxes(1, 2), "queries")


def test_handles_copy_nothing():
    array = mx.random.normal((1, 2, 1000, 64))
    mx.eval(array)
    with memory_limit(array.nbytes // 2):
        handle = KVHandle.of(array, cache=FakeCache(), role="keys")
        mask = CausalMask.of(array, sees=FULL)
        mx.eval(handle, mask)
    assert mx.array_equal(handle, array)


def test_contexts_nest_and_restore_even_after_an_error():
    with attention_hook():
        with pytest.raises(RuntimeError), attention_hook():
            raise RuntimeError
        assert mx.fast.scaled_dot_product_attention is not mlx_attention
        assert mx.where is not mlx_where
    assert mx.fast.scaled_dot_product_attention is mlx_attention
    assert mx.where is mlx_where


def test_contexts_may_overlap_in_threads():
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with attention_hook():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with attention_hook():
        thread.start()
        assert entered.wait(10)
    assert mx.fast.scaled_dot_product_attention is not mlx_attention  # the other one is inside
    leave.set()
    thread.join()
    assert mx.fast.scaled_dot_product_attention is mlx_attention


UNKNOWN = {
    "a window": {"window": 4},
    "no window": {"window_size": None},
    "a softcap": {"softcap": 30.0},
    "another word": {"mask": "full"},
    "an empty word": {"mask": ""},
    "a word beside sinks": {"mask": "sliding", "sinks": mx.zeros(2)},
}


@pytest.mark.parametrize("given", UNKNOWN.values(), ids=UNKNOWN)
def test_what_the_hook_does_not_know_is_refused_as_mlx_refuses_it(given):
    """MLX's next release may know more: the cache would still answer as if nothing were given."""
    cache = FakeCache(answer=mx.array(7.0))
    with pytest.raises((TypeError, ValueError)):
        mlx_attention(*arrays(), scale=0.3, **given)
    name = "mask" if "mask" in given else next(iter(given))
    with attention_hook(), pytest.raises(UnknownAttentionError, match=name):
        attention(*handles(cache), scale=0.3, **given)
    assert cache.asked == []


@pytest.mark.parametrize("given", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("when", ["chunks", "decodes"])
def test_a_model_that_asks_for_it_is_refused_before_a_request(monkeypatch, given, when):
    def asking(q, k, v, cache, scale, mask, sinks=None):
        is_asked = (q.shape[2] == 1) == (when == "decodes")
        options = {"mask": mask} | (given if is_asked else {})
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, **options)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", asking)
    with pytest.raises(
        UnsupportedModelError, match=r"llama is refused: .* has the (argument|mask)"
    ):
        Engine(tiny_model("llama"), num_blocks=16)


@pytest.mark.parametrize("given", UNKNOWN.values(), ids=UNKNOWN)
def test_mlx_lm_refuses_it_under_the_patch_too(monkeypatch, given):
    def asking(q, k, v, cache, scale, mask, sinks=None):
        options = {"mask": mask} | given
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, **options)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", asking)
    with patched_mlx_lm(), pytest.raises(ValueError, match=r"has the (argument|mask)"):
        next(generate_step(mx.array([1, 2, 3]), tiny_model("llama")))


KNOWN = {
    "a stream": {"stream": mx.cpu},
    "no stream": {"stream": None, "sinks": None},
    "causal": {"mask": "causal"},
    "an array": {"mask": mx.full((30, 30), 0.5)},
}


@pytest.mark.parametrize("given", KNOWN.values(), ids=KNOWN)
def test_other_calls_mean_what_they_mean_in_mlx(monkeypatch, given):
    """Of a prompt of 30 tokens, which is one forward."""

    def asking(q, k, v, cache, scale, mask, sinks=None):
        options = {"mask": mask} | (given if q.shape[2] == 30 else {})
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, **options)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", asking)
    model = tiny_model("llama")
    steps = []
    for patch in (nullcontext, patched_mlx_lm):
        with patch():
            logits = model(mx.arange(30)[None], cache=mlx_lm.models.cache.make_prompt_cache(model))
            steps.append(np.array(logits, np.float64))
    np.testing.assert_allclose(steps[1], steps[0], atol=1e-5)

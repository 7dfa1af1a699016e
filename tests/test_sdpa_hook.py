"""The attention hook: scoped, transparent, and safe when a model does something else with K/V."""

import threading

import mlx.core as mx
import pytest

from mlx_paged.sdpa_hook import CausalMask, KVHandle, attention_hook, mlx_attention


class FakeCache:
    """A cache that notes how it was asked."""

    def __init__(self, answer: mx.array | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[float, int | None]] = []

    def attend(self, q, scale, window, sinks):
        self.asked.append((scale, window))
        return self.answer

    def make_mask(self, N, return_array=False, window_size=None):
        return CausalMask.of(mx.array([[[[True, False, False]]]]), None)


def arrays() -> tuple[mx.array, mx.array, mx.array]:
    return tuple(mx.random.normal((1, 2, n, 8), key=mx.random.key(n)) for n in (1, 3, 3))


def handles(cache: FakeCache) -> tuple[mx.array, KVHandle, KVHandle]:
    q, k, v = arrays()
    return q, KVHandle.of(k, cache, "keys"), KVHandle.of(v, cache, "values")


def attention(*args, **kwargs):
    return mx.fast.scaled_dot_product_attention(*args, **kwargs)


def test_a_pair_of_handles_is_answered_by_its_cache():
    cache = FakeCache(answer=mx.array(7.0))
    mask = CausalMask.of(mx.array(True), 5)
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


def test_contexts_nest_and_restore_even_after_an_error():
    with attention_hook():
        with pytest.raises(RuntimeError), attention_hook():
            raise RuntimeError
        assert mx.fast.scaled_dot_product_attention is not mlx_attention
    assert mx.fast.scaled_dot_product_attention is mlx_attention


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

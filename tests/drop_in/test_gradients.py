"""Gradients through paged caches are those through mlx-lm's own caches."""

import copy
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged import ops
from mlx_paged.drop_in.caches import make_prompt_cache
from tests.support.drop_in.prompt_cache_cases import (
    BLOCK,
    check_integrity,
    greedy,
    merged,
    stock_make_prompt_cache,
)
from tests.support.models.architectures import build
from tests.support.ops.numpy_reference import paged_attention_numpy

pytestmark = pytest.mark.usefixtures("patched")


MODELS = ("llama", "qwen2", "gemma3", "deepseek_v3")
PREFIX, *TEXTS = (
    np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate((18, 23, 9))
)
"""Longer than a window of gemma3; the second text makes the pool grow."""

paged = partial(make_prompt_cache, block_size=BLOCK)


def loss(model, tokens, cache) -> mx.array:
    """Cross-entropy of the tokens after the first one."""
    x = mx.array(tokens).reshape(-1, len(tokens) if isinstance(tokens[0], int) else len(tokens[0]))
    return nn.losses.cross_entropy(model(x[:, :-1], cache=cache), x[:, 1:]).mean()


def fill(model, cache, tokens=PREFIX) -> mx.array:
    return model(mx.array([tokens]), cache=cache)


def assert_same(found, expected) -> None:
    """Values and gradients agree within the rounding of float32 sums."""
    for (name, a), (_, b) in zip(tree_flatten(found), tree_flatten(expected), strict=True):
        largest = mx.abs(b).max().item()
        assert mx.abs(a - b).max().item() <= 2e-5 * largest, name
    assert any(mx.abs(a).max() > 0 for _, a in tree_flatten(found[1]))


def compare(model, run) -> list:
    """`run(cache)` with both kinds of cache returns the same; the caches then go on alike."""
    caches = paged(model), stock_make_prompt_cache(model)
    assert_same(*(run(cache) for cache in caches))
    assert greedy(model, [7, 1], caches[0]) == greedy(model, [7, 1], caches[1])
    check_integrity(caches[0][0].layer.pool)
    return caches[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "is_inside", [False, True], ids=["constant prefix", "prefix with gradient"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_after_a_prefix(name, is_inside):
    model = build(name)

    def run(cache):
        if not is_inside:
            fill(model, cache)

        def value(model):
            if is_inside:
                fill(model, cache)
            return loss(model, TEXTS[0], cache)

        return nn.value_and_grad(model, value)(model)

    compare(model, run)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "is_inside", [False, True], ids=["constant prefix", "prefix with gradient"]
)
@pytest.mark.parametrize("name", MODELS)
def test_texts_after_copies_of_one_prefix(name, is_inside):
    """Each copy is deleted before the next one is written: its blocks are written again."""
    model = build(name)

    def run(cache):
        if not is_inside:
            fill(model, cache)

        def value(model):
            if is_inside:
                fill(model, cache)
            losses = [loss(model, text, copy.deepcopy(cache)) for text in TEXTS]
            return nn.log_sigmoid(losses[1] - 3 * losses[0]).mean()

        return nn.value_and_grad(model, value)(model)

    compare(model, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_long_text_in_chunks(name):
    """One gradient for each chunk, as trainers with little memory compute it."""
    model = build(name)

    def run(cache):
        results = []
        for start in range(0, 66, 11):
            text = (TEXTS[0] * 3)[start : start + 11]
            results.append(nn.value_and_grad(model, lambda m, t=text: loss(m, t, cache))(model))
            mx.eval(results)
        return results

    compare(model, run)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS[:3])
@pytest.mark.parametrize("trained", ["q_proj", "v_proj"])
def test_most_parameters_are_frozen(name, trained):
    """Queries alone, or values alone, of the last layer have gradients."""
    model = build(name)
    model.freeze()
    model.layers[-1].unfreeze(keys=["weight"], recurse=True)
    for path, module in model.named_modules():
        if not path.endswith(trained):
            module.freeze(recurse=False)
    assert len(tree_flatten(model.trainable_parameters())) == 1

    def run(cache):
        fill(model, cache)
        return nn.value_and_grad(model, lambda m: loss(m, TEXTS[0], cache))(model)

    compare(model, run)


def test_rows_of_a_batch():
    model = build("llama")

    def run(cache):
        rows = [TEXTS[0][:9], TEXTS[1]]
        return nn.value_and_grad(model, lambda m: loss(m, rows, cache))(model)

    assert_same(run(paged(model)), run(stock_make_prompt_cache(model)))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_caches_are_merged_within_the_function(name):
    model = build(name)

    def run(make):
        def value(model):
            caches = [make(model) for _ in TEXTS]
            for text, cache in zip(TEXTS, caches, strict=True):
                fill(model, cache, text)
            return loss(model, [PREFIX[:9], TEXTS[1]], merged(caches))

        return nn.value_and_grad(model, value)(model)

    assert_same(run(paged), run(stock_make_prompt_cache))


@pytest.mark.slow
def test_a_compiled_function_makes_its_cache():
    model = build("llama")

    def value(model, x):
        cache = paged(model)
        model(x[:, :9], cache=cache)
        return model(x[:, 9:], cache=cache).square().mean()

    gradient = nn.value_and_grad(model, value)
    compiled = mx.compile(lambda x: gradient(model, x), model.state, model.state)
    for text in (TEXTS[0], TEXTS[0][::-1]):
        assert_same(compiled(mx.array([text])), gradient(model, mx.array([text])))


# The ops alone

TABLES, LENS = np.array([[2, 0, 5], [4, 1, 3]], np.int32), np.array([11, 6], np.int32)


def attend_only(q, k_cache, v_cache, tables=None, **options) -> mx.array:
    tables = mx.array(TABLES) if tables is None else tables
    return ops.paged_attention(q, [k_cache], [v_cache], tables, mx.array(LENS), **options)


def attention(q, k, v, k_cache, v_cache, **options):
    """Writes 2 rows, copies a block of the others, and attends."""
    slots = mx.array([2 * 4 + 1, 1 * 4 + 1], mx.int32)
    caches = ops.write_kv(k, v, k_cache, v_cache, slots)
    k_cache, v_cache = ops.copy_blocks(*caches, mx.array([[2, 3], [4, 5]], mx.int32))
    return attend_only(q, k_cache, v_cache, scale=0.4, **options)


def attention_numpy(q, k, v, k_cache, v_cache, **options) -> np.ndarray:
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    for cache, rows in ((k_cache, k), (v_cache, v)):
        cache[:, 2, 1], cache[:, 1, 1] = rows
        cache[:, 3], cache[:, 5] = cache[:, 2], cache[:, 4]
    return paged_attention_numpy(q, k_cache, v_cache, TABLES, LENS, scale=0.4, **options)


@pytest.fixture
def arrays() -> list[np.ndarray]:
    shapes = (2, 4, 3, 8), (2, 2, 8), (2, 2, 6), (2, 6, 4, 8), (2, 6, 4, 6)
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape) for shape in shapes]


def slopes(arrays, direction, **options) -> np.ndarray:
    """The directional derivative of attention in float64, by central differences."""
    moved = [[a + s * d for a, d in zip(arrays, direction, strict=True)] for s in (1e-5, -1e-5)]
    ends = [attention_numpy(*m, **options) for m in moved]
    return (ends[0] - ends[1]) / 2e-5


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("argument", range(5), ids=["q", "k", "v", "k_cache", "v_cache"])
def test_derivatives_are_those_of_finite_differences(arrays, argument, options):
    given = [mx.array(a.astype(np.float32)) for a in arrays]
    rng = np.random.default_rng(6)
    weights = rng.standard_normal((2, 4, 3, 6))

    def function(x):
        return attention(*given[:argument], x, *given[argument + 1 :], **options)

    _, (gradient,) = mx.vjp(function, [given[argument]], [mx.array(weights.astype(np.float32))])
    for _ in range(5):
        direction = [np.zeros_like(a) for a in arrays]
        direction[argument] = rng.standard_normal(arrays[argument].shape)
        expected = slopes(arrays, direction, **options)
        along = float((np.array(gradient, np.float64) * direction[argument]).sum())
        assert np.isclose(along, (expected * weights).sum(), atol=1e-4, rtol=1e-4)


def test_queries_may_have_tangents_and_pools_may_not(arrays):
    q, *rest = (mx.array(a.astype(np.float32)) for a in arrays)
    tangent = np.random.default_rng(7).standard_normal(q.shape)
    expected = slopes(arrays, [tangent, *map(np.zeros_like, arrays[1:])])
    tangent = mx.array(tangent.astype(np.float32))
    _, (found,) = mx.jvp(lambda x: attention(x, *rest), [q], [tangent])
    assert np.allclose(found, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match=r"scatter\] JVP not yet implemented"):
        mx.jvp(lambda k: attention(q, k, *rest[1:]), [rest[0]], [rest[0]])
    with pytest.raises(ValueError, match=r"jvp\] Not implemented for PoolRead"):
        mx.jvp(lambda k: attend_only(q, k, rest[3]), [rest[2]], [rest[2]])


def test_queries_may_be_mapped_and_pools_may_not(arrays):
    q, *rest = (mx.array(a.astype(np.float32)) for a in arrays)
    many = mx.stack([q, 2 * q])
    found = mx.vmap(lambda x: attention(x, *rest))(many)
    assert mx.allclose(found, mx.stack([attention(x, *rest) for x in many]), atol=1e-5)
    with pytest.raises(ValueError, match=r"vmap\] Not implemented for PoolRead"):
        mx.vmap(lambda k: attend_only(q, k, rest[3]))(mx.stack([rest[2]] * 2))


def test_what_transforms_indices_too_names_the_op_without_a_derivative(arrays):
    given = [mx.array(a.astype(np.float32)) for a in arrays]

    def value(q, tables):
        return attend_only(q, *given[3:], tables).sum()

    with pytest.raises(ValueError, match=r"vjp\] Not implemented for PagedAttention"):
        mx.compile(mx.grad(value))(given[0], mx.array(TABLES))


def test_writes_outside_of_a_transformation_stay_in_place(arrays):
    given = [mx.array(a.astype(np.float32)) for a in arrays]
    mx.eval(mx.grad(lambda q: attention(q, *given[1:]).sum())(given[0]))
    assert not ops.is_transforming()
    assert np.array_equal(given[3], arrays[3].astype(np.float32))
    mx.eval(attention(*given))
    assert not np.array_equal(given[3], arrays[3].astype(np.float32))

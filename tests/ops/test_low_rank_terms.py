"""Terms of rows, beside float64; rows without a term keep their bits."""

import io
import re
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from mlx_paged.ops.low_rank_terms import (
    RowSlots,
    add_expert_terms,
    add_low_rank_terms,
    expert_slots,
)

SLOTS, RANK, INPUTS, OUTPUTS, EXPERTS = 3, 8, 40, 24, 4
ERROR = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Of an element, over the sum of the sizes of what is added; the product in between is rounded."""


def random(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), np.float64)


def assert_terms(got, y, x, a, b, chosen, dtype):
    """`chosen`: of each row the index in a and b, or None."""
    assert got.shape == y.shape and got.dtype == dtype
    outputs, inputs = (float64(each).reshape(-1, each.shape[-1]) for each in (y, x))
    rows = zip(float64(got).reshape(outputs.shape), outputs, inputs, chosen, strict=True)
    for found, own, row, index in rows:
        if index is None:
            np.testing.assert_array_equal(found, own)
            continue
        first, second = float64(a[index]), float64(b[index])
        want = own + (first @ row) @ second
        sizes = np.abs(own) + (np.abs(first) @ np.abs(row)) @ np.abs(second)
        assert np.all(np.abs(found - want) <= ERROR[dtype] * sizes)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_terms_of_rows_are_those_of_float64(dtype):
    mx.random.seed(1)
    y, x = random(2, 3, OUTPUTS, dtype=dtype), random(2, 3, INPUTS, dtype=dtype)
    a = random(SLOTS, RANK, INPUTS, dtype=dtype)
    b = random(SLOTS, RANK, OUTPUTS, dtype=dtype)
    slots = [2, -1, 0, 2, 1, -1]
    got = add_low_rank_terms(y, x, a, b, RowSlots(mx.array(slots, mx.int32)))
    assert_terms(got, y, x, a, b, [None if s < 0 else s for s in slots], dtype)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_terms_of_experts_are_those_of_float64(dtype):
    mx.random.seed(2)
    y, x = random(3, 2, 1, OUTPUTS, dtype=dtype), random(3, 2, 1, INPUTS, dtype=dtype)
    a = random(SLOTS, EXPERTS, RANK, INPUTS, dtype=dtype)
    b = random(SLOTS, EXPERTS, RANK, OUTPUTS, dtype=dtype)
    slots, experts = [[2, 2], [-1, -1], [0, 0]], [[3, 0], [1, 2], [2, 3]]
    given = mx.array(slots, mx.int32), mx.array(experts).astype(mx.uint32)
    got = add_expert_terms(y, x, a, b, expert_slots(*given, EXPERTS))
    pairs = zip(np.ravel(slots).tolist(), np.ravel(experts).tolist(), strict=True)
    assert_terms(got, y, x, a, b, [None if s < 0 else (s, e) for s, e in pairs], dtype)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The products that a GPU computes, on any device."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))


def test_products_of_a_gpu_are_those_of_float64(as_on_a_gpu):
    test_terms_of_rows_are_those_of_float64(mx.float32)
    test_terms_of_experts_are_those_of_float64(mx.float32)


def test_layers_on_a_gpu_share_what_is_known_of_the_rows(as_on_a_gpu):
    """Each layer adds two products, a sum and a choice, and derives nothing from the slots."""
    x, y = random(4, INPUTS), random(4, OUTPUTS)
    a, b = random(SLOTS, RANK, INPUTS), random(SLOTS, RANK, OUTPUTS)
    rows = RowSlots.known(np.array([2, -1, 0, 1], np.int32))
    mx.eval(x, y, a, b)
    layers = [add_low_rank_terms(y, x, a, b, rows) for _ in range(2)]
    text = io.StringIO()
    mx.export_to_dot(text, *layers)
    nodes = Counter(re.findall(r'label ="(\w+)"', text.getvalue()))
    views = {"Reshape", "Transpose", "ExpandDims", "Squeeze", "Broadcast", "Flatten", "Unflatten"}
    computed = {name: count for name, count in nodes.items() if name not in views}
    assert computed == {"GatherMM": 4, "Add": 2, "Select": 2}
    assert_terms(layers[0], y, x, a, b, [2, None, 0, 1], mx.float32)


needs_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the op runs on CPUs only")


@needs_cpu
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("rank", [1, 16, 37])
def test_terms_of_any_layout_are_those_of_float64(dtype, rank):
    """Widths that fill no register, several rows of y for one of x, strides, many rows."""
    mx.random.seed(rank)
    width, depth, count = 83, 133, 70
    y = random(width, count, dtype=dtype).T.reshape(35, 2, width)
    x = random(35, 2 * depth, dtype=dtype)[:, ::2]
    a = random(SLOTS, rank, depth, dtype=dtype)
    b = random(SLOTS, width, rank, dtype=dtype).swapaxes(1, 2)
    indices = mx.random.randint(-1, SLOTS + 1, (count,)).astype(mx.int32)  # SLOTS: no factors
    chosen = [i if 0 <= i < SLOTS else None for i in indices.tolist()]
    got = _ext.layers.low_rank_terms(y, x, a, b, indices)
    assert_terms(got, y, mx.repeat(x, 2, axis=0), a, b, chosen, dtype)


@needs_cpu
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_row_has_the_same_bits_among_any_rows(dtype):
    mx.random.seed(3)
    y, x = random(40, OUTPUTS, dtype=dtype), random(40, 600, dtype=dtype)
    a, b = random(2, 16, 600, dtype=dtype), random(2, 16, OUTPUTS, dtype=dtype)
    slots = mx.array(np.arange(40) % 3 - 1, mx.int32)
    together = _ext.layers.low_rank_terms(y, x, a, b, slots)
    for r in range(40):
        own = slice(r, r + 1)
        alone = _ext.layers.low_rank_terms(y[own], x[own], a, b, slots[own])
        assert float64(alone).tolist() == float64(together[own]).tolist(), r


@needs_cpu
def test_terms_are_added_where_the_output_is_unless_others_read_it():
    x, a, b = random(2, INPUTS), random(1, RANK, INPUTS), random(1, RANK, OUTPUTS)
    slots, kept = mx.array([0, -1], mx.int32), random(2, OUTPUTS)
    mx.eval(x, a, b, slots, kept)
    before = float64(kept)
    got = _ext.layers.low_rank_terms(kept, x, a, b, slots)
    other = _ext.layers.low_rank_terms(kept * 1, x, a, b, slots)
    mx.eval(got, other)
    np.testing.assert_array_equal(float64(kept), before)
    np.testing.assert_array_equal(float64(got), float64(other))


@needs_cpu
@pytest.mark.parametrize(
    "wrong", [{"x": (2, 3)}, {"a": (1, 9, 4)}, {"b": (2, 2, 3)}, {"i": (3,)}, {"a": (1, 0, 4)}]
)
def test_shapes_that_do_not_fit_are_refused(wrong):
    shapes = {"y": (2, 3), "x": (2, 4), "a": (1, 2, 4), "b": (1, 2, 3), "i": (2,)} | wrong
    *arrays, indices = (mx.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match="expected"):
        _ext.layers.low_rank_terms(*arrays, indices.astype(mx.int32))


@needs_cpu
def test_terms_have_derivatives():
    mx.random.seed(4)
    y, x, a, b = random(2, 3), random(2, 4), random(1, 2, 4), random(1, 2, 3)
    slots = mx.array([0, -1], mx.int32)

    def plain(y, x, a, b):
        return mx.concatenate([y[:1] + x[:1] @ a[0].T @ b[0], y[1:]]).square().sum()

    def ours(*arrays):
        return _ext.layers.low_rank_terms(*arrays, slots).square().sum()

    for got, want in zip(
        mx.grad(ours, (0, 1, 2, 3))(y, x, a, b), mx.grad(plain, (0, 1, 2, 3))(y, x, a, b),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(float64(got), float64(want), rtol=1e-4, atol=1e-5)


@needs_cpu
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_no_factor_is_converted(dtype):
    y, x = random(2, OUTPUTS, dtype=dtype), random(2, INPUTS, dtype=dtype)
    a, b = random(1, RANK, INPUTS, dtype=dtype), random(1, RANK, OUTPUTS, dtype=dtype)
    slots = mx.array([0, -1], mx.int32)
    mx.eval(y, x, a, b, slots)
    text = io.StringIO()
    mx.export_to_dot(text, add_low_rank_terms(y, x, a, b, RowSlots(slots)))
    assert "AsType" not in text.getvalue() and text.getvalue().count("PagedLowRank") == 1


@needs_cpu
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("kind", ["plain", "bias", "quantized"])
@pytest.mark.parametrize("count", [3, 150])
def test_a_linear_layer_and_its_terms_are_one_node(dtype, kind, count):
    mx.random.seed(5)
    depth, width = 64, 48
    x, weight, bias = random(count, depth), random(width, depth), random(width)
    x, weight, bias = (each.astype(dtype) for each in (x, weight, bias))
    a, b = random(SLOTS, RANK, depth, dtype=dtype), random(SLOTS, RANK, width, dtype=dtype)
    slots = mx.array(np.arange(count) % (SLOTS + 1) - 1, mx.int32)
    sizes = {"group_size": 32, "bits": 4}

    def layer(x):
        if kind == "quantized":
            parts = mx.quantize(weight, **sizes)
            return _ext.layers.quantized_linear(x, *parts, **sizes)
        return _ext.layers.linear(x, weight, bias if kind == "bias" else None)

    mx.eval(x, weight, bias, a, b, slots)
    got, text = _ext.layers.low_rank_terms(layer(x), x, a, b, slots), io.StringIO()
    mx.export_to_dot(text, got)
    names = ("PagedAdaptedLinear", "PagedLinear", "PagedLowRank")
    assert [text.getvalue().count(name) for name in names] == [1, 0, 0]
    y = layer(x)
    mx.eval(y, got)
    chosen = [None if s < 0 else s for s in slots.tolist()]
    assert_terms(got, y, x, a, b, chosen, dtype)
    for r in range(4):
        own = slice(r, r + 1)
        alone = _ext.layers.low_rank_terms(layer(x[own]), x[own], a, b, slots[own])
        assert float64(alone).tolist() == float64(got[own]).tolist(), r


@needs_cpu
def test_a_linear_layer_that_others_read_keeps_its_output():
    x, weight = random(2, INPUTS), random(OUTPUTS, INPUTS)
    a, b, slots = random(1, RANK, INPUTS), random(1, RANK, OUTPUTS), mx.array([0, -1], mx.int32)
    y = _ext.layers.linear(x, weight)
    got = _ext.layers.low_rank_terms(y, x, a, b, slots)
    other = _ext.layers.low_rank_terms(y, x * 1, a, b, slots)
    mx.eval(y, got, other)
    np.testing.assert_allclose(float64(y), float64(x) @ float64(weight).T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(float64(got), float64(other))


@needs_cpu
def test_a_linear_layer_with_terms_has_derivatives():
    mx.random.seed(6)
    arrays = random(2, 4), random(3, 4), random(1, 2, 4), random(1, 2, 3)
    slots = mx.array([0, -1], mx.int32)

    def plain(x, weight, a, b):
        y = x @ weight.T
        return mx.concatenate([y[:1] + x[:1] @ a[0].T @ b[0], y[1:]]).square().sum()

    def ours(x, weight, a, b):
        y = _ext.layers.linear(x, weight)
        return _ext.layers.low_rank_terms(y, x, a, b, slots).square().sum()

    every = (0, 1, 2, 3)
    for got, want in zip(
        mx.grad(ours, every)(*arrays), mx.grad(plain, every)(*arrays), strict=True
    ):
        np.testing.assert_allclose(float64(got), float64(want), rtol=1e-4, atol=1e-4)

"""Terms of rows, beside float64; rows without a term keep their bits."""

import io

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.ops.low_rank_terms import add_expert_terms, add_low_rank_terms

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
        want = own + second @ (first @ row)
        sizes = np.abs(own) + np.abs(second) @ (np.abs(first) @ np.abs(row))
        assert np.all(np.abs(found - want) <= ERROR[dtype] * sizes)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_terms_of_rows_are_those_of_float64(dtype):
    mx.random.seed(1)
    y, x = random(2, 3, OUTPUTS, dtype=dtype), random(2, 3, INPUTS, dtype=dtype)
    a = random(SLOTS, RANK, INPUTS, dtype=dtype)
    b = random(SLOTS, OUTPUTS, RANK, dtype=dtype)
    slots = [2, -1, 0, 2, 1, -1]
    got = add_low_rank_terms(y, x, a, b, mx.array(slots, mx.int32))
    assert_terms(got, y, x, a, b, [None if s < 0 else s for s in slots], dtype)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_terms_of_experts_are_those_of_float64(dtype):
    mx.random.seed(2)
    y, x = random(3, 2, 1, OUTPUTS, dtype=dtype), random(3, 2, 1, INPUTS, dtype=dtype)
    a = random(SLOTS, EXPERTS, RANK, INPUTS, dtype=dtype)
    b = random(SLOTS, EXPERTS, OUTPUTS, RANK, dtype=dtype)
    slots, experts = [[2, 2], [-1, -1], [0, 0]], [[3, 0], [1, 2], [2, 3]]
    got = add_expert_terms(
        y, x, a, b, mx.array(slots, mx.int32), mx.array(experts).astype(mx.uint32)
    )
    pairs = zip(np.ravel(slots).tolist(), np.ravel(experts).tolist(), strict=True)
    assert_terms(got, y, x, a, b, [None if s < 0 else (s, e) for s, e in pairs], dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_no_factor_is_converted(dtype):
    if mx.default_device() != mx.cpu:
        pytest.skip("a GPU gathers products of any type")
    y, x = random(2, OUTPUTS, dtype=dtype), random(2, INPUTS, dtype=dtype)
    a, b = random(1, RANK, INPUTS, dtype=dtype), random(1, OUTPUTS, RANK, dtype=dtype)
    slots = mx.array([0, -1], mx.int32)
    mx.eval(y, x, a, b, slots)
    text = io.StringIO()
    mx.export_to_dot(text, add_low_rank_terms(y, x, a, b, slots))
    assert "AsType" not in text.getvalue() and text.getvalue().count("PagedSwitchLinear") == 2

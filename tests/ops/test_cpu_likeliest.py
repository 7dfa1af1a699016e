"""The ops that stand for the choice of a row's likeliest token on CPUs."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from tests.support.ops.layer_cases import (
    BUILDS,
    DTYPES,
    WIDTHS,
    assert_build_passes,
    assert_close,
    float64,
    laid_out,
    log_sum_exp,
    random,
)

pytestmark = pytest.mark.usefixtures("on_cpu")


layers = _ext.layers


@pytest.mark.parametrize("layout", ["dense", "inner", "strided", "transposed"])
@pytest.mark.parametrize("width", (*WIDTHS, 70_001))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLogSumExp:
    @pytest.mark.sampled(4)
    def test_against_float64(self, dtype, width, layout):
        rows = 6 if width < 1000 else 2
        x = laid_out(random(3, rows, width, dtype=dtype, scale=5.0), layout)
        top = float64(x).max(-1, keepdims=True)
        want = top + np.log(np.exp(float64(x) - top).sum(-1, keepdims=True))
        assert_close(log_sum_exp(x), want, dtype, scale=2.0)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_log_sum_exp_far_from_zero(width, offset):
    x = random(3, width) + offset
    want = offset + np.log(np.exp(float64(x) - offset).sum(-1, keepdims=True))
    assert_close(log_sum_exp(x), want, mx.float32)


@pytest.mark.parametrize("repeats", [1, 13])
def test_log_sum_exp_of_what_is_not_finite(repeats):
    values = [1.0, float("inf"), -float("inf"), float("nan")]
    x = mx.repeat(mx.array(list(itertools.product(values, repeat=3))), repeats, axis=-1)
    with np.errstate(invalid="ignore"):
        want = np.logaddexp.reduce(float64(x), axis=-1, keepdims=True)
    np.testing.assert_allclose(np.array(log_sum_exp(x)), want, rtol=1e-6)


def test_log_sum_exp_of_millions_keeps_its_digits():
    """Of equal addends, because each rounding of a running sum of those errs to the same side."""
    x = mx.full((1 << 22,), -2.7)
    x[0] = 0.0
    want = np.log(np.exp(float64(x)).sum(keepdims=True))
    assert_close(log_sum_exp(x), want, mx.float32)


@pytest.mark.parametrize("layout", ["dense", "inner", "strided", "transposed"])
@pytest.mark.parametrize("width", (*WIDTHS, 70_001))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestMask:
    @pytest.mark.sampled(4)
    def test_what_is_forbidden_is_minus_infinity(self, dtype, width, layout):
        x = laid_out(random(3, width, dtype=dtype), layout)
        bits, words = allowed(width)
        want = np.where(bits, float64(x), -np.inf)
        got = layers.mask(x, words)
        assert got.dtype == dtype
        np.testing.assert_array_equal(float64(got), want)

    @pytest.mark.sampled(4)
    def test_log_sum_exp_of_what_is_allowed(self, dtype, width, layout):
        x = random(3, width, dtype=dtype, scale=5.0)
        x[2, :40] = float("nan")  # forbidden
        x = laid_out(x, layout)
        bits, words = allowed(width)
        with np.errstate(divide="ignore"):  # the third row may allow nothing
            want = np.log(np.where(bits, np.exp(float64(x)), 0).sum(-1, keepdims=True))
        got = log_sum_exp(x, words)
        assert_close(got, want, dtype, scale=2.0)
        assert mx.array_equal(got, log_sum_exp(layers.mask(x, words)))

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("masked", [False, True])
    def test_the_likeliest_is_the_first_of_the_largest(self, dtype, width, layout, masked):
        """Of differences that are rounded, so that many of them are equal."""
        offsets = mx.array([[0.0], [-0.4], [0.2]])
        x = laid_out((random(3, width, scale=1e-6) + offsets).astype(dtype), layout)
        bits, words = allowed(width)
        words = words if masked else None
        kept = mx.where(mx.array(bits), x, -mx.inf) if masked else x
        got = layers.likeliest(x, words)
        assert got.dtype == mx.float32 and got.shape == (3, 2)
        want = mx.argmax(kept - log_sum_exp(x, words), axis=-1)
        assert got[:, 1].tolist() == want.tolist()
        if width > 1000 and dtype != mx.bfloat16:
            assert want.tolist() != mx.argmax(kept, axis=-1).tolist()


def allowed(width: int) -> tuple[np.ndarray, mx.array]:
    """Bits of three rows, and as words: random ones, all, and none of the first 40."""
    bits = np.random.default_rng(width).integers(0, 2, (3, -(-width // 32) * 32))
    bits[1], bits[2, :40] = 1, 0  # bits behind the width mean nothing
    words = np.packbits(bits.astype(np.uint8), axis=1, bitorder="little").view(np.uint32)
    return bits[:, :width].astype(bool), mx.array(words)


@pytest.mark.parametrize("values", [[float("nan")], [-float("inf")], [1, float("inf")], [2, 5, 5]])
@pytest.mark.parametrize("at", [0, 61, 2000])
def test_the_likeliest_of_what_is_not_finite(values, at):
    x = mx.zeros((1, 3000)) - mx.inf
    x[0, at : at + len(values)] = mx.array(values)
    want = mx.argmax(x - log_sum_exp(x), axis=-1)
    assert layers.likeliest(x)[:, 1].tolist() == want.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_every_build_passes_these_tests(build, pytestconfig):
    assert_build_passes(build, __file__, "not every_build", pytestconfig.getoption("--cases"))

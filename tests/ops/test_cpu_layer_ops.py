"""The ops that stand for a model's norms, rotary embeddings and activations on CPUs."""

import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu

from mlx_paged import _ext
from mlx_paged.ops.cpu_layers import rope_frequencies
from tests.support.ops.layer_cases import (
    BUILDS,
    DTYPES,
    HALVES,
    WIDTHS,
    assert_build_passes,
    assert_close,
    float64,
    laid_out,
    log_sum_exp,
    random,
)
from tests.support.ops.numpy_quantization import hadamard

pytestmark = pytest.mark.usefixtures("on_cpu")


layers = _ext.layers

BASE = 10000.0


def assert_conditioned(got: mx.array, want: np.ndarray, argument: np.ndarray) -> None:
    """Within a rounding of float32 and what four of an exponential's argument make of it; zero
    below the smallest normal numbers."""
    bound = np.abs(want) * (1 + np.abs(argument)) * 2**-22 + 1e-36
    assert (np.abs(float64(got) - want) <= bound).all()


@pytest.mark.parametrize("layout", ["dense", "inner", "strided", "transposed"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestRmsNorm:
    def test_against_float64(self, dtype, width, layout):
        x = laid_out(random(3, 5, width, dtype=dtype, scale=3.0), layout)
        weight = random(width, dtype=dtype, seed=1)
        wide = float64(x)
        normal = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5)
        assert_close(layers.rms_norm(x, None, 1e-5), normal, dtype)
        weighted = layers.rms_norm(x, laid_out(weight[None], "strided")[0], 1e-5)
        rounded = float64(mx.array(normal).astype(dtype))
        assert_close(weighted, rounded * float64(weight), dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_norm_in_half_precision_is_rounded_where_mlx_rounds(dtype, width):
    """Bit for bit, unless a sum of squares in another order tips a rounding."""
    x, weight = random(30, 50, width, dtype=dtype, scale=3.0), random(width, dtype=dtype, seed=1)
    same = layers.rms_norm(x, weight, 1e-5) == mx.fast.rms_norm(x, weight, 1e-5)
    assert float(same.mean()) > 0.999


@pytest.mark.parametrize("exponent", [0, -24, 15], ids=["normal", "subnormal", "overflowing"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_are_rounded_to_even_with_subnormals_and_infinities(dtype, exponent):
    """Norms of these are themselves, so that products have few more bits than the dtype: ties."""
    x = mx.array(np.tile([1.75, -1.75, 0.75, 0.75, -0.75, 0.25, 0.25, -0.25], 512), dtype)
    weight = mx.array(np.random.default_rng(0).uniform(0.5, 2, x.size) * 2.0**exponent, dtype)
    want = (x.astype(mx.float32) * weight.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(layers.rms_norm(x, weight, 0.0), want)
    assert bool(mx.isinf(want).any()) == (dtype == mx.float16 and exponent == 15)


@pytest.mark.parametrize("exponent", [0, -19, 11], ids=["normal", "subnormal", "overflowing"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_of_more_bits_than_a_dtype_s_are_rounded_once(dtype, exponent):
    """Silu of these is themselves in float32, and so are products of two elements."""
    values = np.random.default_rng(0)
    x = mx.array(values.uniform(20, 40, 4096), dtype)
    factor = mx.array(values.uniform(0.5, 2, x.size) * 2.0**exponent, dtype)
    want = (x.astype(mx.float32) * factor.astype(mx.float32)).astype(dtype)
    assert mx.array_equal(layers.silu(x, factor), want)


def test_a_norm_of_many_rows_uses_every_row():
    x = random(3000, 64)  # several threads' worth
    got = layers.rms_norm(x, None, 0.0)
    assert_close(got, float64(x) / np.sqrt(np.mean(float64(x) ** 2, -1, keepdims=True)), mx.float32)


def rotated(x: mx.array, angles: np.ndarray, traditional: bool) -> np.ndarray:
    """`angles` [B, 1, L, P] in radians, in float64."""
    wide, pairs = float64(x), angles.shape[-1]
    halves = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    first, second = halves if traditional else (slice(0, pairs), slice(pairs, 2 * pairs))
    a, b, out = wide[..., first], wide[..., second], wide.copy()
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return out


OFFSETS = [5, mx.array(7), mx.array([0, 3, 70000, 11]), mx.array([9, 1, 2, 3], mx.int64)]


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 40, 2])
@pytest.mark.parametrize("offset", OFFSETS, ids=["int", "scalar", "int32", "int64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestRope:
    @pytest.mark.sampled(2)
    def test_against_float64(self, dtype, offset, dims, traditional):
        x = random(4, 3, 5, 64, dtype=dtype)
        frequencies = rope_frequencies(dims, BASE)
        starts = np.broadcast_to(np.array(offset).astype(np.float32), 4)
        positions = (np.arange(5, dtype=np.float32) + starts[:, None]) * np.float32(0.5)
        angles = positions[:, None, :, None] * np.array(frequencies)  # in float32, as defined
        got = layers.rope(x, offset, frequencies, scale=0.5, traditional=traditional)
        assert_close(got, rotated(x, angles.astype(np.float64), traditional), dtype, scale=8.0)

    def test_against_mlx(self, dtype, offset, dims, traditional):
        """In half precision bit for bit."""
        x = random(4, 5, 3, 64, dtype=dtype).swapaxes(1, 2)
        options = {"traditional": traditional, "scale": 0.5}
        got = layers.rope(x, offset, rope_frequencies(dims, BASE), **options)
        want = mx.fast.rope(x, dims, base=BASE, offset=offset, **options)
        if dtype in HALVES:
            assert mx.array_equal(got, want)
        else:
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=1e-6)


def test_three_axes_are_one_head():
    x, frequencies = random(2, 5, 16), rope_frequencies(16, BASE)
    got = layers.rope(x, mx.array([3, 4]), frequencies)
    assert mx.array_equal(got[:, None], layers.rope(x[:, None], mx.array([3, 4]), frequencies))


def test_positions_of_millions_keep_their_angle():
    x = random(1, 1, 4, 64)
    for offset in (1_000_000, 16_000_000):
        got = layers.rope(x, offset, rope_frequencies(64, 5e5))
        want = mx.fast.rope(x, 64, traditional=False, base=5e5, scale=1.0, offset=offset)
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=1e-6)


ACTIVATIONS = {  # op, MLX's, and u where both are x / (1 + e^-u)
    "silu": (layers.silu, nn.silu, lambda x: x),
    "gelu_approx": (
        layers.gelu_approx,
        nn.gelu_approx,
        lambda x: 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3),
    ),
}


LAYOUTS = [("dense", "inner"), ("strided", "transposed")]


@pytest.mark.parametrize("name", ACTIVATIONS)
class TestActivations:
    @pytest.mark.parametrize("layouts", LAYOUTS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_against_float64(self, name, width, layouts):
        op, _, argument = ACTIVATIONS[name]
        x = laid_out(random(3, 5, width, scale=4.0), layouts[0])
        factor = laid_out(random(3, 5, width, seed=1), layouts[1])
        u = argument(float64(x))
        active = float64(x) / (1 + np.exp(-u))
        assert_conditioned(op(x), active, u)
        assert_conditioned(op(x, factor), active * float64(factor), u)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_in_half_precision_every_step_is_rounded_as_by_mlx(self, name, dtype):
        """Bit for bit, but for e^6.84375, a tie of bfloat16 in float32's last bits."""
        op, mlx_op, _ = ACTIVATIONS[name]
        x = mx.arange(2**16).astype(mx.uint16).view(dtype)
        got, want = float64(op(x)), float64(mlx_op(x))
        assert np.sum((got != want) & ~(np.isnan(got) & np.isnan(want))) <= 1

    @pytest.mark.parametrize("layouts", LAYOUTS)
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    def test_a_factor_is_multiplied_after_rounding(self, name, dtype, width, layouts):
        op, _, _ = ACTIVATIONS[name]
        x, factor = random(3, 5, width, dtype=dtype), random(3, 5, width, dtype=dtype, seed=1)
        got = op(laid_out(x, layouts[0]), laid_out(factor, layouts[1]))
        assert got.dtype == dtype
        assert mx.array_equal(got, op(x) * factor)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_far_out(self, name, dtype):
        op, mlx_op, _ = ACTIVATIONS[name]
        far = [0.0, -0.0, 1e4, -1e4, 88.0, -88.0, -200.0, float("inf"), float("nan")]
        x = mx.array(far, dtype)
        got, want = op(x, mx.full(x.shape, 0.5, dtype)), 0.5 * mlx_op(x)
        np.testing.assert_allclose(float64(got), float64(want), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("layout", ["dense", "inner", "strided", "transposed"])
@pytest.mark.parametrize("width", [1, 2, 7, 16, 64, 80, 96, 128, 192, 576, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestHadamard:
    def test_against_float64(self, dtype, width, layout):
        """Errors are those of sums of the whole row: not of each element's size."""
        x = laid_out(random(3, 5, width, dtype=dtype, scale=3.0), layout)
        got, want = float64(layers.hadamard(x)), hadamard(float64(x))
        step = {mx.float32: 2**-21, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]
        assert np.abs(got - want).max() <= step * np.abs(want).max()

    def test_twice_is_nothing(self, dtype, width, layout):
        x = laid_out(random(3, 5, width, dtype=dtype), layout)
        again = float64(layers.hadamard(layers.hadamard(x)))
        step = {mx.float32: 2**-20, mx.float16: 2**-8, mx.bfloat16: 2**-5}[dtype]
        assert np.abs(again - float64(x)).max() <= step * np.abs(float64(x)).max()


def test_an_array_that_is_still_needed_is_not_written_over():
    x, factor = random(64, 64), random(64, 64, seed=1)
    kept, product = mx.array(x), x * factor
    out = layers.silu(product, factor)  # nobody else needs the product
    mx.eval(out)
    assert mx.array_equal(x, kept)
    again = layers.silu(x, factor)
    assert_close(again, float64(swiglu(x, factor)), mx.float32)
    assert mx.array_equal(x, kept)
    words = mx.full((64, 2), 0x0000FFFF, mx.uint32)
    want = mx.where(mx.arange(64) % 32 < 16, 2 * x, -mx.inf)
    assert mx.array_equal(layers.mask(2 * x, words), want)  # nobody else needs the product
    masked = layers.mask(x, mx.zeros((64, 2), mx.uint32))
    assert mx.array_equal(masked, mx.full((64, 64), -mx.inf)) and mx.array_equal(x, kept)


MISTAKES = [
    (
        lambda: layers.rms_norm(mx.zeros(4, mx.int32), None, 1e-5),
        "x of shape (4,) has dtype int32: expected fl",
    ),
    (lambda: layers.rms_norm(mx.zeros((2, 4)), mx.zeros(3), 1e-5), "weight has 3 elements in 1"),
    (
        lambda: layers.rms_norm(mx.zeros((2, 4)), mx.zeros((1, 4)), 0.1),
        "weight has 4 elements in 2",
    ),
    (
        lambda: layers.rms_norm(mx.zeros(4), mx.zeros(4, mx.float16), 0.1),
        "weight has dtype float16",
    ),
    (lambda: layers.rms_norm(mx.array(1.0), None, 1e-5), "x is a scalar: expected at least one"),
    (lambda: layers.rope(mx.zeros((2, 4)), 0, mx.ones(2)), "x has 2 axes: expected 3 or 4"),
    (lambda: layers.rope(mx.zeros((1, 2, 4)), 0, mx.ones(3)), "frequencies has 3 elements: expect"),
    (lambda: layers.rope(mx.zeros((1, 2, 4)), 0, mx.ones(2, mx.float16)), "frequencies has dtype"),
    (lambda: layers.rope(mx.zeros((1, 2, 4)), mx.ones(1), mx.ones(2)), "offset has dtype float32"),
    (
        lambda: layers.rope(mx.zeros((3, 2, 4)), mx.array([1, 2]), mx.ones(2)),
        "offset has 2 element",
    ),
    (
        lambda: log_sum_exp(mx.zeros(4, mx.int32)),
        "x of shape (4,) has dtype int32: expected float32",
    ),
    (lambda: layers.mask(mx.zeros(4), mx.zeros(1, mx.uint32)), "x has 1 axes: expected 2"),
    (
        lambda: layers.mask(mx.zeros((2, 33)), mx.zeros((2, 1), mx.uint32)),
        "allowed has shape (2, 1) and dtype uint32: expected (2, 2) of uint32",
    ),
    (lambda: layers.mask(mx.zeros((1, 4)), mx.zeros((1, 1), mx.int32)), "and dtype int32: expect"),
    (
        lambda: layers.likeliest(mx.zeros((3, 2, 8)), mx.zeros((3, 1), mx.uint32)),
        "[likeliest] x has 3 axes: expected 2",
    ),
    (lambda: layers.likeliest(mx.zeros((2, 0))), "x has shape (2, 0): expected 1 to 2^24 elements"),
    (lambda: layers.likeliest(mx.zeros(2**24 + 1, mx.bfloat16)), "x has shape (16777217,): exp"),
    (lambda: layers.silu(mx.zeros((2, 4)), mx.zeros(4)), "factor has 4 elements of float32: expec"),
    (lambda: layers.silu(mx.zeros(4), mx.zeros(4, mx.float16)), "factor has 4 elements of float16"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (1,)])
def test_empty_and_tiny_arrays(shape):
    x = mx.ones(shape)
    for out in (layers.rms_norm(x, None, 1e-5), layers.silu(x), layers.gelu_approx(x, x)):
        mx.eval(out)
        assert out.shape == shape
    assert layers.silu(mx.array(1.0)).item() == pytest.approx(1 / (1 + np.exp(-1)))
    assert layers.rope(mx.zeros((0, 2, 8)), 0, mx.ones(2)).shape == (0, 2, 8)


@pytest.mark.heavy
@pytest.mark.parametrize("build", BUILDS)
def test_every_build_passes_these_tests(build, pytestconfig):
    assert_build_passes(
        build,
        __file__,
        "TestRmsNorm or TestRope or TestActivations or rounded or millions",
        pytestconfig.getoption("--cases"),
    )

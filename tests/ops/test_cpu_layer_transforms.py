"""Derivatives and vmap of the ops of a model's layers, which are those of MLX's own: what compile
traced while a model was served may be differentiated later."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu

from mlx_paged import _ext
from mlx_paged.ops.cpu_layers import rope_frequencies
from tests.support.ops.numpy_quantization import hadamard

pytestmark = pytest.mark.usefixtures("on_cpu")


layers = _ext.layers


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def assert_close(got: mx.array, want: mx.array) -> None:
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-5)


def rope(x: mx.array) -> mx.array:
    frequencies = rope_frequencies(6, 1e4)
    return layers.rope(x, mx.array([3, 9]), frequencies, scale=2.0, traditional=True)


def mlx_rope(x: mx.array) -> mx.array:
    offset = mx.array([3, 9])
    return mx.fast.rope(x, 6, traditional=True, base=1e4, scale=2.0, offset=offset)


MASK = mx.array([[*[0, 0, 0, 0, 1, 1, 1, 1] * 4, 1, 0, 1, *[0] * 35], [1] * 3 + [0] * 61 + [1] * 6])


def likeliest(x: mx.array) -> mx.array:
    total = mx.logsumexp(x.astype(mx.float32), -1, keepdims=True)
    index = mx.argmax(x - total.astype(x.dtype), -1, keepdims=True).astype(mx.float32)
    return mx.concatenate([total, index], -1)


# op, MLX's, and the shapes of the arguments
CASES = {
    "norm": (
        lambda x, w: layers.rms_norm(x, w, 0.1),
        lambda x, w: mx.fast.rms_norm(x, w, 0.1),
        [(2, 3, 4, 8), (8,)],
    ),
    "rope": (rope, mlx_rope, [(2, 3, 4, 8)]),
    "linear": (layers.linear, lambda x, w, b: x @ w.T + b, [(2, 3, 8), (4, 8), (4,)]),
    "log_sum_exp": (layers.likeliest, likeliest, [(2, 3, 8)]),
    "mask": (
        lambda x: layers.mask(x, mx.array([[0xF0F0F0F0, 5, 0], [7, 0, 63]], mx.uint32)),
        lambda x: mx.where(MASK, x, -mx.inf),
        [(2, 70)],
    ),
    "masked_sum": (
        lambda x: layers.likeliest(x, mx.array([[0xF0F0F0F0, 5, 0], [7, 0, 63]], mx.uint32)),
        lambda x: likeliest(mx.where(MASK, x, -mx.inf)),
        [(2, 70)],
    ),
    "hadamard": (layers.hadamard, lambda x: x @ mx.array(hadamard(np.eye(12))), [(2, 3, 12)]),
    "silu": (layers.silu, nn.silu, [(2, 3, 8)]),
    "swiglu": (layers.silu, swiglu, [(2, 3, 8), (2, 3, 8)]),
    "gelu": (layers.gelu_approx, nn.gelu_approx, [(2, 3, 8)]),
    "geglu": (layers.gelu_approx, lambda x, u: nn.gelu_approx(x) * u, [(2, 3, 8), (2, 3, 8)]),
}


def arrays(shapes: list[tuple[int, ...]], seed: int = 0) -> list[mx.array]:
    return [random(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("case", CASES)
class TestDerivatives:
    def test_by_all_arguments(self, case):
        ours, theirs, shapes = CASES[case]
        arguments, tangents = arrays(shapes), arrays(shapes, seed=2)
        weights = [random(*theirs(*arguments).shape, seed=4)]
        for transform, directions in ((mx.vjp, weights), (mx.jvp, tangents)):
            got, want = (transform(f, arguments, directions)[1] for f in (ours, theirs))
            assert len(got) == len(want)
            for g, w in zip(got, want, strict=True):
                assert_close(g, w)

    @pytest.mark.sampled(5)
    def test_by_the_last_argument(self, case):
        ours, theirs, shapes = CASES[case]
        *others, last = arrays(shapes)
        tangents = arrays(shapes[-1:], seed=2)
        weights = [random(*theirs(*others, last).shape, seed=4)]
        for transform, directions in ((mx.vjp, weights), (mx.jvp, tangents)):
            got, want = (
                transform(lambda x, f=f: f(*others, x), [last], directions)[1][0]
                for f in (ours, theirs)
            )
            assert_close(got, want)


class TestVmap:
    def test_over_two_arguments(self):
        x, factor = random(5, 2, 8), random(5, 2, 8, seed=1)
        assert_close(mx.vmap(layers.silu)(x, factor), swiglu(x, factor))

    def test_over_an_inner_axis(self):
        x = random(5, 2, 8)
        got = mx.vmap(lambda x: layers.rms_norm(x, None, 0.1), in_axes=1)(x)
        assert_close(got, mx.fast.rms_norm(x.swapaxes(0, 1), None, 0.1))

    def test_over_the_second_argument(self):
        x, weights = random(2, 8), random(8, 5, seed=1)
        got = mx.vmap(lambda x, w: layers.rms_norm(x, w, 0.1), in_axes=(None, 1))(x, weights)
        assert_close(got, mx.fast.rms_norm(x, None, 0.1) * weights.T[:, None])


@pytest.mark.slow
def test_compiled_for_other_shapes():
    compiled = mx.compile(lambda a, b: layers.silu(a, b) + 1, shapeless=True)
    for rows in (2, 5):
        x = random(rows, 8)
        assert_close(compiled(x, x), swiglu(x, x) + 1)

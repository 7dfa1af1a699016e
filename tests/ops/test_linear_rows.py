"""Linear layers of single tokens on a CPU: MLX's own product, as one node of the graph."""

import io

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_paged import _ext
from mlx_paged.ops.cpu_layers import CPULayers

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(array.view(mx.uint8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_product_is_mlx_s_own(rows, dtype):
    weight = mx.random.normal((48, 80)).astype(dtype)
    for x in (
        mx.random.normal((rows, 1, 80)).astype(dtype),
        mx.random.normal((80, 1, rows)).astype(dtype).transpose(2, 1, 0),
        mx.random.normal((2 * rows, 1, 160)).astype(dtype)[::2, :, ::2],
    ):
        assert bits(_ext.layers.linear(x, weight)) == bits(x @ weight.T)
        assert bits(_ext.layers.linear(x, weight.T.T)) == bits(x @ weight.T)


def test_a_transposed_weight_too():
    weight, x = mx.random.normal((80, 48)).T, mx.random.normal((5, 1, 80))
    assert bits(_ext.layers.linear(x, weight)) == bits(x @ weight.T)


def nodes(layer: nn.Module, x: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, layer(x))
    return text.getvalue()


def test_only_single_tokens_without_a_bias_take_it():
    x, plain, biased = mx.random.normal((3, 1, 8)), nn.Linear(8, 4, False), nn.Linear(8, 4)
    mx.eval(x, plain.parameters(), biased.parameters())
    with CPULayers(plain).diverted():
        assert "PagedLinear" in nodes(plain, x)
        assert nodes(plain, x).count(" -> ") == 3
        for layer, given in (
            (biased, x),
            (plain, x.reshape(1, 3, 8)),
            (plain, x.astype(mx.float16)),
        ):
            assert "PagedLinear" not in nodes(layer, given)
    assert "PagedLinear" not in nodes(plain, x)


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 8), (3, 1, 7)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"\[linear\] expected x"):
        _ext.layers.linear(mx.zeros(shape), mx.zeros((4, 8)))

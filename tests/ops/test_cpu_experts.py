"""Layers of experts on a CPU: as exact as float32, and which layers take them."""

import io
from itertools import product

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from mlx_paged import _ext
from mlx_paged.ops.cpu_layers import CPULayers
from tests.support.ops.layer_cases import (
    DTYPES,
    assert_build_passes,
    float64,
    laid_out,
    random,
)

pytestmark = pytest.mark.usefixtures("on_cpu")

NODE = "PagedSwitchLinear"
EXPERTS, WIDTH, DEPTH = 6, 40, 128
FORMATS = (
    ("plain", 0, 0),
    ("affine", 4, 64),
    ("affine", 8, 32),
    ("affine", 4, 128),
    ("mxfp4", 4, 32),
)


def bits_of(x: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(x).view(mx.uint8)))


def stored(mode: str, bits: int, group: int, dtype: mx.Dtype) -> tuple[list, dict, np.ndarray]:
    """A weight as the op takes it, the op's options, and the numbers that it stands for."""
    weight = random(EXPERTS, WIDTH, DEPTH, dtype=dtype)
    if mode == "plain":
        return [weight, None, None], {}, float64(weight)
    packed, scales, *offsets = mx.quantize(weight, group, bits, mode=mode)
    wide = [scales if mode == "mxfp4" else scales.astype(mx.float32)]
    wide += [each.astype(mx.float32) for each in offsets]
    options = {"group_size": group, "bits": bits}
    numbers = mx.dequantize(packed, *wide, mode=mode, dtype=mx.float32, **options)
    return [packed, scales, *(offsets or [None])], options, float64(numbers)


def chosen(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EXPERTS, shape).astype(np.uint32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_experts_against_float64(mode, bits, group, dtype):
    arrays, options, weight = stored(mode, bits, group, dtype)
    bias = random(EXPERTS, WIDTH, dtype=dtype, seed=1)
    for rows, is_shared in product((1, 2, 7, 300), (True, False)):
        indices = chosen(rows, 2, seed=rows)
        x = random(rows, 1 if is_shared else 2, 1, DEPTH, dtype=dtype, seed=rows)
        got = _ext.layers.switch_linear(x, mx.array(indices), *arrays, bias, **options)
        assert got.shape == (rows, 2, 1, WIDTH) and got.dtype == dtype
        given = np.broadcast_to(float64(x)[:, :, 0], (rows, 2, DEPTH))
        want = np.einsum("nkd,nkod->nko", given, weight[indices]) + float64(bias)[indices]
        sizes = np.einsum("nkd,nkod->nko", np.abs(given), np.abs(weight[indices])) + 1
        # A rounding of the result, and of the inputs (two digits of 8 bits) or the sums.
        step = {mx.float32: 2**-23, mx.float16: 2**-11, mx.bfloat16: 2**-8}[dtype]
        in_digits = mode == "affine" and bits == 4 and dtype != mx.float32
        error = np.abs(float64(got)[:, :, 0] - want)
        assert np.all(error <= step * np.abs(want) + (2**-15 if in_digits else 2**-21) * sizes)
        alone = _ext.layers.switch_linear(x[-1:], mx.array(indices[-1:]), *arrays, bias, **options)
        assert bits_of(alone) == bits_of(got[-1:])  # whatever the other rows are


@pytest.mark.parametrize("layout", ["inner", "strided", "transposed"])
def test_arrays_of_any_layout(layout):
    x, weight = random(4, 1, 1, DEPTH), random(EXPERTS, WIDTH, DEPTH)
    indices = mx.array(chosen(4, 5))[:, :3]  # as routers choose them: a part of a larger array
    want = _ext.layers.switch_linear(mx.contiguous(x), mx.contiguous(indices), weight)
    if layout == "transposed":
        x = mx.contiguous(x.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)
    else:
        x, weight = laid_out(x, layout), laid_out(weight, layout)
    assert bits_of(_ext.layers.switch_linear(x, indices, weight)) == bits_of(want)


def test_rows_without_an_expert_are_nan_and_the_others_are_right():
    x, weight = random(3, 1, 1, DEPTH), random(EXPERTS, WIDTH, DEPTH)
    indices = np.array([[0], [EXPERTS], [-1]], np.int32)
    got = float64(_ext.layers.switch_linear(x, mx.array(indices), weight))[:, 0, 0]
    assert np.isnan(got[1:]).all()
    np.testing.assert_allclose(got[0], float64(weight)[0] @ float64(x)[0, 0, 0], atol=1e-4)


def test_wrong_arguments_are_refused():
    x, indices, weight = random(3, 1, 1, DEPTH), mx.array(chosen(3, 2)), random(6, 40, DEPTH)
    packed, scales, offsets = mx.quantize(weight, 32, 4)
    call, sizes = _ext.layers.switch_linear, {"group_size": 32, "bits": 4}
    wrong = {
        "indices have dtype float32": lambda: call(x, indices.astype(mx.float32), weight),
        r"expected the axes of indices and \[1, D\]": lambda: call(x[0], indices, weight),
        "x has 3 on axis 0: expected 2": lambda: call(x, indices[:2], weight),
        r"expected \[experts, outputs, 128\]": lambda: call(x, indices, weight[0]),
        r"bias has shape \(6,\)": lambda: call(x, indices, weight, bias=mx.zeros(6)),
        "bits is 4: expected 4 or 8 with scales": lambda: call(x, indices, weight, bits=4),
        "offsets are None": lambda: call(x, indices, packed, scales, **sizes),
        "another array has float16": lambda: call(
            x, indices, packed, scales.astype(mx.float16), offsets, **sizes
        ),
        r"scales has shape": lambda: call(x, indices, packed, scales[:2], offsets, **sizes),
    }
    for message, refused in wrong.items():
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.heavy
@pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
def test_every_build_passes_these_tests(build, pytestconfig):
    cases = pytestconfig.getoption("--cases")
    assert_build_passes(build, __file__, "float64 or layout", cases)


def count_of(y: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, y)
    return text.getvalue().count(NODE)


@pytest.mark.parametrize("rows", [3, 40])  # from 64 rows on MLX sorts them by expert
@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS)
def test_layers_that_take_the_op(mode, bits, group, rows):
    layer = SwitchGLU(DEPTH, 64, EXPERTS, bias=True)
    if bits:
        nn.quantize(layer, group if group <= 64 else 64, bits, mode=mode)
    mx.eval(layer.parameters())
    x, indices = random(1, rows, DEPTH), mx.array(chosen(1, rows, 2))
    want = layer(x, indices)
    with CPULayers(layer, True).diverted():
        got = layer(x, indices)
    assert count_of(got) == 3 and count_of(layer(x, indices)) == 0
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_other_layers_of_experts_are_mlx_s():
    x, indices = random(2, 1, 1, DEPTH), mx.array(chosen(2, 2))
    plain = SwitchLinear(DEPTH, WIDTH, EXPERTS, bias=False)
    view = SwitchLinear(DEPTH, WIDTH, EXPERTS, bias=False)
    view.weight = mx.contiguous(view.weight.swapaxes(1, 2)).swapaxes(1, 2)
    layers = view, plain.to_quantized(32, 3), plain.to_quantized(16, 4, "nvfp4")
    for layer in layers:
        mx.eval(layer.parameters())
        with CPULayers(layer, True).diverted():
            assert count_of(layer(x, indices)) == 0
    assert isinstance(layers[1], QuantizedSwitchLinear)
    with CPULayers(plain, True).diverted():
        assert count_of(plain(x, indices.astype(mx.int64))) == 0

"""Linear layers on a CPU: as exact as MLX's own, and which layers take them."""

import ast
import io
import os
import subprocess
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from mlx_paged import Engine, _ext
from mlx_paged.ops.cpu_layers import LINEAR_VARIABLE, CPULayers
from mlx_paged.server import flags as server_flags
from tests.support.models.tiny_models import solo_greedy, tiny_model
from tests.support.ops.layer_cases import assert_build_passes

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
pytestmark = pytest.mark.usefixtures("on_cpu")

ROWS = (1, 2, 3, 5, 7, 8, 9, 64)
NODE = "PagedLinear"


def random(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits_of(x: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(x).view(mx.uint8)))


def integers(packed: mx.array, bits: int) -> np.ndarray:
    """What ``mx.quantize`` packed, ``[O, D]``."""
    words = np.array(packed)[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)
    return (words & (2**bits - 1)).reshape(len(words), -1).astype(np.float64)


def assert_as_exact(got: mx.array, theirs: mx.array, want: np.ndarray, sizes: np.ndarray) -> None:
    """No further from float64 than MLX's own result, or than roundings of float32; relative to the
    sum of the products' sizes."""
    ours, limit = (np.max(np.abs(float64(x) - want) / sizes) for x in (got, theirs))
    assert got.dtype == theirs.dtype and got.shape == theirs.shape
    assert ours <= max(limit, 2**-23)


def check_plain(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    got = _ext.layers.linear(x, weight, bias)
    theirs = x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
    added = np.zeros(len(weight)) if bias is None else float64(bias)
    sizes = np.abs(float64(x)) @ np.abs(float64(weight)).T + np.abs(added)
    assert_as_exact(got, theirs, float64(x) @ float64(weight).T + added, sizes)
    return got


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 48), (33, 7), (1, 1), (1031, 17), (1056, 33), (1200, 33)])
def test_against_float64(shape, dtype):
    depth, width = shape
    weight, bias = random(width, depth, dtype=dtype), random(width, dtype=dtype, seed=1)
    for rows in (*ROWS, 130):
        x = random(rows, depth, dtype=dtype, seed=rows)
        check_plain(x, weight)
        got = check_plain(x, weight, bias)
        alone = _ext.layers.linear(x[rows - 1 :], weight, bias)
        assert bits_of(alone) == bits_of(got[rows - 1 :])  # whatever the other rows are


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_against_float64(bits, group, dtype):
    for depth, width in ((128, 48), (1152, 17)):
        packed, scales, offsets = mx.quantize(random(width, depth, dtype=dtype), group, bits)
        bias, sizes_of = random(width, dtype=dtype, seed=1), {"group_size": group, "bits": bits}
        parts = [float64(a).repeat(group, axis=1) for a in (scales, offsets)]
        weight = parts[0] * integers(packed, bits) + parts[1]
        for rows in ROWS:
            x = random(rows, depth, dtype=dtype, seed=rows)
            got = _ext.layers.quantized_linear(x, packed, scales, offsets, bias, **sizes_of)
            theirs = mx.quantized_matmul(x, packed, scales, offsets, **sizes_of) + bias
            sizes = np.abs(float64(x)) @ np.abs(weight).T + np.abs(float64(bias))
            assert_as_exact(got, theirs, float64(x) @ weight.T + float64(bias), sizes)
            last = x[rows - 1 :]
            alone = _ext.layers.quantized_linear(last, packed, scales, offsets, bias, **sizes_of)
            assert bits_of(alone) == bits_of(got[rows - 1 :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_any_layout(dtype):
    x, weight, bias = random(6, 96, dtype=dtype), random(40, 96, dtype=dtype), random(40)
    want = bits_of(_ext.layers.linear(x, weight, bias.astype(dtype)))
    layouts = (
        lambda a: mx.contiguous(a.T).T,
        lambda a: mx.concatenate([a, a * mx.nan], axis=-1)[..., : a.shape[-1]],
        lambda a: mx.stack([a, a * mx.nan], axis=-1)[..., 0],
    )
    for change in layouts:
        for arrays in (
            (change(x), weight, bias.astype(dtype)),
            (x, change(weight), change(bias.astype(dtype))),
        ):
            assert bits_of(_ext.layers.linear(*arrays)) == want
    packed = mx.quantize(weight, 32, 4)
    got = [
        _ext.layers.quantized_linear(x, *each, group_size=32, bits=4)
        for each in (
            packed,
            [change(a) for a, change in zip(packed, [layouts[0]] * 3, strict=True)],
        )
    ]
    assert bits_of(got[0]) == bits_of(got[1])


@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 1, 96), (2, 3, 2, 96), (0, 96)])
def test_x_of_any_number_of_axes(shape):
    weight, x = random(40, 96), random(*shape)
    assert _ext.layers.linear(x, weight).shape == (*shape[:-1], 40)
    np.testing.assert_allclose(_ext.layers.linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_transforms_are_those_of_mlx_s_own_products():
    x, weight = random(2, 128), random(8, 128)
    packed, scales, offsets = mx.quantize(weight, 32, 4)
    sizes = {"group_size": 32, "bits": 4}

    def ours(x: mx.array) -> mx.array:
        return _ext.layers.quantized_linear(x, packed, scales, offsets, **sizes).sum()

    want = mx.grad(lambda x: mx.quantized_matmul(x, packed, scales, offsets, **sizes).sum())(x)
    np.testing.assert_allclose(mx.grad(ours)(x), want, rtol=1e-5, atol=1e-5)
    compiled = mx.compile(lambda x: _ext.layers.linear(x, weight) + 1)
    for rows in (2, 5):
        x = random(rows, 128)
        assert bits_of(compiled(x)) == bits_of(_ext.layers.linear(x, weight) + 1)


def test_wrong_arguments_are_refused():
    x, weight = random(3, 64), random(8, 64)
    packed, scales, offsets = mx.quantize(weight, 32, 4)
    plain, quantized = _ext.layers.linear, _ext.layers.quantized_linear
    calls = {
        r"weight has shape \(8, 64\): expected \[outputs, 63\]": lambda: plain(x[:, :63], weight),
        r"bias has shape \(3,\): expected \[8\]": lambda: plain(x, weight, mx.zeros(3)),
        "another array has float16": lambda: plain(x, weight.astype(mx.float16)),
        "has dtype int32": lambda: plain(x.astype(mx.int32), weight),
        "bits is 3": lambda: quantized(x, packed, scales, offsets, group_size=32, bits=3),
        "group_size is 16": lambda: quantized(x, packed, scales, offsets, group_size=16, bits=4),
        "expected uint32": lambda: quantized(x, weight, scales, offsets, group_size=32, bits=4),
        "scales have shape": lambda: quantized(
            x, packed, scales[:4], offsets, group_size=32, bits=4
        ),
        r"expected \[outputs, 16\]": lambda: quantized(
            x, packed, scales, offsets, group_size=32, bits=8
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("bits", [None, 4])
def test_elements_of_any_size_give_what_mlx_gives(bits, dtype):
    """Infinities and NaN reach their own row alone; rows of tiny or of very different elements."""
    weight = random(48, 256, dtype=dtype)
    tiny, mixed = random(2, 256, dtype=dtype)
    rows = [mx.where(mx.arange(256) == 70, value, mixed) for value in (mx.inf, -mx.inf, mx.nan)]
    rows += [mixed, tiny * 1e-30, mx.zeros(256), mixed * 10.0 ** -(mx.arange(256) % 5)]
    x = mx.stack([row.astype(dtype) for row in rows])
    if bits is None:
        got, want = _ext.layers.linear(x, weight), x @ weight.T
    else:
        packed, sizes = mx.quantize(weight, 64, bits), {"group_size": 64, "bits": bits}
        got = _ext.layers.quantized_linear(x, *packed, **sizes)
        want = mx.quantized_matmul(x, *packed, **sizes)
    np.testing.assert_array_equal(np.isfinite(float64(got)), np.isfinite(float64(want)))
    np.testing.assert_array_equal(np.isnan(float64(got)), np.isnan(float64(want)))
    if bits is not None:
        weight = mx.dequantize(packed[0], *(a.astype(mx.float32) for a in packed[1:]), **sizes)
    finite, stored = float64(x)[3:], float64(weight).T
    error = np.abs(float64(got)[3:] - finite @ stored)
    assert np.all(error <= 2**-8 * (np.abs(finite) @ np.abs(stored)))
    np.testing.assert_array_equal(float64(got)[5], 0)


def test_instructions_for_bytes_and_bfloat16_are_used_where_there_are_some():
    """Their results differ from those of the build with floats in the last bits."""
    if "avx512_vnni" not in _ext.supported_kernels():
        pytest.skip("this machine has no such instructions")
    code = """
import mlx.core as mx
from mlx_paged import _ext
mx.set_default_device(mx.cpu)
mx.random.seed(0)
x, weight = mx.random.normal((64, 768)), mx.random.normal((512, 768))
for dtype in mx.float32, mx.float16, mx.bfloat16:
    a, packed = x.astype(dtype), mx.quantize(weight.astype(dtype), 64, 4)
    plain = _ext.layers.linear(a, weight.astype(dtype))
    four = _ext.layers.quantized_linear(a, *packed, group_size=64, bits=4)
    print([bytes(memoryview(y.view(mx.uint8))).hex() for y in (plain, four)])
"""
    lines = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MLX_PAGED_CPU": build},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for build in ("avx512", "avx512_vnni")
    ]
    same = [
        [a == b for a, b in zip(*map(ast.literal_eval, each), strict=True)]
        for each in zip(*lines, strict=True)
    ]
    assert same == [[True, True], [True, False], [False, False]]


@pytest.mark.heavy
@pytest.mark.parametrize("build", ["baseline", "avx2", "avx512"])
def test_every_build_passes_these_tests(build, pytestconfig):
    cases = pytestconfig.getoption("--cases")
    assert_build_passes(build, __file__, "float64 or any_size", cases)


def nodes(y: mx.array) -> str:
    text = io.StringIO()
    mx.export_to_dot(text, y)
    return text.getvalue()


def diverted(layer: nn.Module) -> CPULayers:
    mx.eval(layer.parameters())
    return CPULayers(layer, True)


def quantized(layer, bits: int = 4, group: int = 32, mode: str = "affine"):
    return layer.to_quantized(group, bits, mode=mode)


def test_layers_that_take_it_are_one_node():
    x = random(3, 1, 64)
    plain, table = nn.Linear(64, 32), nn.Embedding(32, 64)
    calls = (plain, nn.Linear(64, 32, bias=False), quantized(plain), quantized(plain, 8))
    tables = table, quantized(table)
    mx.eval([layer.parameters() for layer in (*calls, *tables)])
    heads = [lambda x, table=table: table.as_linear(x) for table in tables]
    for call in (*calls, *heads):
        want = call(x)
        with diverted(plain).diverted():
            y = call(x)
            assert nodes(y).count(NODE) == 1 and nodes(y).count("[label") == 1, nodes(y)
        assert NODE not in nodes(call(x))
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_the_base_of_an_adapter_takes_it():
    layer, x = LoRALinear.from_base(nn.Linear(64, 32)), random(2, 64)
    layer.lora_b = random(*layer.lora_b.shape)
    want = layer(x)
    with diverted(layer).diverted():
        y = layer(x)
    assert nodes(y).count(NODE) == 1
    np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


def test_other_layers_are_mlx_s():
    plain, x = nn.Linear(64, 32), random(2, 64)
    cases = [
        (plain, x.astype(mx.float16)),
        (quantized(plain, 3), x),
        (quantized(plain, 4, 16, "nvfp4"), x),
        (quantized(plain), x.astype(mx.float16)),
    ]
    for layer, given in cases:
        with diverted(layer).diverted():
            assert NODE not in nodes(layer(given))
    with diverted(plain).diverted():
        assert NODE in nodes(plain(x))
        other = []
        thread = threading.Thread(target=lambda: other.append(nodes(plain(mx.zeros((2, 64))))))
        thread.start()
        thread.join()
        assert NODE not in other[0]


def test_one_thread_s_choice_is_not_another_s():
    plain, x = nn.Linear(64, 32), random(2, 64)
    mx.eval(plain.parameters())
    found = []

    def compute():
        with CPULayers(plain, False).diverted():
            found.append(nodes(plain(mx.zeros((2, 64)))))

    with diverted(plain).diverted():
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        assert NODE in nodes(plain(x))
    assert len(found) == 1 and NODE not in found[0]


def test_what_the_op_does_not_take_is_left_to_mlx():
    """Weights that are views, which the op would copy for each call; biases of one element."""
    view, broadcast, x = nn.Linear(64, 32), nn.Linear(64, 32), random(2, 64)
    view.weight = mx.contiguous(view.weight.T).T
    broadcast.bias = mx.ones((1,))
    for layer in (view, broadcast):
        want = layer(x)
        with diverted(layer).diverted():
            y = layer(x)
        assert NODE not in nodes(y)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)


def test_a_weight_without_rows_has_no_outputs():
    for rows in (0, 1, 9):
        assert _ext.layers.linear(random(rows, 8), mx.zeros((0, 8))).tolist() == [[]] * rows


def uses(engine: Engine) -> bool:
    with engine.runner.cpu_layers.diverted():
        return nn.Linear.__call__ is not LINEAR


LINEAR = nn.Linear.__call__


def test_options_and_environment_turn_it_off(monkeypatch):
    model, sizes = tiny_model("llama"), {"block_size": 4, "num_blocks": 20, "compile": False}
    for value, by_default in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv(LINEAR_VARIABLE, value)
        assert uses(Engine(model, **sizes)) is by_default
        for wanted in (True, False):
            engine = Engine(model, **sizes, cpu_linear=wanted, draft_model=tiny_model("llama"))
            assert uses(engine) is wanted
            assert uses(engine.scheduler.decoding.drafters[0].pooled) is wanted
    for flags, option in (([], None), (["--no-cpu-linear"], False), (["--cpu-linear"], True)):
        assert server_flags.engine_options(server_flags.parse(flags))["cpu_linear"] is option


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_an_engine_has_mlx_lm_s_tokens(name, bits, monkeypatch):
    model = tiny_model(name)
    if bits is not None:
        nn.quantize(model, 32, bits, class_predicate=lambda _, m: "Linear" in type(m).__name__)
    prompts = [[5, 6, 7], [8] * 20, [9, 1]]
    want = [solo_greedy(model, prompt, 6) for prompt in prompts]
    for compile in (False, True):
        calls = []

        def counting(*args, **options):
            calls.append(args)  # noqa: B023
            return op(*args, **options)  # noqa: B023

        name = "linear" if bits is None else "quantized_linear"
        op = getattr(_ext.layers, name)
        engine = Engine(model, block_size=4, num_blocks=60, compile=compile, cpu_linear=True)
        monkeypatch.setattr(_ext.layers, name, counting)
        assert uses(engine)
        assert [done.tokens for done in engine.generate(prompts, max_tokens=6)] == want
        assert len(calls) >= 7
        monkeypatch.undo()

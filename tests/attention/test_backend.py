"""What computes a layer's calls is asked once; what a layer appends is as a write and a gather."""

import io
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, ops
from mlx_paged.attention.backend import AttentionBackend
from mlx_paged.attention.forward import Forward, LayerView
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops import dispatch
from tests.support.engine.emulated_gpu import HalfModel
from tests.support.engine.refusing_gpu import RefusingGPU
from tests.support.ops.numpy_quantization import BITS

LENGTH, BLOCK = 40, 16
TABLE = np.array([[3, 1, 5]], np.int32)


@pytest.fixture
def asked_again() -> Iterator[None]:
    yield
    dispatch.forget()


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The names of these functions of ``mlx_paged.ops``, one for each call from now on."""
    calls: list[str] = []

    def watch(name: str) -> None:
        original = getattr(ops, name)

        def noted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(ops, name, noted)

    for name in names:
        watch(name)
    return calls


@pytest.mark.heavy
def test_the_device_is_asked_once_for_each_kind_of_call(monkeypatch, asked_again):
    half = HalfModel("llama", num_hidden_layers=2)
    RefusingGPU(monkeypatch)
    engine = Engine(half.model, block_size=8, num_blocks=64, prewarm=False)
    engine.add_request([1, 2, 3], max_tokens=12)
    for _ in range(4):
        engine.step()
    calls = counted(monkeypatch, "takes_attention", "attends", "writes_in_place", "attend")
    for _ in range(3):
        engine.step()
    assert set(calls) == {"attend"} and len(calls) == 3 * 2  # a look-up in each layer


@pytest.mark.heavy
@pytest.mark.parametrize("refused", ["paged_attention", "write_kv"])
def test_a_refusal_is_kept_too(refused, monkeypatch, asked_again):
    half = HalfModel("llama", num_hidden_layers=2)
    RefusingGPU(monkeypatch, refused)
    engine = Engine(half.model, block_size=8, num_blocks=64, prewarm=False)
    engine.add_request([1, 2, 3], max_tokens=9)
    for _ in range(4):
        engine.step()
    calls = counted(monkeypatch, "takes_attention", "attends", "writes_in_place")
    engine.step()
    # A write that is no kernel's asks as any caller of `write_kv`; nothing asks for a layer.
    assert "takes_attention" not in calls and "attends" not in calls


def appending(kv_bits: int | None, head_dim: int) -> tuple[LayerView, mx.array, mx.array]:
    """A layer of a new pool in a forward of one chunk, and its K/V."""
    shape = KVShape(2, head_dim, head_dim, mx.float16)
    if kv_bits is not None:
        shape = shape.quantized("test", kv_bits)
    positions = np.arange(LENGTH, dtype=np.int32)
    slots = TABLE[0, positions // BLOCK] * BLOCK + positions % BLOCK
    arrays = map(mx.array, (positions, slots, TABLE, np.array([LENGTH], np.int32)))
    pool = KVPool([shape], 8, BLOCK)
    view = LayerView(pool, 0, forward=Forward(LENGTH, *arrays, LENGTH, 0, LENGTH))
    rng = np.random.default_rng(head_dim)
    keys, values = rng.standard_normal((2, 1, 2, LENGTH, head_dim))
    return view, mx.array(keys).astype(mx.float16), mx.array(values).astype(mx.float16)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("kv_bits", [None, *BITS])
def test_appended_kv_is_what_a_write_and_a_gather_give(kv_bits, head_dim):
    view, k, v = appending(kv_bits, head_dim)
    found = view.append(k, v)
    assert found is not None
    other, _, _ = appending(kv_bits, head_dim)
    other.pool.write(0, k, v, other.forward.slot_mapping)
    expected = [*other.keys_and_values(), *other.pool.handles()]
    for one, another in zip((*found, *view.pool.handles()), expected, strict=True):
        assert one.dtype == another.dtype and mx.array_equal(one, another)
    steps = {None: 0, 8: 127, 6: 31, 4: 15}
    if kv_bits is not None:  # rounded, and transformed back
        assert mx.abs(found[0] - k).max() < 8 / steps[max(kv_bits, 6)]


def test_layers_keep_few_ways():
    """Chunks of many lengths, and many sequences that share keys, have a way together."""
    tables, lens = mx.zeros((48, 3), mx.int32), mx.full(48, 40, mx.int32)
    sizes = {
        Forward(columns, lens, lens, tables, lens, 40, 0, 40, shared_prefixes=shared).size
        for columns in (1, 9, 300, 301, 2048)
        for shared in (None, mx.zeros((2, 48), mx.int32))
    }
    assert sizes == {(3, columns, many) for columns in (1, 9, 256) for many in (0, 32)}


def test_a_transformation_leaves_no_answer_behind():
    """While MLX transforms a function, plain MLX writes; afterwards the kernel does."""
    view, k, v = appending(None, 64)
    found = []

    def function(x: mx.array) -> mx.array:
        found.append(view.append(k, v))
        return x * 2

    mx.grad(function)(mx.array(1.0))
    found.append(view.append(k, v))
    assert found[0] is None and found[1] is not None


@pytest.mark.parametrize("kv_bits", [None, *BITS])
def test_a_handle_is_one_node(kv_bits):
    view, k, v = appending(kv_bits, 64)
    mx.eval(view.append(k, v))  # what all layers of the forward share is evaluated, too
    found = view.append(k, v)
    mx.eval(view.pool.handles())
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *found)
    assert drawing.getvalue().count("shape=rectangle") == 2


def test_sinks_are_converted_once_for_as_long_as_they_stay(monkeypatch):
    backend, sinks = AttentionBackend(), mx.array([1.0, 2.0], mx.bfloat16)
    first = backend.float32(sinks)
    assert backend.float32(sinks) is first and first.dtype == mx.float32
    sinks[0] = 5.0
    assert backend.float32(sinks).tolist() == [5.0, 2.0]
    assert backend.float32(first) is first

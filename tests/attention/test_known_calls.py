"""Calls that layers make again and again: one call of C++ each, for calls of one kind only."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.attention.causal import FULL, Causal, causal
from mlx_paged.attention.forward import Forward, LayerView, path_counts
from mlx_paged.attention.sdpa_hook import CausalMask, attention_hook
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape

HEADS, KV_HEADS, DIMS, BLOCK, LENGTH, SCALE = 4, 2, 64, 16, 40, 0.2
TABLE = np.array([[3, 1, 5]], np.int32)


class Layer:
    """A layer of a pool in which one sequence decodes."""

    def __init__(self, sees: Causal = FULL, kv_bits: int | None = None) -> None:
        shape = KVShape(KV_HEADS, DIMS, DIMS, mx.float16)
        if kv_bits is not None:
            shape = shape.quantized("test", kv_bits)
        self.rng = np.random.default_rng(7)
        self.view = LayerView(KVPool([shape], 8, BLOCK), 0, sees)
        keys, values = self.random(KV_HEADS, LENGTH), self.random(KV_HEADS, LENGTH)
        self.view.forward = forward_of(range(LENGTH))
        self.view.append(keys, values)

    def random(self, heads: int, tokens: int = 1, dtype: mx.Dtype = mx.float16) -> mx.array:
        found = self.rng.standard_normal((1, heads, tokens, DIMS))
        return mx.array(found.astype(np.float32)).astype(dtype)

    def decode(self, position: int, **options: Any) -> tuple[mx.array, mx.array]:
        """The layer's attention of a token, and MLX's over the gathered keys and values."""
        self.view.forward = forward_of([position])
        handles = self.view.append(self.random(KV_HEADS), self.random(KV_HEADS))
        assert handles is not None
        q = self.random(HEADS, dtype=options.pop("dtype", mx.float16))
        with attention_hook():
            out = mx.fast.scaled_dot_product_attention(q, *handles, scale=SCALE, **options)
        window = self.view.sees.window or 2 * LENGTH
        k, v = (np.array(handle.astype(mx.float32))[0, :, -window:] for handle in handles)
        return out, expected(np.array(q.astype(mx.float32)), k, v)


def forward_of(positions: Any) -> Forward:
    at = np.array(positions, np.int32)
    stop = int(at[-1]) + 1
    slots = TABLE[0, at // BLOCK] * BLOCK + at % BLOCK
    arrays = map(mx.array, (at, slots, TABLE, np.array([stop], np.int32)))
    return Forward(len(at), *arrays, stop, int(at[0]), stop)


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> mx.array:
    """Attention in float64."""
    k, v = (np.repeat(each.astype(np.float64), HEADS // KV_HEADS, axis=0) for each in (k, v))
    scores = SCALE * q[0].astype(np.float64) @ k.swapaxes(1, 2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return mx.array(((weights / weights.sum(axis=-1, keepdims=True)) @ v)[None].astype(np.float32))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls of attention, one for each."""
    made: list[str] = []

    def watch(name: str) -> None:
        original = getattr(ops, name)

        def noted(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            made.append(name if found is not None else f"no {name}")
            return found

        monkeypatch.setattr(ops, name, noted)

    watch("attend")
    watch("attend_known")
    return made


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@pytest.mark.parametrize("window", [None, 9])
def test_a_call_that_is_made_again_is_right(window, kv_bits, calls):
    layer = Layer(causal(window), kv_bits)
    path_counts.clear()
    for position in (LENGTH, LENGTH + 1, LENGTH + 2):
        out, right = layer.decode(position)
        assert mx.allclose(out.astype(mx.float32), right, atol=4e-3)
    assert calls == ["attend", "attend_known", "attend_known"]
    assert path_counts["paged"] == 3


def test_a_call_of_another_kind_is_asked_for_again(calls):
    layer = Layer()
    layer.decode(LENGTH)
    out, right = layer.decode(LENGTH + 1, dtype=mx.float32)
    assert mx.allclose(out, right, atol=4e-3)
    assert calls == ["attend", "no attend_known", "attend"]


def test_layers_of_one_backend_keep_their_windows(calls):
    near, far = Layer(causal(9)), Layer()
    far.view._backend = near.view._backend
    for layer in (near, far, near, far):
        out, right = layer.decode(LENGTH)
        assert mx.allclose(out.astype(mx.float32), right, atol=4e-3)
    assert calls == ["attend"] * 2 + ["attend_known"] * 2


@pytest.mark.parametrize("kind", ["sinks", "mask", "stream"])
def test_a_call_with_more_arguments_is_no_known_one(kind, calls):
    layer = Layer()
    layer.decode(LENGTH)
    options = {
        "sinks": mx.zeros((HEADS,), mx.float16),
        "mask": CausalMask.of(mx.array(True), sees=causal(3)),
        "stream": mx.default_stream(mx.cpu),
    }
    layer.decode(LENGTH + 1, **{kind: options[kind]})
    assert calls == ["attend", "attend"]


def test_a_transformation_and_an_unread_output_make_no_known_call(calls):
    layer = Layer()
    layer.decode(LENGTH)
    layer.view.forward = forward_of([LENGTH + 1])
    q = layer.random(HEADS)
    mx.vjp(lambda each: (layer.view.attend_again(each, SCALE), each)[1], [q], [q])
    layer.view.forward.is_read = False
    assert layer.view.attend_again(q, SCALE) is None
    assert calls == ["attend", "no attend_known"]


def test_decode_arrays_are_those_of_the_tables():
    rng = np.random.default_rng(0)
    tables = rng.permutation(24).astype(np.int32).reshape(4, 6)
    starts = [0, 47, 16]
    positions, lens, slots = ops.decode_arrays(starts, tables, 5, 8)
    assert positions.tolist() == [0, 47, 16, 0, 0]
    assert lens.tolist() == [1, 48, 17, 0, 0]
    of_tables = [int(tables[i, at // 8]) * 8 + at % 8 for i, at in enumerate(starts)]
    assert slots.tolist() == [*of_tables, -1, -1]


@pytest.mark.parametrize(
    ("starts", "rows", "message"),
    [
        ([48], 1, r"starts\[0\] is 48: expected 0 to 47, what the tables hold"),
        ([-1], 1, r"starts\[0\] is -1"),
        ([0, 0], 1, r"starts has 2 entries: expected at most 1, the rows"),
        ([0] * 5, 8, r"starts has 5 entries: expected at most 8, the rows, and 4, the tables"),
    ],
)
def test_decode_arrays_refuse_positions_outside_the_tables(starts, rows, message):
    with pytest.raises(ValueError, match=message):
        ops.decode_arrays(starts, np.zeros((4, 6), np.int32), rows, 8)

"""Where a model's layers are diverted to the fused ops, and where they are not."""

import io
import re
import threading
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations, llama, qwen3_next

from mlx_paged import Engine, _ext
from mlx_paged.ops import cpu_layers
from mlx_paged.ops.cpu_layers import CPULayers
from tests.support.models.architectures import build
from tests.support.models.tiny_models import solo_greedy, tiny_model
from tests.support.ops.layer_cases import assert_close, float64

ORIGINALS = {
    (mx.fast, "rms_norm"): mx.fast.rms_norm,
    (mx.fast, "rope"): mx.fast.rope,
    (nn, "silu"): nn.silu,
    (nn, "gelu_approx"): nn.gelu_approx,
    (llama, "swiglu"): activations.swiglu,
}
PROMPTS = [[5, 6, 7], [8] * 20, [9, 1]]


class CountingLayers:
    """`_ext.layers`, counting the calls."""

    def __init__(self, layers):
        self.calls = Counter()
        for name in [name for name in vars(layers) if not name.startswith("_")]:
            setattr(self, name, self._counting(name, getattr(layers, name)))

    def _counting(self, name, op):
        def counting(*args, **kwargs):
            if name != "is_dense":
                self.calls[name] += 1
            return op(*args, **kwargs)

        return counting


@pytest.fixture
def calls(monkeypatch):
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    layers = CountingLayers(_ext.layers)
    monkeypatch.setattr(cpu_layers._ext, "layers", layers)
    yield layers.calls
    mx.set_default_device(before)


def assert_restored():
    for (owner, name), original in ORIGINALS.items():
        assert getattr(owner, name) is original


def norm(x):
    return mx.fast.rms_norm(x, None, 1e-5)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_an_engine_s_steps_run_on_the_fused_layers(calls, model):
    want = [solo_greedy(model, prompt, 6) for prompt in PROMPTS]
    assert not calls  # mlx-lm runs as ever
    engine = Engine(model, block_size=4, num_blocks=60, prefill_chunk=8)  # no layer is called twice
    done = engine.generate(PROMPTS, max_tokens=6)
    assert [completion.tokens for completion in done] == want
    layers, steps = len(model.layers), calls["silu"] // len(model.layers)
    assert steps >= 6
    assert calls["rms_norm"] == steps * (2 * layers + 1)
    assert calls["rope"] == steps * 2 * layers
    assert calls["linear"] == steps * (7 * layers + 1)  # the head among them
    assert 6 <= calls["likeliest"] <= steps
    assert_restored()


@pytest.mark.slow
def test_gelu_is_diverted_too(calls):
    model = tiny_model("gemma3_text")
    want = solo_greedy(model, PROMPTS[1], 6)
    done = Engine(model, block_size=4, num_blocks=60).generate([PROMPTS[1]], max_tokens=6)
    assert done[0].tokens == want and calls["gelu_approx"] > 0
    assert_restored()


def test_frequencies_of_a_model_s_own(calls, model):
    x = mx.random.normal((2, 3, 5, 8))
    for freqs in (mx.array([1.0, 3.0, 50.0]), mx.array([2.0, 0.5, 8.0], mx.float16)):
        options = {"traditional": False, "base": None, "scale": 0.5, "offset": 40, "freqs": freqs}
        want = mx.fast.rope(x, 6, **options)
        with CPULayers(model).diverted():
            got = mx.fast.rope(x, 6, **options)
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=0, atol=2e-6)
    assert calls["rope"] == 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_precise_gates_against_float64(calls, dtype):
    like, gate, x = (mx.random.normal((3, 5, 70), key=mx.random.key(i)) for i in range(3))
    model = build("qwen3_next")
    like, gate, x = like.astype(dtype), (4 * gate).astype(dtype), x.astype(dtype)
    with CPULayers(model).diverted():
        got = qwen3_next.precise_swiglu(like, gate, x)
    assert calls["silu"] == 1
    wide, factor = float64(gate), float64(x)
    assert_close(got, wide / (1 + np.exp(-wide)) * factor, dtype)
    one = wide[:1, :1, :1]  # for all: a shape that the op refuses
    with CPULayers(model).diverted():
        got = qwen3_next.precise_swiglu(like, gate[:1, :1, :1], x)
    assert_close(got, one / (1 + np.exp(-one)) * factor, dtype)
    assert qwen3_next.precise_swiglu is activations.precise_swiglu


def test_outside_of_the_context_everything_is_mlx_s(calls, model):
    with CPULayers(model).diverted():
        for (owner, name), original in ORIGINALS.items():
            assert getattr(owner, name) is not original
        norm(mx.ones(4))
        with CPULayers(model).diverted():
            norm(mx.ones(4))
        norm(mx.ones(4))
    assert calls["rms_norm"] == 3
    assert_restored()


def test_an_error_within_restores_mlx_s_layers(calls, model):
    with pytest.raises(RuntimeError, match="model"), CPULayers(model).diverted():
        raise RuntimeError("model")
    assert_restored()


def test_other_threads_keep_mlx_s_layers(calls, model):
    """One trains while another serves: its calls are not diverted."""
    with CPULayers(model).diverted():
        out = []
        other = threading.Thread(target=lambda: out.append(norm(mx.ones(4))))
        other.start()
        other.join()
        assert len(out) == 1 and not calls
        norm(mx.ones(4))
    assert calls["rms_norm"] == 1


def test_the_last_thread_to_leave_restores(calls, model):
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with CPULayers(model).diverted():
            entered.set()
            leave.wait(30)
            norm(mx.ones(4))

    other = threading.Thread(target=stay)
    other.start()
    assert entered.wait(30)
    with CPULayers(model).diverted():
        pass
    norm(mx.ones(4))  # not in a context any more, while the other is
    assert not calls
    leave.set()
    other.join()
    assert calls["rms_norm"] == 1
    assert_restored()


def test_a_gpu_keeps_its_own_kernels(calls, model, monkeypatch):
    monkeypatch.setattr(cpu_layers.mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    with CPULayers(model).diverted():
        assert_restored()
    x = mx.ones((2, 8))
    mx.eval(cpu_layers.log_softmax(x))
    assert not calls


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("device", [mx.cpu, mx.Device(mx.gpu, 0)], ids=str)
def test_log_softmax_of_what_is_allowed(monkeypatch, device, dtype):
    """Also of rows that allow everything, and nothing: then there is no sum."""
    monkeypatch.setattr(cpu_layers.mx, "default_device", lambda: device)
    bits = np.random.default_rng(0).integers(0, 2, (4, 96))
    bits[2:] = [[1], [0]]
    words = np.packbits(bits.astype(np.uint8), axis=1, bitorder="little").view(np.uint32)
    x = (mx.random.normal((4, 75)) * 3).astype(dtype)
    logs, best, total = cpu_layers.log_softmax(x, mx.array(words))
    kept = mx.where(mx.array(bits[:, :75]) == 1, x, -mx.inf)
    want = kept - mx.logsumexp(kept, axis=-1, keepdims=True)
    rtol = 1e-5 if dtype == mx.float32 else 2**-7
    as_numpy = [np.array(array.astype(mx.float32)) for array in (logs, want)]
    np.testing.assert_allclose(*as_numpy, rtol=rtol)
    exact = np.array(kept.astype(mx.float32), np.float64)
    assert total.dtype == mx.float32 and np.isnan(total[3].item())
    sums = np.log(np.exp(exact[:3]).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.array(total)[:3], sums, rtol=1e-6)
    assert best.tolist()[:3] == mx.argmax(logs, axis=-1).tolist()[:3]


def not_diverted():
    ints, floats, halves = mx.ones((1, 2, 8), mx.int32), mx.ones((1, 2, 8)), mx.ones(8, mx.float16)
    rope = {"traditional": False, "scale": 1.0, "offset": 0}
    return {
        "norm of two dtypes": lambda: mx.fast.rms_norm(floats, halves, 1e-5),
        "rope of five axes": lambda: mx.fast.rope(mx.ones((1, 1, 1, 2, 8)), 8, base=1e4, **rope),
        "silu of integers": lambda: nn.silu(ints),
        "gelu of integers": lambda: nn.gelu_approx(ints),
        "a broadcast gate": lambda: llama.swiglu(floats, mx.ones((1, 1, 8))),
        "a gate of two dtypes": lambda: llama.swiglu(floats, floats.astype(mx.float16)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", not_diverted())
def test_what_the_ops_do_not_take_is_left_to_mlx(calls, model, case):
    call = not_diverted()[case]
    want = call()
    with CPULayers(model).diverted():
        got = call()
    assert not calls and got.dtype == want.dtype
    assert mx.array_equal(got, want)


def test_a_mistake_in_a_model_is_reported_as_by_mlx(calls, model):
    x, rope = mx.ones((1, 2, 8)), {"traditional": False, "scale": 1.0, "offset": 0}
    with CPULayers(model).diverted():
        with pytest.raises(ValueError, match="base or freqs"):
            mx.fast.rope(x, 8, base=1e4, freqs=mx.ones(4), **rope)
        with pytest.raises(ValueError, match="Neither base nor freqs"):
            mx.fast.rope(x, 8, base=None, **rope)
        with pytest.raises(ValueError, match="freqs must be one dimensional with size 4"):
            mx.fast.rope(x, 8, base=None, freqs=mx.ones(3), **rope)
        with pytest.raises(ValueError, match="dims must be even but got 3"):
            mx.fast.rope(x, 3, base=1e4, **rope)
        with pytest.raises(ValueError, match="weight"):
            mx.fast.rms_norm(x, mx.ones(3), 1e-5)


@pytest.mark.slow
def test_what_compile_traces_meanwhile_can_be_differentiated_later(calls, model):
    compiled = mx.compile(lambda x: nn.silu(x) * 2, shapeless=True)
    x = mx.array([0.5, -1.0, 2.0])
    with CPULayers(model).diverted():
        mx.eval(compiled(x))
    assert calls["silu"] == 1
    got, want = (
        mx.grad(lambda x, f=f: f(x).sum())(x) for f in (compiled, lambda x: nn.silu(x) * 2)
    )
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_on_a_gpu_a_token_takes_three_launches(monkeypatch, dtype):
    """Those of mlx-lm: log-sum-exp, the difference, the largest. Views are none."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    x = mx.random.normal((3, 40)).astype(dtype)
    mx.eval(x)
    logs, best, total = cpu_layers.log_softmax(x)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, best)
    found = re.findall(r'label ="(\w+)", shape=rectangle', drawing.getvalue())
    assert sorted(set(found) - {"Broadcast", "Squeeze", "View"}) == [
        "ArgReduce",
        "LogSumExp",
        "Subtract",
    ]
    expected = x - mx.logsumexp(x, axis=-1, keepdims=True)
    assert mx.array_equal(logs, expected)
    assert best.dtype == mx.int32 and mx.array_equal(best, mx.argmax(expected, axis=-1))
    assert total.dtype == mx.float32

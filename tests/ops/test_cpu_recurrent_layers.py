"""Which functions of mlx-lm's recurrent layers are ops of this package while an engine computes."""

import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm

from mlx_paged import Engine, _ext
from mlx_paged.ops import cpu_recurrent
from mlx_paged.ops.cpu_layers import CPULayers
from tests.support.models.architectures import build
from tests.support.models.tiny_models import solo_greedy

pytestmark = pytest.mark.usefixtures("on_cpu")

USED = {
    "qwen3_5": {"gated_delta", "depthwise_convolution"},
    "qwen3_next": {"gated_delta", "depthwise_convolution"},
    "kimi_linear": {"gated_delta", "depthwise_convolution"},
    "kimi_k3": {"gated_delta", "depthwise_convolution"},
    "olmo_hybrid": {"gated_delta", "depthwise_convolution"},
    "bailing_moe_v3": {"gated_delta", "depthwise_convolution"},
    "mamba2": {"state_space_scan", "depthwise_convolution"},
    "nemotron_h": {"state_space_scan", "depthwise_convolution"},
    "falcon_h1": {"state_space_scan", "depthwise_convolution"},
    "granitemoehybrid": {"state_space_scan", "depthwise_convolution"},
    "plamo2": {"state_space_scan", "depthwise_convolution"},
    "mamba": {"selective_scan", "depthwise_convolution"},
    "jamba": {"selective_scan", "depthwise_convolution"},
    "lfm2": {"depthwise_convolution"},
    "lfm2_moe": {"depthwise_convolution"},
    "gear": {"depthwise_convolution"},
    "llama": set(),
}
LATENT = ("kimi_linear", "kimi_k3", "bailing_moe_v3")  # products of their attention are MLX's
PROMPTS = [[5, 6, 7, 1, 2, 3, 9, 8, 4, 30, 31], [8] * 20, [9, 1]]


@pytest.fixture
def calls(monkeypatch):
    """How often each op was called."""
    counted = Counter()

    def counting(name, op):
        def call(*args, **options):
            counted[name] += 1
            return op(*args, **options)

        return call

    ops = {name: op for name, op in vars(_ext.recurrent).items() if not name.startswith("_")}
    own = SimpleNamespace(**{name: counting(name, op) for name, op in ops.items()})
    monkeypatch.setattr(cpu_recurrent._ext, "recurrent", own)
    return counted


def assert_restored():
    for known in cpu_recurrent.KNOWN:
        assert getattr(known.owner, known.name) is known.original


def scores_of(model, prompts, **options):
    """The tokens and their log-probabilities, as bits."""
    engine = Engine(model, block_size=4, num_blocks=120, **options)
    done = engine.generate(prompts, max_tokens=8)
    return [(each.tokens, each.logprobs) for each in done]


def test_mlx_lm_has_the_functions_that_are_known():
    assert [known.name for known in cpu_recurrent.KNOWN if not known.is_as_known] == []
    assert_restored()


def test_every_model_of_mlx_lm_that_calls_these_functions_is_in_these_tests():
    calls = re.compile(r"nn\.Conv1d\(|\bShortConv1d\(|gated_delta_update\(|ssm_update\(")
    files = (Path(mlx_lm.__file__).parent / "models").glob("*.py")
    found = {file.stem for file in files if calls.search(file.read_text())}
    assert found - {"gated_delta", "ssm"} == {name for name, ops in USED.items() if ops}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", USED)
def test_an_engine_s_steps_run_on_the_ops(name, calls):
    model = build(name)
    want = [solo_greedy(model, prompt, 6) for prompt in PROMPTS]
    assert not calls  # mlx-lm runs as ever
    engine = Engine(model, block_size=4, num_blocks=120, prefill_chunk=8)
    done = engine.generate(PROMPTS, max_tokens=6)
    assert [each.tokens for each in done] == want
    assert calls.keys() == USED[name]
    assert_restored()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in USED if name not in LATENT])
def test_bits_do_not_depend_on_chunks_batches_or_drafts(name):
    model = build(name)
    want = [scores_of(model, [prompt])[0] for prompt in PROMPTS]
    assert scores_of(model, PROMPTS, prefill_chunk=3) == want
    assert scores_of(model, PROMPTS, prefill_chunk=64) == want
    assert scores_of(model, PROMPTS, speculate="ngram") == want


def test_a_function_with_other_parameters_stays_mlx_lm_s(monkeypatch, calls):
    model = build("qwen3_5")
    names = [known.name for known in cpu_recurrent.functions_of(model)]
    assert names == ["gated_delta_ops", "__call__"]

    def changed(q, k, v, g, beta, state=None, mask=None, scale=1.0):
        return gated_delta.gated_delta_ops(q, k, v, g, beta, state, mask)

    key = gated_delta, "gated_delta_ops"
    monkeypatch.setitem(cpu_recurrent._originals, key, changed)
    assert [known.name for known in cpu_recurrent.functions_of(model)] == ["__call__"]
    Engine(model, block_size=4, num_blocks=60).generate([PROMPTS[0]], max_tokens=2)
    assert calls.keys() == {"depthwise_convolution"}


def test_a_class_of_a_file_that_python_does_not_list_is_no_obstacle(monkeypatch):
    """As mlx-lm loads the `model_file` of a checkpoint."""

    class Own(nn.Module):
        pass

    Own.__module__ = "custom_model"
    model = nn.Sequential(Own(), nn.Conv1d(4, 4, 3, groups=4))
    assert [known.owner for known in cpu_recurrent.functions_of(model)] == [nn.Conv1d]


def test_macos_keeps_mlx_lm_s_layers_unless_the_environment_says_so(monkeypatch):
    model = build("mamba2")
    assert len(cpu_recurrent.functions_of(model)) == 2
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu_recurrent.functions_of(model) == []
    monkeypatch.setenv(cpu_recurrent.VARIABLE, "1")
    assert len(cpu_recurrent.functions_of(model)) == 2


def test_the_environment_leaves_recurrent_layers_to_mlx_lm(monkeypatch, calls):
    monkeypatch.setenv(cpu_recurrent.VARIABLE, "0")
    model = build("mamba2")
    Engine(model, block_size=4, num_blocks=60).generate([PROMPTS[0]], max_tokens=2)
    assert not calls


def test_arrays_that_an_op_does_not_take_are_mlx_lm_s(calls):
    layer = nn.Conv1d(6, 8, 3)  # dense
    strided = nn.Conv1d(6, 6, 3, stride=2, groups=6)
    padded = nn.Conv1d(6, 6, 3, padding=1, groups=6)
    wider = nn.Conv1d(6, 12, 3, groups=6)
    x = mx.random.normal((1, 9, 6))
    model = nn.Sequential(layer, strided, padded, wider)
    want = [each(x) for each in model.layers]
    state = mx.zeros((1, 1, 2, 3), mx.float16)
    q, v, g = mx.ones((1, 2, 1, 3)), mx.ones((1, 2, 1, 2)), mx.ones((1, 2, 1))
    b, d = mx.ones((1, 2, 1, 3)), mx.ones(1)
    uses_all = nn.Sequential(build("qwen3_5"), build("mamba2"), model)
    with CPULayers(uses_all).diverted():
        for each, own in zip(model.layers, want, strict=True):
            assert np.array_equal(each(x), own)
        gated_delta.gated_delta_ops(q, q, v, g, g, state)
        scanned = (v, d, b, b, d, g, d)
        ssm.ssm_attn(*scanned, lengths=mx.array([2]))
        numbers = mx.ones((1, 2))  # a mask that is no bool
        gated_delta.gated_delta_ops(q, q, v, g, g, mask=numbers)
        ssm.ssm_attn(*scanned, mask=numbers)
        ssm.ssm_attn(*scanned[:3], b.astype(mx.float16), *scanned[4:])
        assert not calls
        gated_delta.gated_delta_ops(q, q, v, g, g)
        ssm.ssm_attn(*scanned)
    assert calls == {"gated_delta": 1, "state_space_scan": 1}


def test_models_of_other_dtypes_run_as_mlx_lm_runs_them(calls):
    """Mamba with A and D in float32 beside weights in bfloat16: the first layer's state changes its
    dtype. The second layer has float32 from the first one."""
    model = build("mamba")
    kept = [(layer.mixer.A_log, layer.mixer.D) for layer in model.layers]
    model.set_dtype(mx.bfloat16)
    for layer, (a_log, d) in zip(model.layers, kept, strict=True):
        layer.mixer.A_log, layer.mixer.D = a_log, d
    x = mx.array([PROMPTS[0]])
    want = model(x)
    with CPULayers(model, False).diverted():
        got = model(x)
    assert calls["selective_scan"] == 1 < len(model.layers)
    np.testing.assert_allclose(got.astype(mx.float32), want.astype(mx.float32), atol=0.2)

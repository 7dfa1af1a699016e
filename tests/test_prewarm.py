"""Pre-warming dispatches every pipeline that an engine will use, and says when there are none."""

import mlx.core as mx
import numpy as np
import pytest
from metal_runner import MetalRunner
from tiny_models import VOCAB, tiny_model

from mlx_paged import Engine, prewarm
from mlx_paged.model_probe import probe


def test_a_cpu_compiles_nothing_and_says_so():
    engine = Engine(tiny_model("llama"), num_blocks=8)
    assert engine.stats.prewarm_seconds is None
    assert prewarm.prewarm(probe(tiny_model("llama")).attentions, 16) is None


def test_layers_that_share_a_pipeline_count_once():
    (kind,) = probe(tiny_model("llama")).attentions
    assert (kind.num_heads, kind.shape.n_kv_heads, kind.window, kind.has_sinks) == (
        4,
        2,
        None,
        False,
    )
    kinds = probe(tiny_model("gpt_oss")).attentions
    assert {(kind.window, kind.has_sinks) for kind in kinds} == {(12, True), (None, True)}


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3"])
def test_an_engine_uses_only_pipelines_that_were_dispatched(model_type, monkeypatch):
    model = tiny_model(model_type, num_hidden_layers=2)
    metal = MetalRunner()
    metal.install(monkeypatch)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    seconds = prewarm.prewarm(probe(model).attentions, 4)
    monkeypatch.undo()
    metal.install(monkeypatch)
    assert seconds is not None and seconds > 0
    warmed = set(metal.trace.pipelines)
    assert {name.split("_float")[0] for name in warmed} == {
        "paged_attention",
        "merge_splits",
        "write_kv",
        "copy_blocks",
    }

    metal.trace.pipelines.clear()
    engine = Engine(model, block_size=4, num_blocks=64, prefill_chunk=8)
    prompts = [np.random.default_rng(0).integers(0, VOCAB, n).tolist() for n in (5, 19)]
    engine.generate(prompts, max_tokens=3)
    assert set(metal.trace.pipelines) <= warmed

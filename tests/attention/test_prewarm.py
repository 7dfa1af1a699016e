"""Pre-warming dispatches every pipeline that an engine will use, and says when there are none."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, _ext, ops
from mlx_paged.attention import prewarm
from mlx_paged.attention.causal import FULL, causal
from mlx_paged.attention.sdpa_hook import Query
from mlx_paged.kv.block_bytes import read_blocks, write_blocks
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.model_probe import _Recorder, probe
from tests.support.models.tiny_models import VOCAB, tiny_model
from tests.support.ops.metal_runner import MetalRunner


@pytest.fixture
def gpu(monkeypatch) -> None:
    """Let this build take itself for one with Metal."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(_ext.metal, "has_metal", lambda: True)


def test_a_cpu_compiles_nothing_and_says_so():
    engine = Engine(tiny_model("llama"), num_blocks=8)
    assert engine.stats.prewarm_seconds is None
    assert prewarm.prewarm(probe(tiny_model("llama")).attentions, 16) is None


def test_layers_that_share_a_pipeline_count_once():
    (kind,) = probe(tiny_model("llama")).attentions
    assert (kind.num_heads, kind.shape.n_kv_heads, kind.sees.window, kind.has_sinks) == (
        4,
        2,
        None,
        False,
    )
    kinds = probe(tiny_model("gpt_oss")).attentions
    assert {(kind.sees.window, kind.has_sinks) for kind in kinds} == {(12, True), (None, True)}


def test_every_attention_to_a_cache_of_several_layers_counts():
    cache = _Recorder(1, FULL)
    rows = mx.zeros((1, 2, 3, 8))
    cache.update_and_fetch(rows, rows)
    for heads, window in ((2, None), (4, 12)):
        cache.attend(Query(mx.zeros((1, heads, 3, 8)), 1.0, causal(window), None))
    assert [(kind.num_heads, kind.sees.window) for kind in cache.attentions] == [(2, None), (4, 12)]


def pipelines(call: dict[str, Any]) -> set[str]:
    return {launch["pipeline"] for launch in call["launches"]}


@pytest.mark.heavy
@pytest.mark.sampled(30)
@pytest.mark.parametrize("block_size", [8, 16, 512], ids="S{}".format)
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="D{}".format)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8], ids="G{}".format)
@pytest.mark.parametrize("window", [None, 128, 500, 1024])
def test_every_plan_of_attention_was_dispatched(
    window, group, head_dim, latent, block_size, gpu, monkeypatch
):
    """Whatever the number of sequences, of tokens of each, of columns of the tables, and of
    sequences that share keys."""
    kv_heads = 1 if latent else 2
    shape = KVShape(kv_heads, head_dim, head_dim - 16 * latent, mx.float16, latent)
    kind = prewarm.AttentionKind(shape, kv_heads * group, mx.float16, causal(window), False)
    dispatched: list[dict[str, Any]] = []

    def attend(q, kv, is_known, **options):
        dispatched.append(_ext.metal.plan_attention(q, kv.keys, kv.values, **options))
        return q

    monkeypatch.setattr(ops, "attend", attend)
    prewarm.prewarm([kind], block_size)
    warmed = set().union(*(pipelines(call) for call in dispatched))
    pool = prewarm.KVPool([shape], 1, block_size)
    lengths = *range(1, 10), 600
    for batch, length, columns in product((1, 2, 5, 64, 200), lengths, (1, 2, 40, 600)):
        call = _ext.metal.plan_attention(
            mx.zeros((batch, kind.num_heads, length, head_dim), mx.float16),
            *(pool.k[0], pool.v[0]),
            *(mx.zeros((batch, columns), mx.int32), mx.zeros((batch,), mx.int32)),
            scale=1.0,
            window=window,
        )
        assert pipelines(call) <= warmed, (batch, length, columns)
    for batch, columns in product((2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 200), (40, 600)):
        call = _ext.metal.plan_attention(
            mx.zeros((batch, kind.num_heads, 1, head_dim), mx.float16),
            *(pool.k[0], pool.v[0]),
            *(mx.zeros((batch, columns), mx.int32), mx.zeros((batch,), mx.int32)),
            scale=1.0,
            window=window,
            shared_prefixes=mx.zeros((2, batch), mx.int32),
        )
        assert pipelines(call) <= warmed, (batch, columns)
    if ops.serves_chunks(mx.float16, shape.head_dim, shape.v_head_dim):
        for lengths, columns in product(([1, 1, 600], [1, 9], [3, 70]), (2, 600)):
            num_decodes = sum(length == 1 for length in lengths)
            begins = np.cumsum([0, *lengths]).tolist()
            call = _ext.metal.plan_attention(
                mx.zeros((begins[-1], kind.num_heads, 1, head_dim), mx.float16),
                *(pool.k[0], pool.v[0]),
                mx.zeros((len(lengths), columns), mx.int32),
                mx.zeros((len(lengths),), mx.int32),
                scale=1.0,
                window=window,
                cu_seqlens=mx.array(begins, mx.int32),
                num_decodes=num_decodes,
            )
            assert pipelines(call) <= warmed, (lengths, columns)
    assert len(dispatched) <= len(warmed)


def test_heads_without_a_kernel_have_nothing_to_dispatch(gpu, monkeypatch):
    monkeypatch.delattr(ops, "attend")
    shape = KVShape(1, 65, 65, mx.float16)
    kind = prewarm.AttentionKind(shape, 1, mx.float16, FULL, False)
    assert prewarm.prewarm([kind], 16) is not None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "deepseek_v3"])
def test_an_engine_uses_only_pipelines_that_were_dispatched(model_type, gpu, monkeypatch):
    model = tiny_model(model_type, num_hidden_layers=2)
    metal = MetalRunner()
    metal.install(monkeypatch)
    seconds = prewarm.prewarm(probe(model).attentions, 4, transfers=True)
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
    pool = engine.manager.pool
    write_blocks(pool, np.ones(1, np.int32), 0, read_blocks(pool, [1], 0))
    mx.eval(pool.handles())
    assert set(metal.trace.pipelines) <= warmed


def test_a_draft_models_pipelines_are_compiled_too(monkeypatch, tmp_path):
    def compiled(*kinds):
        seen.append(kinds)
        return 0.5

    seen = []
    monkeypatch.setattr("mlx_paged.runner.pooled_model.prewarm", compiled)
    draft_model = tiny_model("gemma3_text")
    engine = Engine(tiny_model("llama"), draft_model=draft_model, num_blocks=64, kv_disk=tmp_path)
    own, drafts, again = seen  # the budget needs both, before the draft model's pool is there
    assert again == drafts
    assert own[3] and not drafts[3], "no draft's block comes from the disk"
    assert own[0] != drafts[0] and own[2] == engine.manager.plan != drafts[2]
    assert engine.stats.prewarm_seconds > 1.0  # with the first steps of both
    engine.warm_up()
    engine.close()
    assert len(seen) == 3

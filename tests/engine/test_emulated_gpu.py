"""An engine whose paged ops run as a GPU's launches, in the emulator, gives mlx-lm's tokens."""

from collections import Counter
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.attention import paths, shared_prefixes
from mlx_paged.attention.forward import path_counts
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.model_runner import ModelRunner
from tests.support.engine.emulated_gpu import (
    BLOCK_SIZE,
    LONG_CHUNK,
    HalfModel,
    emulate_gpu,
    gpu_buckets,
)
from tests.support.models.tiny_models import VOCAB
from tests.support.ops.numpy_quantization import BITS, quantized_mlx_lm

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 37, 12, 61)]
NUM_TOKENS = 6


@cache
def half_model(model_type: str) -> HalfModel:
    changes = {"first_k_dense_replace": 2} if model_type == "deepseek_v3" else {}
    return HalfModel(model_type, num_hidden_layers=2, **changes)


def families(metal) -> Counter[str]:
    """How often kernels of each family ran."""
    names = "paged_attention", "matrix_attention", "merge_splits", "write_kv", "write_quantized"
    names += ("copy_blocks",)
    return Counter(next(n for n in names if kernel.startswith(n)) for kernel in metal.trace.kernels)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("prefill_chunk", [LONG_CHUNK - 8, 2 * LONG_CHUNK])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_mixed_steps_give_mlx_lms_tokens(model_type, prefill_chunk, monkeypatch):
    half = half_model(model_type)
    metal = emulate_gpu(monkeypatch)
    engine = Engine(half.model, block_size=4, num_blocks=128, prefill_chunk=prefill_chunk)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    same = [half.check(p, c.tokens) for p, c in zip(PROMPTS, done, strict=True)]
    assert sum(same) >= len(PROMPTS) - 1
    assert families(metal)["paged_attention"] > 0
    if model_type != "deepseek_v3":  # whose own prefill reads gathered latents
        assert families(metal)["matrix_attention"] > 0
        assert (path_counts["gather"] > 0) == (prefill_chunk >= LONG_CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", BITS)
def test_quantized_pools_give_mlx_lms_tokens_over_what_numpy_quantizes(kv_bits, monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2, head_dim=32)
    metal = emulate_gpu(monkeypatch)
    sizes = {"block_size": 4, "num_blocks": 128, "prefill_chunk": 2 * LONG_CHUNK}
    done = Engine(half.model, kv_bits=kv_bits, **sizes).generate(PROMPTS, max_tokens=NUM_TOKENS)
    with quantized_mlx_lm(kv_bits):
        same = [half.check(p, c.tokens) for p, c in zip(PROMPTS, done, strict=True)]
    assert sum(same) >= len(PROMPTS) - 1
    form = {8: "_k8v8_", 6: "_k6v6_", 4: "_k6v4_"}[kv_bits]
    attention = [name for name in metal.trace.kernels if "attention" in name]
    assert attention and all(form in name for name in attention)
    ran = families(metal)
    assert min(ran[n] for n in ("paged_attention", "matrix_attention", "write_quantized")) > 0
    assert "write_kv" not in ran and path_counts["gather"] > 0


def compiled_engine(half, monkeypatch) -> tuple[Engine, list[list[int]]]:
    """An engine whose decodes are graphs with a GPU's buckets, and a list of the numbers of rows,
    of columns and of shared prefixes of its steps."""
    gpu_buckets(monkeypatch)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(CompiledDecode, "problem", lambda *_, **__: None)
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 200, "max_running": 33, "prewarm": False}
    engine = Engine(half.model, compile=True, **sizes)
    assert engine.runner.compiled is not None
    sizes_of_steps = []
    compute = CompiledDecode._run

    def noted(compiled, arrays):
        sizes_of_steps.append([arrays[0].size, arrays[4].shape[1], arrays[5].shape[1]])
        return compute(compiled, arrays)

    monkeypatch.setattr(CompiledDecode, "_run", noted)
    return engine, sizes_of_steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_compiled_decodes_give_mlx_lms_tokens(model_type, count, monkeypatch):
    """Launches of a compiled step: with rows of padding, and tables as wide as their bucket. The
    emulator needs values, so that MLX calls the traced function in every step."""
    half = half_model(model_type)
    metal = emulate_gpu(monkeypatch)
    engine, rows = compiled_engine(half, monkeypatch)
    lengths = [530, 9] if count == 2 else [3 + i % 7 for i in range(count)]
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    done = engine.generate(prompts, max_tokens=4)
    assert [34 if count == 33 else 2, 64 if count == 2 else 32, 0] in rows
    same = [half.check(p, c.tokens) for p, c in zip(prompts, done, strict=True)]
    assert sum(same) >= len(prompts) - 2
    assert families(metal)["paged_attention"] + families(metal)["matrix_attention"] > 0


@pytest.mark.heavy
def test_compiled_decodes_share_prefixes(monkeypatch):
    """A graph with the launch for keys that sequences share, of which the threadgroups find none
    in the graph of other steps."""
    half = half_model("llama")
    metal = emulate_gpu(monkeypatch)
    monkeypatch.setattr(shared_prefixes, "FEWEST_SHARED", 512)
    engine, sizes = compiled_engine(half, monkeypatch)
    first = np.random.default_rng(0).integers(0, VOCAB, 552).tolist()
    prompts = [first, [*first[:530], 5, 6, 7]]
    engine.generate(prompts[:1], max_tokens=2)
    before = len(metal.trace.kernels)
    done = engine.generate(prompts, max_tokens=6)
    assert engine.stats.shared_keys > 0 and [2, 64, 2] in sizes and [1, 64, 0] in sizes
    attention = [name for name in metal.trace.kernels[before:] if "attention" in name]
    assert len(attention) > len(engine.runner.layers) * engine.stats.steps
    assert all([half.check(p, c.tokens) for p, c in zip(prompts, done, strict=True)])


def test_a_preempted_request_gives_mlx_lms_tokens(monkeypatch):
    half = half_model("llama")
    emulate_gpu(monkeypatch)
    engine = Engine(half.model, block_size=4, num_blocks=10, prefill_chunk=16)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1][:9]]
    done = engine.generate(prompts, max_tokens=12)
    assert engine.stats.preemptions > 0
    assert all([half.check(p, c.tokens) for p, c in zip(prompts, done, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("kv_bits", [None, *BITS])
def test_forks_give_mlx_lms_tokens(kv_bits, monkeypatch):
    half = half_model("llama")
    metal = emulate_gpu(monkeypatch)
    sizes = {"block_size": 4, "num_blocks": 64, "prefill_chunk": 16}
    engine = Engine(half.model, kv_bits=kv_bits, **sizes)
    prompt = PROMPTS[2]
    parent = engine.add_request(prompt, max_tokens=NUM_TOKENS)
    tokens, children = {parent: []}, {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
            if output.request_id == parent and len(tokens[parent]) in (1, 4):
                child = engine.fork(parent, max_tokens=4)
                children[child] = list(engine.request(child).tokens)
    assert len(children) == 2
    with quantized_mlx_lm(kv_bits):
        assert half.check(prompt, tokens[parent])
        assert all([half.check(prefix, tokens[child]) for child, prefix in children.items()])
    assert families(metal)["copy_blocks"] > 0
    assert ("copy_blocks_uchar" in metal.trace.kernels) == (kv_bits is not None)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_blocks_from_a_disk_give_mlx_lms_tokens(model_type, tmp_path, monkeypatch):
    half = half_model(model_type)
    metal = emulate_gpu(monkeypatch)
    for cached in (0, 56):
        engine = Engine(half.model, block_size=8, num_blocks=128, kv_disk=tmp_path)
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
        before = families(metal)["write_kv"]
        (done,) = engine.generate(PROMPTS[3:], max_tokens=NUM_TOKENS)
        assert done.cached_prompt_tokens == cached and half.check(PROMPTS[3], done.tokens)
        assert families(metal)["write_kv"] > before
        engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("context", "decode_launches"), [(40, 2), (600, 3)])
def test_a_step_takes_few_launches_a_layer(context, decode_launches, monkeypatch):
    """The write of K/V, and attention: a kernel for decodes, one for chunks, and a merge of splits
    if a context is long."""
    half = half_model("llama")
    metal = emulate_gpu(monkeypatch)
    monkeypatch.setattr(paths, "LONG_CHUNK", 1000)
    launches: dict[bool, set[float]] = {False: set(), True: set()}
    launch = ModelRunner.launch

    def counted(runner, step, before):
        num_before = len(metal.trace.kernels)
        launched = launch(runner, step, before)
        is_mixed = {len(span) == 1 for span in step.spans} == {True, False}
        if is_mixed or all(len(span) == 1 for span in step.spans):
            count = (len(metal.trace.kernels) - num_before) / len(runner.layers)
            launches[is_mixed].add(count)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", counted)
    engine = Engine(half.model, block_size=16, num_blocks=100, prefill_chunk=300)
    rng = np.random.default_rng(0)
    engine.add_request(rng.integers(0, VOCAB, context).tolist(), max_tokens=8)
    while not engine.step():
        pass
    engine.add_request(rng.integers(0, VOCAB, 30).tolist(), max_tokens=2)
    while engine.has_work:
        engine.step()
    assert launches[False] == {decode_launches}
    assert launches[True] and max(launches[True]) <= 4

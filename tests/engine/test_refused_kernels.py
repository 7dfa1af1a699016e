"""What the GPU's compiler refuses is computed in plain MLX, and is named."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlx_paged import Engine, ops
from mlx_paged.attention import forward, paths, shared_prefixes
from mlx_paged.attention.prewarm import prewarm
from mlx_paged.ops import dispatch
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.server.metrics import engine_metrics
from tests.support.engine.emulated_gpu import LONG_CHUNK, HalfModel
from tests.support.engine.refusing_gpu import MESSAGE, RefusingGPU
from tests.support.fake_macs import fake_mac
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.ops.numpy_quantization import quantized_mlx_lm

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 37, 61)]
LONG = np.random.default_rng(0).integers(0, VOCAB, 530).tolist()
NUM_TOKENS = 5
KERNELS = "paged_attention", "matrix_attention", "merge_splits", "write_kv", "copy_blocks"
ATTENTION = KERNELS[:3]
SIMPLEST = {"write_kv": "write_elements", "copy_blocks": "copy_elements"}
NO_WRITE = "write_kv", "write_elements"
NO_FORM = ATTENTION, NO_WRITE, ("copy_blocks", "copy_elements")


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    yield
    for answers in (dispatch.forget, paths._forced_path.cache_clear):
        answers()


def complete(half: HalfModel, kv_bits=None, prompts=PROMPTS, prewarm=True) -> tuple[Engine, int]:
    """An engine after it has answered with a fork; and the near ties where its tokens differ from
    mlx-lm's."""
    engine = Engine(
        half.model,
        block_size=8,
        num_blocks=128,
        prefill_chunk=2 * LONG_CHUNK,
        kv_bits=kv_bits,
        prewarm=prewarm,
    )
    tokens: dict[int, list[int]] = {}
    ids = [engine.add_request(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    child, prefix = None, []
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
            if child is None and len(tokens.get(ids[0], ())) == 2:
                child = engine.fork(ids[0], max_tokens=3)
                prefix = list(engine.request(child).tokens)
    told = [*zip(prompts, (tokens[i] for i in ids), strict=True), (prefix, tokens[child])]
    assert engine.stats.faults == 0 and engine.stats.cow_clones > 0
    return engine, sum(not half.check(*each) for each in told)


def ran_on(gpu: RefusingGPU) -> set[str]:
    """The kernels that ran."""
    names = *KERNELS, *SIMPLEST.values()
    return {k for k in names if any(n.startswith(k) for n in gpu.runner.trace.kernels)}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_simplest_form_of_a_refused_kernel_runs(kernel, monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2)
    gpu = RefusingGPU(monkeypatch, kernel)
    prompts = [PROMPTS[0], LONG] if kernel == "merge_splits" else PROMPTS
    engine, num_ties = complete(half, prompts=prompts)
    ran = ran_on(gpu)
    assert num_ties <= 1 and kernel not in ran
    assert engine.stats.refused_kernels and engine.manager.pool.in_place
    for each, simplest in SIMPLEST.items():
        assert (each in ran, simplest in ran) == (each != kernel, each == kernel)
    assert ran & {*ATTENTION}
    # The simplest forms of attention are forms of these two kernels: of decodes, and of chunks.
    assert bool(ops.plain) == (kernel in ATTENTION[:2])


@pytest.mark.parametrize("kernels", NO_FORM, ids=" ".join)
def test_each_kernel_may_be_refused_in_all_forms(kernels, monkeypatch, caplog):
    half = HalfModel("llama", num_hidden_layers=2)
    gpu = RefusingGPU(monkeypatch, *kernels)
    with caplog.at_level(logging.WARNING):
        prompts = [PROMPTS[0], LONG] if kernels == ATTENTION else PROMPTS
        engine, num_ties = complete(half, prompts=prompts)
    ran, edits = ran_on(gpu), set() if kernels == NO_WRITE else {"write_kv", "copy_blocks"}
    assert not ran & {*kernels} and edits - {*kernels} <= ran
    assert num_ties <= 1
    refused = engine.stats.refused_kernels
    assert refused and all(name.startswith(kernels) for name in refused)
    assert ops.plain <= {*refused} and {name.split("_")[0] for name in ops.plain} == {
        kernels[-1].split("_")[0] if kernels != ATTENTION else "paged"
    }
    assert set(refused.values()) == {MESSAGE}
    pool = engine.manager.pool
    assert engine.lookahead == pool.changes_in_place == (kernels == ATTENTION)
    assert engine.metrics()["refused_kernels"] == refused
    assert sum(MESSAGE in record.getMessage() for record in caplog.records) == len(refused)
    families = {f.name: f for f in engine_metrics(engine, "tiny")}
    samples = families["mlx_paged_refused_kernels"].samples
    assert {sample.labels["kernel"] for sample in samples} == set(refused)


@pytest.mark.parametrize("prewarm", [True, None])
def test_what_is_refused_counts_in_the_first_pool_of_a_process(monkeypatch, prewarm):
    """And in the budget that is logged when the engine is made, as a server does."""
    half = HalfModel("llama", num_hidden_layers=2)
    RefusingGPU(monkeypatch, *NO_WRITE)
    mac = fake_mac(monkeypatch, "M4 Pro, 24 GB")
    monkeypatch.setattr("mlx_paged.kv.default_pool.USUAL_TOKENS", 1 << 20)
    monkeypatch.setattr("mlx_paged.runner.pooled_model.positions_of", lambda model: None)
    options: dict[str, Any] = {"block_size": 8, "cache_limit": 0, "prewarm": prewarm}
    small = Engine(half.model, num_blocks=8, **options).memory_budget
    of_step = small.step + small.gathered
    dispatch.forget()
    mac.available = (of_step + 20 * 2**20) * 16 // 5
    budgets = [Engine(half.model, **options).memory_budget for _ in range(2)]
    first, second = budgets
    assert first.bound == "the memory that is available"
    assert first.gathered == small.gathered > 0
    assert 0.9 * 20 * 2**20 < first.pool == second.pool
    assert first.pool + of_step <= mac.available * 5 // 16
    assert "+ gathered " in first.line


def test_a_write_by_elements_leaves_the_budget_as_it_is(monkeypatch):
    """The first engine of a process has the pool of a Mac that refuses nothing."""
    half = HalfModel("llama", num_hidden_layers=2)
    fake_mac(monkeypatch, "M4 Pro, 24 GB")
    budgets = []
    for refused in ((), ("write_kv",)):
        RefusingGPU(monkeypatch, *refused)
        budgets.append(Engine(half.model, block_size=8, cache_limit=0).memory_budget)
        assert bool(ops.refused) == bool(refused)
    assert budgets[0] == budgets[1] and budgets[1].gathered == 0


@pytest.mark.heavy
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_quantized_writes_may_be_refused(kv_bits, monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2, head_dim=32)
    gpu = RefusingGPU(monkeypatch, "write_quantized", "quantize_elements")
    with quantized_mlx_lm(kv_bits):
        engine, num_ties = complete(half, kv_bits)
    assert num_ties <= 1 and engine.stats.refused_kernels
    names = gpu.runner.trace.kernels
    assert any(name.startswith(("matrix_attention_k8", "matrix_attention_k6")) for name in names)
    assert not any(name.startswith(("write_quantized", "quantize")) for name in names)


@pytest.mark.heavy
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv_bits", [8, 6, 4])
def test_quantized_writes_have_a_simplest_form(kv_bits, monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2, head_dim=32)
    gpu = RefusingGPU(monkeypatch, "write_quantized")
    with quantized_mlx_lm(kv_bits):
        engine, num_ties = complete(half, kv_bits)
    assert num_ties <= 1 and engine.manager.pool.in_place and not ops.plain
    assert any(name.startswith("quantize_elements") for name in gpu.runner.trace.kernels)


@pytest.mark.heavy
def test_latent_writes_may_be_refused(monkeypatch):
    half = HalfModel("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=2)
    RefusingGPU(monkeypatch, *NO_WRITE)
    engine, num_ties = complete(half)
    assert num_ties <= 1 and engine.stats.refused_kernels


def test_a_variable_switches_all_kernels_off(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    half = HalfModel("llama", num_hidden_layers=2)
    gpu = RefusingGPU(monkeypatch)
    engine, num_ties = complete(half)
    assert num_ties <= 1 and not gpu.runner.trace.kernels
    assert not engine.stats.refused_kernels and forward.path_counts["paged"] == 0
    assert ops.kernel_for() == "reference"


@pytest.mark.heavy
def test_gathering_compiles_no_attention(monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2)
    kinds = probe(half.model).attentions
    gpu = RefusingGPU(monkeypatch)
    kernels = gpu.runner.trace.kernels
    prewarm(kinds, 8)
    assert any(name.startswith(ATTENTION) for name in kernels)
    kernels.clear()
    monkeypatch.setenv(paths.VARIABLE, "gather")
    paths._forced_path.cache_clear()
    prewarm(kinds, 8)
    assert kernels and not any(name.startswith(ATTENTION) for name in kernels)


@pytest.mark.heavy
def test_ragged_steps_need_few_pipelines(monkeypatch):
    """Those that an engine dispatches, and no others but kernels of four simdgroups, which take
    calls of many threadgroups; of shared keys those for many sequences."""
    monkeypatch.setattr(shared_prefixes, "FEWEST_SHARED_BYTES", 1)
    half = HalfModel("llama", num_hidden_layers=2)
    gpu = RefusingGPU(monkeypatch)
    pipelines = gpu.runner.trace.pipelines
    kinds = probe(half.model).attentions
    prewarm(kinds, 8)
    num_all = len(set(pipelines))
    pipelines.clear()
    prewarm(kinds, 8, only_ragged=True)
    warmed = set(pipelines)
    assert len(warmed) < num_all
    pipelines.clear()
    engine, _ = complete(half, prompts=[PROMPTS[0], PROMPTS[1], LONG], prewarm=False)
    engine.generate([LONG + PROMPTS[0]], max_tokens=1)  # a short chunk after a long prefix
    engine.generate([LONG, LONG + PROMPTS[0]], max_tokens=4)  # decodes that share keys
    of_shared = {name for name in {*pipelines, *warmed} if name.endswith("_23_1")}
    crowded = {name for name in warmed if "_s4_" in name}
    assert set(pipelines) - of_shared == warmed - of_shared - crowded
    assert of_shared & set(pipelines) and of_shared & warmed


def test_a_chunk_and_a_decode_are_computed_before_the_first_request(monkeypatch):
    model, computed, launch = tiny_model("jamba"), [], ModelRunner.launch

    def noted(runner, step, before):
        computed.append([(len(span), span.samples) for span in step.spans])
        return launch(runner, step, before)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    RefusingGPU(monkeypatch)
    engine = Engine(model, block_size=8, num_blocks=128, prefill_chunk=40)
    assert computed == [[(40, False)], [(1, True)]]
    assert engine.stats.prewarm_seconds > 0 and engine.stats.steps == 0
    engine.manager.check_integrity()
    assert engine.manager.blocks_in_use == 0
    (done,) = engine.generate(PROMPTS[:1], max_tokens=NUM_TOKENS)
    assert done.tokens == solo_greedy(model, PROMPTS[0], NUM_TOKENS)


def test_a_refusal_that_does_not_last_is_forgotten(monkeypatch):
    half = HalfModel("llama", num_hidden_layers=2)
    gpu, asked = RefusingGPU(monkeypatch), set()

    def refuses_once(launch: dict[str, Any]) -> str:
        is_first = launch["pipeline"] not in asked
        asked.add(launch["pipeline"])
        return MESSAGE if is_first else ""

    gpu.metal.refusal = refuses_once
    engine, _ = complete(half, prewarm=False)
    assert asked and not engine.stats.refused_kernels

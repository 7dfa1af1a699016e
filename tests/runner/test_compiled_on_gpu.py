"""Compiled decodes with the choices of a GPU, whose compiler takes every kernel or refuses some.
The CPU computes the steps."""

from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from bench.host_cost.gpu_answers import gpu_answers
from mlx_paged import Engine, _ext
from mlx_paged.attention import shared_prefixes
from mlx_paged.attention.forward import path_counts
from mlx_paged.ops import dispatch
from mlx_paged.runner import pooled_model
from mlx_paged.runner.batch import Layout
from mlx_paged.runner.buckets import Buckets
from mlx_paged.runner.compiled_decode import USES, CompiledDecode
from mlx_paged.runner.model_runner import ModelRunner
from scripts.compiled_decodes import is_compiled
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

SIZES = {"block_size": 16, "num_blocks": 200, "max_running": 4, "prewarm": False}
POSITIONS = 128 * 16


@pytest.fixture(autouse=True)
def answers_of_a_gpu() -> Iterator[None]:
    dispatch.forget()
    with gpu_answers():
        yield
    dispatch.forget()


def llama(dtype: mx.Dtype = mx.float32):
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=POSITIONS)
    model.set_dtype(dtype)
    return model


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def compile_decodes(engine: Engine, wanted: bool | None = None) -> bool:
    """Whether an engine that nobody asked before compiles them now."""
    traces = ModelRunner.compile_decodes.__wrapped__(engine.runner, wanted, 4)
    assert (traces is not None) == is_compiled(engine)
    return is_compiled(engine)


def test_a_table_is_at_most_twice_as_wide_as_its_context():
    buckets = Buckets.of_device(16)
    assert buckets.widths(100) == [32, 64, 128]
    assert buckets.width(32) == 32 == dispatch.SHORT_CONTEXT // 16
    assert all(buckets.width(columns) < 2 * columns for columns in range(33, 9000))
    assert Buckets.of_device(4).widths(128) == [128]


@pytest.mark.parametrize(("wanted", "is_faster"), [(True, 0), (None, 1), (None, 0), (False, 1)])
def test_decodes_are_compiled_if_asked_for_or_faster(monkeypatch, wanted, is_faster):
    def one_token(self, run, tokens, block):
        is_graph = run == self._run
        tried.append((is_graph, tokens[4].shape[1], tokens[2].item()))
        _, bits = original(self, run, tokens, block)
        return (1.0 if is_graph == is_faster else 2.0), bits

    original, tried = CompiledDecode._one_token, []
    monkeypatch.setattr(CompiledDecode, "_one_token", one_token)
    engine = Engine(llama(), **SIZES, compile=False)
    assert compile_decodes(engine, wanted) == (bool(is_faster) if wanted is None else wanted)
    short, long = [(False, 32, 1), (True, 32, 1)], [(False, 128, 1025), (True, 128, 1025)]
    assert tried[:8] == (2 * short + 2 * long if wanted is not False else [])
    # A plain step has no wider table than its context needs.
    assert set(tried[8:]) == ({(False, 65, 1025), (True, 128, 1025)} if wanted is None else set())
    assert wanted is not None or len(tried) >= 12


def test_the_first_pairs_which_compile_pipelines_do_not_decide(monkeypatch):
    def pair(self, width, own, states):
        pairs.append((width, own))
        _, differs = original(self, width, own, states)
        return 9.0 if pairs.count((width, own)) == 1 else 0.5, differs

    original, pairs = CompiledDecode._pair, []
    monkeypatch.setattr(CompiledDecode, "_pair", pair)
    monkeypatch.setattr("mlx_paged.runner.compiled_decode.MOST_SECONDS", 0.0)
    assert compile_decodes(Engine(llama(), **SIZES, compile=False))
    assert pairs[-2:] == [(128, 65)] * 2


def refuse(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Let the compiler refuse kernels of this family."""

    def takes(plan):
        return not any(kernel in each["kernel"] for each in plan()["launches"])

    monkeypatch.setattr(dispatch, "_compile", takes)
    dispatch.forget()


@pytest.mark.parametrize("kernel", ["attention", "merge_splits"])
def test_a_refused_kernel_keeps_decodes_plain(monkeypatch, kernel):
    """Gathered K/V would have the length of the widest table of its bucket. The kernel that merges
    splits is one of long contexts only."""

    refuse(monkeypatch, kernel)
    engine = Engine(llama(mx.float16), **SIZES, compile=True)
    assert engine.runner.why_plain == "gathered K/V has a length"


def test_gathers_of_another_engine_keep_nothing_plain(monkeypatch):
    """Another thread may compute at the same time."""

    def one_token(self, run, tokens, block):
        path_counts["gather"] += 1
        return original(self, run, tokens, block)

    original = CompiledDecode._one_token
    monkeypatch.setattr(CompiledDecode, "_one_token", one_token)
    assert is_compiled(Engine(llama(), **SIZES, compile=True))


def test_a_bucket_whose_kernels_are_refused_is_plain(monkeypatch, caplog):
    """It is wider than those that were tried."""
    monkeypatch.setattr("mlx_paged.runner.buckets.LONG_CONTEXT", 256)
    model = llama(mx.float16)
    engine = Engine(model, **SIZES, compile=True)
    assert is_compiled(engine)
    refuse(monkeypatch, "merge_splits")
    prompt = random_tokens(510)
    (done,) = engine.generate([prompt], max_tokens=6)
    graphs = {key[4]: graph is not None for key, graph in engine.runner.compiled._graphs.items()}
    assert graphs == {32: True, 64: False}
    assert done.tokens == solo_greedy(model, prompt, 6)
    assert not caplog.records


def test_pipelines_are_compiled_before_a_trace_asks_for_them(monkeypatch):
    calls = []
    for owner, name in ((pooled_model, "prewarm"), (CompiledDecode, "trace")):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name))
    Engine(llama(), **SIZES | {"prewarm": True}, compile=True)
    assert calls == ["prewarm", "trace"]


def sharing_prompts() -> list[list[int]]:
    first = random_tokens(600)
    return [first, *(first[:544] + random_tokens(40 + n, n) for n in (1, 2))]


@pytest.mark.parametrize("fewest_bytes", [1, 1 << 30])
def test_graphs_have_prefixes_only_where_enough_is_shared(monkeypatch, fewest_bytes):
    """Else every layer has the launch that reads them. Both kinds give mlx-lm's tokens."""

    def run(self, arrays):
        shared.append(arrays[5].shape[1])
        return original(self, arrays)

    original, shared = CompiledDecode._run, []
    monkeypatch.setattr(shared_prefixes, "FEWEST_SHARED_BYTES", fewest_bytes)
    monkeypatch.setattr(CompiledDecode, "_run", run)
    model, prompts = llama(), sharing_prompts()
    expected = [solo_greedy(model, prompt, 10) for prompt in prompts]
    engine = Engine(model, **SIZES, compile=True)
    done = engine.generate(prompts[:1], max_tokens=10) + engine.generate(prompts, max_tokens=10)
    assert [completion.tokens for completion in done] == [expected[0], *expected]
    assert (engine.stats.shared_keys > 0) == (fewest_bytes == 1)
    assert set(shared) == ({0, 3} if fewest_bytes == 1 else {0})


def test_a_size_with_prefixes_is_traced_at_its_third_use(monkeypatch):
    def noted(self, step):
        taken.append(takes(self, step))
        pairs.append(len(step.tokens) == 2 and step.figures.get("shared_keys", 0) > 0)
        return taken[-1]

    takes, taken, pairs = CompiledDecode.takes, [], []
    monkeypatch.setattr(shared_prefixes, "FEWEST_SHARED_BYTES", 1)
    monkeypatch.setattr(CompiledDecode, "takes", noted)
    first, *others = sharing_prompts()
    engine = Engine(llama(), **SIZES, compile=True)
    engine.generate([first], max_tokens=2)
    engine.generate(others, max_tokens=12)
    of_pairs = [took for took, is_pair in zip(taken, pairs, strict=True) if is_pair]
    assert of_pairs[:USES] == [False] * (USES - 1) + [True]
    assert len(of_pairs) > USES and all(of_pairs[USES:])


def test_steps_of_drafts_are_plain():
    """In a graph each of their rows would count as a sequence."""
    of_drafts = SimpleNamespace(
        tokens=[0] * 5, samples_all=True, decodes_only=False, layout=Layout.ROWS
    )
    engine = Engine(llama(), **SIZES, compile=True)
    assert not any(engine.runner.compiled.takes(of_drafts) for _ in range(USES + 1))


def simdgroups(rows: int, kv_heads: int, tokens: int, columns: int) -> int:
    """Of the launch that reads the keys, those that have some, at this context."""
    arrays = [mx.zeros((rows, 32, 1, 64)), *[mx.zeros((kv_heads, 2, 16, 64))] * 2]
    arrays += mx.zeros((rows, columns), mx.int32), mx.zeros(rows, mx.int32)
    arrays = [array.astype(mx.float16) if array.ndim == 4 else array for array in arrays]
    mx.eval(arrays)
    launch = _ext.metal.plan_attention(*arrays, scale=1.0)["launches"][0]
    (tiles, count, splits), size = launch["grid"], -(-columns * 16 // launch["grid"][2])
    return tiles * count * min(splits, -(-tokens // size)) * launch["threadgroup"][0] // 32


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_half_of_a_plain_steps_simdgroups_have_keys(rows, kv_heads):
    """Wherever the context is in its bucket."""
    buckets = Buckets.of_device(16)
    for tokens in (40, 513, 700, 1025, 3000, 4097, 8193, 16385, 33000, 70000):
        columns = -(-tokens // 16)
        plain = simdgroups(rows, kv_heads, tokens, columns)
        assert 2 * simdgroups(rows, kv_heads, tokens, buckets.width(columns)) >= plain

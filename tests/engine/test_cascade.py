"""Sequences that begin with the same blocks are computed together: every token stays the same."""

from random import Random

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.model_probe import Batching
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models.tiny_models import CONFIGS, VOCAB, solo_greedy, tiny_model
from tests.support.simulation.injected_drafts import InjectedDrafter, take_every_guess
from tests.support.simulation.solo_runs import MlxLmSolo

RNG = np.random.default_rng(0)
BASE = RNG.integers(0, VOCAB, 640).tolist()
NUM_TOKENS = 8


def tree(system: int, conversation: int, count: int = 3) -> list[list[int]]:
    """Prompts with one system prompt, of which all but the first continue one conversation."""
    tails = [RNG.integers(0, VOCAB, 3 + 5 * i).tolist() for i in range(count)]
    return [BASE[: conversation if i else system] + tail for i, tail in enumerate(tails)]


def make_engine(model, **options) -> Engine:
    usual = {"block_size": 16, "num_blocks": 320, "prefill_chunk": 256, "max_running": 6}
    engine = Engine(model, **(usual | options))
    scheduler = engine.scheduler
    if scheduler.decoding.gives_several:  # guesses of which most are right, however fast it is
        drafter = InjectedDrafter(Random(1), MlxLmSolo(model, VOCAB), 0.7)
        scheduler.decoding = Speculation([drafter], scheduler.allocator, scheduler.budget)
        take_every_guess(scheduler.decoding)
    return engine


def run(engine: Engine, prompts: list[list[int]], **options) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities; the first prompt is known before the others come."""
    first = engine.generate(prompts[:1], **options)
    done = [*first, *engine.generate(prompts[1:] + prompts[:1], **options)]
    engine.manager.check_integrity()
    assert engine.manager.blocks_in_use == 0
    return [(completion.tokens, completion.logprobs) for completion in done]


def together(model, prompts: list[list[int]], engine_options=None, **options):
    """What engines give with and without; the answers must have the same bits."""
    alone, cascade = (
        make_engine(model, cascade=on, **(engine_options or {})) for on in (False, True)
    )
    answers = [run(engine, prompts, **options) for engine in (alone, cascade)]
    assert answers[0] == answers[1]
    assert cascade.stats.shared_keys > alone.stats.shared_keys == 0
    assert sum(tick.shared_keys for tick in cascade.ticks) == cascade.stats.shared_keys
    return cascade, [tokens for tokens, _ in answers[0]]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_architecture(model_type):
    model, prompts = tiny_model(model_type), tree(150, 210)
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    engine = make_engine(model)
    answers = run(engine, prompts, max_tokens=NUM_TOKENS)
    assert [tokens for tokens, _ in answers] == [*expected[:1], *expected[1:], expected[0]]
    assert answers == run(make_engine(model, cascade=False), prompts, max_tokens=NUM_TOKENS)
    is_shared = engine.runner.batching is not Batching.SINGLE and engine.runner.pool.n_layers > 0
    assert (engine.stats.shared_keys > 0) == is_shared


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_dtypes_pools_and_graphs(compiled, dtype, kv_bits):
    model = tiny_model("llama")
    model.set_dtype(getattr(mx, dtype))
    options = {"compile": compiled, "kv_bits": kv_bits}
    engine, _ = together(model, tree(560, 600, 5), options, max_tokens=NUM_TOKENS)
    assert (engine.runner.compiled is not None) == compiled


def test_samples_and_forks(llama):
    engines = [make_engine(llama, cascade=on) for on in (False, True)]
    found = []
    for engine in engines:
        samples = engine.sample([BASE[:300]], 4, max_tokens=20, temperature=0.9, seed=3)
        parent = engine.add_request(BASE[:260], max_tokens=30)
        tokens = []
        for _ in range(12):
            tokens += engine.step()
        children = [engine.fork(parent, max_tokens=18, temperature=1.1, seed=i) for i in range(3)]
        grandchild = engine.fork(children[0], max_tokens=9, temperature=0.7, seed=8)
        while engine.has_work:
            tokens += engine.step()
            engine.manager.check_integrity()
        assert grandchild in {output.request_id for output in tokens}
        samples = [completion.tokens for group in samples for completion in group]
        found.append((samples, [(o.request_id, o.token, o.logprob) for o in tokens]))
    assert found[0] == found[1]
    assert engines[1].stats.shared_keys > 0 and engines[1].stats.cow_clones > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_drafts(llama, compiled, monkeypatch):
    """Rows with several tokens beside rows with one. In a graph empty sequences come first."""
    run_graph, num_shared = CompiledDecode._run, 0

    def checked(graph, arrays):
        nonlocal num_shared
        lens, tables, (order, common) = (np.array(arrays[i]) for i in (2, 4, 5))
        for place in np.flatnonzero(common):
            pair = order[place - 1 : place + 1]
            a, b = tables[pair, : common[place] // 16]
            assert np.array_equal(a, b) and lens[pair].min() >= common[place]
            num_shared += len(arrays) > 6
        return run_graph(graph, arrays)

    monkeypatch.setattr(CompiledDecode, "_run", checked)
    options = {"speculate": "ngram", "num_draft_tokens": 4, "compile": compiled}
    others = [BASE[300:] + tail for tail in ([1], [2, 3], [4])]
    prompts = [prompt for pair in zip(tree(300, 330), others, strict=True) for prompt in pair]
    engine, _ = together(llama, prompts, options, max_tokens=40)
    assert engine.stats.drafts > engine.stats.accepted_drafts > 0
    assert not compiled or num_shared > 0


def test_preemption_in_the_middle_of_a_group(llama):
    prompts = tree(300, 330, 6)
    engine, _ = together(llama, prompts, {"num_blocks": 30, "max_running": 6}, max_tokens=40)
    assert engine.stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_windows(model_type):
    """Windows that leave the shared keys one after the other."""
    model = tiny_model(model_type)
    prompts = [BASE[:560] + tail[560:] for tail in tree(560, 560, 4)]
    together(model, prompts, {"compile": False}, max_tokens=60)

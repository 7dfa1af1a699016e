"""Drafts in compiled decodes: rows of a graph that is traced when it comes often."""

from types import SimpleNamespace

import mlx_lm
import numpy as np
import pytest

from mlx_paged import Engine, demo_model_path
from mlx_paged.runner import compiled_decode
from mlx_paged.runner.batch import Layout
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.scheduler.speculation import Speculation
from scripts.compiled_decodes import (
    stored,
)
from tests.support.models.architectures import VOCAB, build
from tests.support.simulation.injected_drafts import HalfRight

SMALL = {"block_size": 4, "num_blocks": 64, "max_running": 4}


def random_tokens(length: int) -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, length).tolist()


def completed(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of prompts that arrive one after the other."""
    waiting, ids, done = [*prompts], [], {}
    while waiting or engine.has_work:
        if waiting:
            ids.append(engine.add_request(waiting.pop(0), max_tokens=24))
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    return [(done[i].tokens, done[i].logprobs) for i in ids]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_drafts_are_rows_of_a_compiled_step(monkeypatch, caplog, name):
    def three(speculation, likely):  # not as many as this machine's speed makes worthwhile
        left = {r: r.params.max_tokens - r.num_generated - 1 for r in likely}
        return {request: min(3, count) for request, count in left.items() if count > 0}

    def run(self, batch, terms):
        drafted.append(not batch.decodes_only)
        return call(self, batch, terms)

    given = [random_tokens(length) for length in (3, 5, 9)]
    plain = completed(Engine(build(name), **SMALL), given)
    right = {len(prompt): tokens for prompt, (tokens, _) in zip(given, plain, strict=True)}
    call, drafted = CompiledDecode.__call__, list[bool]()
    monkeypatch.setattr(Speculation, "_depths", three)
    monkeypatch.setattr(CompiledDecode, "__call__", run)
    found = []
    for flag in (True, False):
        engine = Engine(build(name), **SMALL, compile=flag, speculate="ngram")
        engine.scheduler.decoding.drafters[0] = HalfRight(right)
        found.append((completed(engine, given), stored(engine)))
        assert [tokens for tokens, _ in found[-1][0]] == [tokens for tokens, _ in plain]
        assert engine.stats.drafts > engine.stats.accepted_drafts > 5
    assert found[0] == found[1]
    assert sum(drafted) > 2
    assert not caplog.records


def test_drafts_are_traced_when_they_come_often(monkeypatch):
    def batch(rows, layout=Layout.ROWS):
        return SimpleNamespace(
            tokens=[0] * rows, samples_all=True, decodes_only=False, layout=layout
        )

    engine = Engine(build("llama"), **SMALL, compile=True)
    takes = engine.runner.compiled.takes
    assert [takes(batch(5)) for _ in range(4)] == [False, False, True, True]
    assert not takes(batch(4, Layout.CHUNK)) and not any(takes(batch(33)) for _ in range(5))
    monkeypatch.setattr(compiled_decode, "MOST_RAGGED_GRAPHS", 2)
    assert [takes(batch(6)) for _ in range(3)] == [False, False, True]
    assert not any(takes(batch(7)) for _ in range(5))
    assert takes(batch(5)) and takes(batch(6))
    monkeypatch.setattr(compiled_decode, "max_paged_queries", lambda: 0)
    takes = Engine(build("llama"), **SMALL, compile=True).runner.compiled.takes
    assert not any(takes(batch(5)) for _ in range(5))


def test_a_request_may_be_proposed_for_again_without_a_new_token():
    """Its drafts found no block, or it was preempted and admitted again."""
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    engine = Engine(model, tokenizer, num_blocks=64, draft_model=model, lookahead=False)
    request = engine.request(engine.add_request("class Stack:", max_tokens=30))
    for _ in range(4):
        engine.step()
    drafter = engine.scheduler.decoding.drafters[0]
    first = drafter.propose([request], [3])
    assert drafter.propose([request], [3]) == first and len(first[0]) == 3
    assert drafter.likelihood(request)[0] > 0

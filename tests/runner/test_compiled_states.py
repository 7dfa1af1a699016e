"""Compiled decodes of models with recurrent layers: states are arguments of the graph."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.attention.forward import path_counts
from mlx_paged.runner.batch import row_bucket
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.recurrent_states import RecurrentStates
from scripts.compiled_decodes import compare, course, is_compiled, num_traces
from scripts.support_matrix import AT_SNAPSHOTS, YES
from tests.runner.test_architectures import (
    BLOCK_SIZE,
    IS_SERVED,
    LONG,
    MIDDLE,
    OPTIONS,
    SHORT,
    TABLE,
    TOLERANCE,
    Solo,
    assert_greedy,
    run,
)
from tests.support.models.architectures import VOCAB, build

RECURRENT = [name for name in IS_SERVED if TABLE[name][4] == AT_SNAPSHOTS]
COMPILED = [name for name in RECURRENT if TABLE[name][6] == YES]
KINDS = ["lfm2", "mamba", "nemotron_h", "qwen3_5", "jamba", "rwkv7", "recurrent_gemma"]
SMALL = {"block_size": 4, "num_blocks": 64, "max_running": 4}


def prompts(count: int, length: int = 5) -> list[list[int]]:
    return np.random.default_rng(1).integers(0, VOCAB, (count, length)).tolist()


@pytest.fixture(scope="module", params=COMPILED)
def served(request) -> Solo:
    return Solo(request.param)


def compiled_engine(solo: Solo, **options) -> Engine:
    engine = solo.engine(compile=True, prewarm=False, **options)
    assert is_compiled(engine)
    return engine


def test_all_are_compiled_but_those_that_gather():
    assert len(RECURRENT) >= 25
    assert {TABLE[name][6] for name in set(RECURRENT) - set(COMPILED)} == {
        "gathered K/V has a length"
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", COMPILED)
def test_tokens_logprobs_and_bytes_are_those_of_plain_decodes(name):
    """With requests that join, leave, fork and are preempted."""
    assert compare(build(name)).startswith("same")


@pytest.mark.sampled(9)
def test_requests_that_come_and_go_have_mlx_lms_logits(served):
    for prompt, completion in run(compiled_engine(served), {0: [MIDDLE], 3: [SHORT, LONG]}):
        assert_greedy(served, prompt, completion)


@pytest.mark.sampled(9)
def test_drawn_samples_of_one_prompt_part_ways(served):
    engine = compiled_engine(served)
    (samples,) = engine.sample([MIDDLE], 3, temperature=2.0, seed=0, **OPTIONS)
    assert len({tuple(sample.tokens) for sample in samples}) == 3
    assert max(served.error(MIDDLE, sample) for sample in samples) < TOLERANCE


@pytest.mark.sampled(9)
def test_a_prefix_goes_on_from_a_snapshot(served):
    engine = compiled_engine(served)
    engine.generate([LONG, LONG[: 2 * BLOCK_SIZE] + SHORT], max_tokens=1)
    prompt = LONG[: 2 * BLOCK_SIZE] + SHORT[::-1]  # a state is kept where two prompts depart
    (completion,) = engine.generate([prompt], **OPTIONS)
    assert_greedy(served, prompt, completion)
    assert completion.cached_prompt_tokens == 2 * BLOCK_SIZE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_step_runs_no_code_of_the_model(name, monkeypatch):
    engine = Engine(build(name), **SMALL, compile=True)
    before = num_traces(engine)
    for prompt in prompts(3):
        engine.add_request(prompt, max_tokens=20)
    for _ in range(5):
        engine.step()
    monkeypatch.setattr(CompiledDecode, "_plain", lambda *_: pytest.fail("a plain forward"))
    path_counts.clear()
    for _ in range(8):
        engine.step()
    assert not path_counts
    assert num_traces(engine) == before


def poisoned(states: RecurrentStates, state_ids, padding: int = 0) -> None:
    """NaN in the states of all rows of padding, at each step."""
    load(states, state_ids, padding)
    if padding:
        states.loaded = [
            [a if a is None else mx.concatenate([a[:-padding], _nan(a[-padding:])]) for a in layer]
            for layer in states.loaded
        ]


def _nan(rows: mx.array) -> mx.array:
    is_float = mx.issubdtype(rows.dtype, mx.floating)
    return mx.full(rows.shape, mx.nan if is_float else 1, rows.dtype)


load = RecurrentStates.load


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*KINDS, "longcat_flash_ngram"])
def test_padding_reaches_no_request(name, monkeypatch):
    assert row_bucket(33) == 34
    found = []
    for flag in (False, True):
        monkeypatch.setattr(RecurrentStates, "load", poisoned if flag else load)
        options = {"compile": flag, "prewarm": False}
        engine = Engine(build(name), block_size=4, num_blocks=300, max_running=33, **options)
        done = engine.generate(prompts(33), max_tokens=8)
        assert engine.stats.faults == 0
        found.append([(each.tokens, each.logprobs) for each in done])
    assert found[0] == found[1]


def test_states_that_grow_are_computed_plainly(monkeypatch):
    """The first tokens of longcat_flash_ngram's context, in a batch with padding."""
    computed, takes = [], CompiledDecode.takes

    def record(self, batch):
        computed.append((len(batch.seq_ids), takes(self, batch)))
        return computed[-1][1]

    monkeypatch.setattr(CompiledDecode, "takes", record)
    options = {"block_size": 4, "num_blocks": 300, "max_running": 33, "prewarm": False}
    found = []
    for flag in (False, True):
        engine = Engine(build("longcat_flash_ngram"), **options, compile=flag)
        done = engine.generate([[i] for i in range(33)], max_tokens=8)
        found.append([(each.tokens, each.logprobs) for each in done])
    assert found[0] == found[1]
    assert {(33, True), (33, False)} <= set(computed)


class OwnFunction(nn.Module):
    """A layer with a compiled function of its own, which keeps its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._function: Any = None

    def __call__(self, x: mx.array) -> mx.array:
        if self._function is None:
            self._function = mx.compile(lambda x: 2.0 * self.layer(x))
        return self._function(x)


def test_a_layer_that_compiles_its_own_function_stays_plain():
    """The function has the parameters as constants, which are arguments of the graph."""
    found = []
    for flag in (True, False):
        model = build("lfm2")
        layer = model.model.layers[0].feed_forward
        layer.w1 = OwnFunction(layer.w1)
        engine = Engine(model, **SMALL, compile=flag, cpu_linear=False)
        assert not is_compiled(engine)
        if flag:
            assert engine.runner.why_plain == "MLX cannot trace a step"
        found.append([done.tokens for done in engine.generate(prompts(3), max_tokens=9)])
    assert found[0] == found[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3n"])
def test_functions_that_a_model_compiles_keep_their_bits(name):
    """They round otherwise than their ops alone."""
    engine, done = course(build(name), True)
    assert is_compiled(engine)
    assert done == course(build(name), False)[1]


def test_a_lost_state_is_noticed(monkeypatch):
    """By the check of one token, when the engine is made."""
    traced = CompiledDecode._traced

    def forget(self, arrays, handles, states, *parameters):
        scores, handles, _, hidden = traced(self, arrays, handles, states, *parameters)
        return scores, handles, states, hidden

    monkeypatch.setattr(CompiledDecode, "_traced", forget)
    engine = Engine(build("lfm2"), **SMALL, compile=True)
    assert engine.runner.why_plain == "a compiled step has other bits"


def test_states_stay_joined_between_steps(monkeypatch):
    """Nothing is split or copied while the same requests decode."""
    engine = Engine(build("lfm2"), **SMALL, compile=True)
    ids = [engine.add_request(prompt, max_tokens=12) for prompt in prompts(3)]
    for _ in range(5):
        engine.step()
    is_same = []

    def compare_loaded(states: RecurrentStates, state_ids, padding: int = 0) -> None:
        left = states.arrays(state_ids)
        load(states, state_ids, padding)
        is_same.append([id(a) for layer in states.loaded for a in layer] == [*map(id, left)])

    monkeypatch.setattr(RecurrentStates, "load", compare_loaded)
    for _ in range(4):
        engine.step()
    assert is_same == [True] * 4
    newest = [engine.manager.allocator.state(request_id).id for request_id in ids]
    assert len(engine.runner.states.arrays(newest)) == 1

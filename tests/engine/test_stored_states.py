"""Recurrent states that are kept in 8 bits: what a hit computes, what memory they take, and which
states stay as they were computed."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Completion, Engine
from mlx_paged.runner.recurrent_states import _Stored
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import tiny_model

BLOCK = 8
KINDS = ("qwen3_next", "jamba", "mamba2", "nemotron_h", "lfm2")
NUM_PROMPT, NUM_NEW = 43, 7
KNOWN = NUM_PROMPT // BLOCK * BLOCK
"""Tokens of a prompt that a longer one finds: a snapshot is at the end of its last full block."""
TOLERANCE = 1e-4
"""Largest difference of log-probabilities from mlx-lm's with states that are rounded the same."""
MOST_KLD = 2e-4
"""Largest KLD of a next token's distribution that rounding causes in these models, in nats."""


def text(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, num_tokens).tolist()


def make(model: nn.Module, **options) -> Engine:
    defaults = {"block_size": BLOCK, "num_blocks": 64, "prefill_chunk": 32, "snapshot_bits": 8}
    return Engine(model, **(defaults | options))


def rounded(state: mx.array) -> mx.array:
    """A state in 8 bits, in float64, row by row: a row has 16 elements or more."""
    values, length = np.array(state, np.float64), 1
    for axis in reversed(state.shape[1:]):
        length *= axis if length < 16 else 1
    rows = values.reshape(-1, length)
    steps = np.abs(rows).max(axis=1, keepdims=True) / 125
    codes = np.rint(np.divide(rows, steps, where=steps > 0, out=np.zeros_like(rows)))
    return mx.array((codes * steps).reshape(values.shape).astype(np.float32))


def distributions(model: nn.Module, prompt: list[int], tokens: list[int], at: int) -> np.ndarray:
    """mlx-lm's log-probabilities of the tokens after a prompt; the states after the first `at`
    tokens of the prompt are rounded. 0: none are."""
    cache = model.make_cache()
    if at:
        model(mx.array([prompt[:at]]), cache=cache)
        for leaf in cache:
            if hasattr(leaf, "cache"):
                leaf.cache = [a if a is None else rounded(a) for a in leaf.cache]
    logits = model(mx.array([prompt[at:] + tokens[:-1]]), cache=cache)[0, -len(tokens) :]
    found = logits.astype(mx.float32)
    return np.array(found - mx.logsumexp(found, axis=-1, keepdims=True), np.float64)


def hit(engine: Engine, prompt: list[int]) -> Completion:
    """The completion of a prompt."""
    (completion,) = engine.generate([prompt], max_tokens=6)
    engine.manager.check_integrity()
    return completion


def differences(model: nn.Module, prompt: list[int], completion: Completion, at: int) -> np.ndarray:
    """Of the log-probabilities of a completion from mlx-lm's with states rounded `at` a place."""
    expected = distributions(model, prompt, completion.tokens, at)
    rows = np.arange(len(completion.tokens))
    return np.abs(expected[rows, completion.tokens] - completion.logprobs)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_hit_goes_on_from_the_rounded_states(name, lookahead):
    model, prompt = build(name), text(NUM_PROMPT, 1)
    engine = make(model, lookahead=lookahead)
    first = hit(engine, prompt)
    # Until a prompt goes on from a snapshot, all is as it is in mlx-lm.
    assert differences(model, prompt, first, at=0).max() < TOLERANCE
    longer = prompt + text(NUM_NEW, 2)
    second = hit(engine, longer)
    assert second.cached_prompt_tokens == KNOWN
    assert differences(model, longer, second, at=KNOWN).max() < TOLERANCE
    exact = distributions(model, longer, second.tokens, at=0)
    found = distributions(model, longer, second.tokens, at=KNOWN)
    kld = (np.exp(exact) * (exact - found)).sum(axis=-1)
    assert 1e-12 < kld.max() < MOST_KLD


@pytest.mark.parametrize("name", KINDS)
def test_the_ledger_counts_the_bytes_that_are_there(name):
    model = build(name)
    engines = {bits: make(model, snapshot_bits=bits) for bits in (None, 8)}
    of_one = {}
    for bits, engine in engines.items():
        for seed in range(3):
            hit(engine, text(NUM_PROMPT, seed))
        released, rested = engine.scheduler.take_released(), engine.scheduler.take_rested()
        engine.runner.release(released, rested)  # as the next step does
        states = engine.manager.allocator.states
        kept = [engine.runner.states._held[i][0] for i in states.snapshots.state_ids()]
        held = sum(
            a.nbytes
            for each in kept
            for a in (
                each.stored.arrays
                if bits
                else [a for layer in each.states for a in layer if a is not None]
            )
        )
        (line,) = [each for each in states.holdings() if each.name == "snapshots"]
        assert line.num_bytes == held > 0
        assert line.limit == states.snapshots.max_snapshots * held // len(kept)
        of_one[bits] = held / len(kept)
    assert of_one[None] >= 3 * of_one[8]


def test_the_same_memory_keeps_more_of_them():
    model = build("jamba")
    of_one = make(model).manager.allocator.states._state_bytes
    most = [
        make(
            model, snapshot_memory=6 * of_one, snapshot_bits=bits
        ).manager.allocator.states.snapshots.max_snapshots
        for bits in (None, 8)
    ]
    assert most[0] == 6 and most[1] >= 18


def test_the_state_of_a_request_that_runs_or_waits_is_not_rounded():
    """Nor that of a request that waits for more tokens, of a fork, or between two chunks."""
    model, prompts = build("jamba"), [text(NUM_PROMPT + 3 * i, 10 + i) for i in range(4)]
    engine = make(model, max_running=4, prefill_chunk=16)
    ids = [engine.add_request(prompt, max_tokens=5 + 2 * i) for i, prompt in enumerate(prompts)]
    kept = engine.add_request(text(21, 20), max_tokens=2, keep=True)
    done = {}
    states, held = engine.manager.allocator.states, engine.runner.states._held
    num_steps = 0
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
        num_steps += 1
        resting = {i for i, (joined, _) in held.items() if isinstance(joined, _Stored)}
        # Nobody has found anything, so a state in 8 bits is that of a snapshot alone.
        assert resting <= {*states.snapshots.state_ids()}
        assert all(states._holders[i] == 1 for i in resting if i in states._holders)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert differences(model, prompt, done[request_id], at=0).max() < TOLERANCE
    branch = engine.fork(kept, max_tokens=4)
    before = list(engine.request(branch).tokens)
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert differences(model, before, done[branch], at=0).max() < TOLERANCE
    engine.release(kept)
    assert num_steps > 10
    engine.manager.check_integrity()


@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_a_snapshot_comes_back_from_the_disk_as_it_was(name, tmp_path):
    """After it was evicted, and after a restart."""
    model, prompt = build(name), text(NUM_PROMPT, 1)
    for num_engine in range(2):
        engine = make(model, kv_disk=tmp_path, num_blocks=16, prewarm=False)
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0  # always read
        if num_engine == 0:
            hit(engine, prompt)
            while engine.copy_when_idle():
                pass
            for seed in range(20, 26):  # they evict the prompt
                hit(engine, text(90, seed))
        longer = prompt + text(NUM_NEW, 2 + num_engine)
        found = hit(engine, longer)
        assert engine.metrics()["kv_disk"]["hits"] > 0
        assert found.cached_prompt_tokens == KNOWN
        assert differences(model, longer, found, at=KNOWN).max() < TOLERANCE
        released, rested = engine.scheduler.take_released(), engine.scheduler.take_rested()
        engine.runner.release(released, rested)  # as the next step does
        (line,) = [e for e in engine.manager.allocator.states.holdings() if e.name == "snapshots"]
        held = engine.runner.states._held.values()
        assert line.num_bytes == sum(
            a.nbytes
            for joined, _ in held
            if isinstance(joined, _Stored)
            for a in joined.stored.arrays
        )
        engine.close()


@pytest.mark.parametrize("first", [None, 8])
def test_records_of_other_bits_are_not_read(first, tmp_path):
    model, prompt = build("lfm2"), text(NUM_PROMPT, 1)
    found = []
    for bits in (first, 8 if first is None else None, first):
        engine = make(model, kv_disk=tmp_path, snapshot_bits=bits, prewarm=False)
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
        found.append(hit(engine, [*prompt, bits or 1]).cached_prompt_tokens)
        engine.close()
    assert found == [0, 0, KNOWN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_bits": 4}, "snapshot_bits is 4: expected 8 or None"),
        ({"snapshot_bits": True}, "snapshot_bits is True: expected 8 or None"),
        ({"snapshot_bits": "8"}, "snapshot_bits is '8': expected 8 or None"),
        ({"snapshot_bits": 8.0}, "snapshot_bits is 8.0: expected 8 or None"),
        ({}, "snapshot_bits is 8: expected None: the model has no recurrent layers"),
        ({"prefix_cache": False}, "snapshot_bits is 8: expected None with prefix_cache=False"),
        ({"snapshot_memory": 0}, "snapshot_bits is 8: expected None with .* snapshot_memory=0"),
    ],
)
def test_what_cannot_be_stored_so_is_refused(options, message):
    with pytest.raises(ValueError, match=rf"^\[Engine\] {message}"):
        make(tiny_model("llama"), **options)


def test_a_draft_model_without_recurrent_layers_drafts_beside():
    model, draft, prompt = build("jamba"), build("llama"), text(NUM_PROMPT, 1)
    engine = make(model, draft_model=draft)
    assert differences(model, prompt, hit(engine, prompt), at=0).max() < TOLERANCE
    longer = prompt + text(NUM_NEW, 2)
    found = hit(engine, longer)
    assert found.cached_prompt_tokens > 0
    assert differences(model, longer, found, found.cached_prompt_tokens).max() < TOLERANCE

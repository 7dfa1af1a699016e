"""The engine as its callers use it: requests, streams, ends, errors, statistics."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, FinishReason, SamplingParams
from tests.support.models.tiny_models import VOCAB, solo_greedy

INTEGERS = (
    *("block_size", "kv_memory", "num_blocks", "max_kv_tokens", "max_running", "prefill_chunk"),
    *("seed", "snapshot_memory", "cache_limit"),
)
"""Arguments of an engine."""
PROMPT = [5, 9, 77, 3, 21, 64, 8]


@pytest.mark.mac
def test_max_tokens_ends_with_length(engine):
    (completion,) = engine.generate([PROMPT], max_tokens=5)
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.tokens) == len(completion.logprobs) == 5
    assert completion.prompt_tokens == len(PROMPT)


@pytest.mark.mac
def test_a_stop_token_ends_the_request_and_is_kept(model, engine):
    expected = solo_greedy(model, PROMPT, 10)
    stop = expected[4]
    (completion,) = engine.generate([PROMPT], max_tokens=10, stop_token_ids=[stop])
    assert completion.finish_reason is FinishReason.STOP
    assert completion.tokens == expected[: expected.index(stop) + 1]


@pytest.mark.mac
def test_logprobs_are_those_of_the_whole_context(model, engine):
    (completion,) = engine.generate([PROMPT], max_tokens=8)
    tokens = PROMPT + completion.tokens
    logits = np.array(model(mx.array([tokens]))[0], np.float64)[len(PROMPT) - 1 : -1]
    logsumexp = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    expected = logits[np.arange(8), completion.tokens] - logsumexp
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


@pytest.mark.mac
def test_log_probabilities_are_those_of_tokens_that_may_come(engine):
    def allow(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) < 2, logits, -mx.inf)

    (done,) = engine.generate([PROMPT], max_tokens=3, logprobs=4, logits_processors=[allow])
    assert [sorted(token for token, _ in top) for top in done.top_logprobs] == [[0, 1]] * 3
    assert np.isfinite([logprob for top in done.top_logprobs for _, logprob in top]).all()
    (done,) = engine.generate([PROMPT], max_tokens=3, logit_bias={1: 1e300}, logprobs=4)
    assert done.tokens == [1] * 3 and np.isfinite(done.logprobs).all()


@pytest.mark.mac
def test_a_seeded_request_does_not_depend_on_its_company(model):
    sampled = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=11)
    alone = Engine(model, block_size=4, num_blocks=64).generate([PROMPT], sampled)[0]

    rng = np.random.default_rng(0)
    others = [rng.integers(0, VOCAB, 12).tolist() for _ in range(6)]
    crowded = Engine(model, block_size=8, num_blocks=40, prefill_chunk=5, max_running=4)
    busy = SamplingParams(max_tokens=20, temperature=1.3, top_k=9)
    params = [busy, busy, busy, sampled, SamplingParams(max_tokens=20), busy, busy]
    done = crowded.generate([*others[:3], PROMPT, *others[3:]], params)
    assert done[3].tokens == alone.tokens
    assert alone.tokens != solo_greedy(model, PROMPT, 20)


@pytest.mark.mac
def test_unseeded_requests_repeat_with_the_engines_seed_and_differ_from_each_other(model):
    def run(seed):
        engine = Engine(model, block_size=4, num_blocks=64, seed=seed)
        return [c.tokens for c in engine.generate([PROMPT] * 3, max_tokens=12, temperature=1.0)]

    assert run(1) == run(1) != run(2)
    assert len({tuple(tokens) for tokens in run(1)}) == 3


def test_a_stream_yields_tokens_while_other_requests_advance(model, engine):
    other = engine.add_request(PROMPT[::-1], max_tokens=50)
    outputs = list(engine.stream(PROMPT, max_tokens=6))
    assert [output.token for output in outputs] == solo_greedy(model, PROMPT, 6)
    assert [output.completion is not None for output in outputs] == [False] * 5 + [True]
    assert engine.request(other).num_generated >= 5


@pytest.mark.mac
def test_two_streams_read_in_turns(model, engine):
    a = engine.stream(PROMPT, max_tokens=6)
    b = engine.stream(PROMPT[::-1], max_tokens=9)
    first = [next(a).token, next(b).token, next(a).token]
    rest_b = [output.token for output in b]
    rest_a = [output.token for output in a]
    assert [first[0], first[2], *rest_a] == solo_greedy(model, PROMPT, 6)
    assert [first[1], *rest_b] == solo_greedy(model, PROMPT[::-1], 9)
    assert engine.manager.blocks_in_use == 0


def test_closing_a_stream_frees_its_blocks(engine):
    stream = engine.stream(PROMPT, max_tokens=50)
    next(stream)
    assert engine.manager.blocks_in_use > 0
    stream.close()
    assert engine.manager.blocks_in_use == 0 and not engine.has_work


@pytest.mark.mac
def test_abort_frees_at_once_and_leaves_others_alone(model, engine):
    doomed = engine.add_request(PROMPT, max_tokens=30)
    kept = engine.add_request(PROMPT[::-1], max_tokens=10)
    waiting = engine.add_request(PROMPT, max_tokens=30)
    engine.step()
    engine.step()
    completion = engine.abort(doomed)
    assert completion.finish_reason is FinishReason.ABORT and len(completion.tokens) == 2
    assert engine.abort(waiting).finish_reason is FinishReason.ABORT
    assert engine.abort(doomed) is None
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert done[kept].tokens == solo_greedy(model, PROMPT[::-1], 10)
    engine.manager.check_integrity()


def test_generate_reports_every_token_as_it_comes(engine):
    seen = []
    done = engine.generate(
        [PROMPT, PROMPT[::-1]], max_tokens=4, on_output=lambda o: seen.append(o.token)
    )
    assert sorted(seen) == sorted(done[0].tokens + done[1].tokens)


def test_one_bad_prompt_means_that_none_of_the_batch_runs(engine):
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate([PROMPT, []], max_tokens=4)
    assert not engine.has_work and engine.stats.steps == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add_request([]), "prompt is empty: expected at least one token"),
        (lambda e: e.add_request([1, VOCAB]), rf"token {VOCAB}: expected ids in \[0, {VOCAB}\)"),
        (lambda e: e.add_request([-1]), "token -1"),
        (lambda e: e.add_request("text"), "prompt is text: expected token ids or a tokenizer"),
        (lambda e: e.add_request([1], stop=["x"]), "expected a tokenizer"),
        (lambda e: e.add_request([1], max_tokens=0), "max_tokens is 0: expected an integer >= 1"),
        (lambda e: e.add_request([1], SamplingParams(), top_k=3), "both params and options"),
        (lambda e: e.add_request([1] * 300), "expected a shorter prompt"),
        (lambda e: e.generate([[1], [2]], [SamplingParams()]), "2 prompts but 1 params"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"kv_memory": 100}, "kv_memory is 100 bytes, but one block of 16 tokens takes"),
        ({"policy": "lifo"}, r"\[Engine\] policy is 'lifo': expected one of fcfs, priority, short"),
        ({"preempt": "oldest"}, r"\[Engine\] preempt is 'oldest': expected one of newest, longes"),
        ({"max_running": 0}, "max_running is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"max_stall_ms": 0}, "max_stall_ms is 0: expected a number > 0"),
        ({"max_stall_ms": True}, "max_stall_ms is True: expected a number > 0"),
        ({"spike_ms": math.nan}, "spike_ms is nan: expected a number > 0"),
        ({"spike_ms": "9"}, "spike_ms is '9': expected a number > 0"),
        *(
            ({name: value}, rf"\[Engine\] {name} is {value}: expected an integer")
            for name in INTEGERS
            for value in (True, 8.5, math.nan, -1)
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_engine_arguments_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **({"num_blocks": 8} | options if "kv_memory" not in options else options))


def test_kv_memory_is_a_bound_in_bytes(model):
    engine = Engine(model, kv_memory=1_000_000, block_size=16)
    pool = engine.manager.pool
    assert pool.nbytes <= 1_000_000 < pool.nbytes + pool.block_bytes
    assert pool.nbytes == sum(
        cache.nbytes for cache in engine.manager.pool.k + engine.manager.pool.v
    )


def test_the_default_pool_is_no_larger_than_the_tokens_to_come(model):
    engine = Engine(model, block_size=16, max_kv_tokens=100)
    assert engine.manager.pool.num_blocks == 7
    assert Engine(model, block_size=16, kv_memory=1_000_000, max_kv_tokens=1).stats.num_blocks > 7


def test_statistics_count_what_happened(engine):
    done = engine.generate([PROMPT, PROMPT[::-1], [1, 2, 3]], max_tokens=9)
    stats = engine.stats.as_dict()
    assert stats["requests_finished"] == 3
    assert stats["prompt_tokens"] == sum(c.prompt_tokens for c in done)
    assert stats["generation_tokens"] == 27
    assert stats["blocks_in_use"] == 0 and 0 < stats["peak_blocks_in_use"] <= 64
    assert stats["peak_live_kv_bytes"] <= stats["peak_kv_bytes"] < stats["contiguous_kv_bytes"]
    assert stats["contiguous_kv_bytes"] <= stats["padded_kv_bytes"]
    assert 0 < stats["ttft_median_s"] <= stats["ttft_max_s"] <= stats["seconds"]


@pytest.mark.slow
def test_memory_does_not_grow_from_step_to_step(model):
    engine = Engine(model, block_size=16, num_blocks=512, prefill_chunk=64, max_running=4)
    for _ in range(4):
        engine.add_request(PROMPT, max_tokens=400)
    for _ in range(20):
        engine.step()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(300):
        engine.step()
    assert mx.get_active_memory() - before < 64 * 1024
    pool_of_a_layer = engine.manager.pool.nbytes / len(engine.manager.pool.k) / 2
    assert mx.get_peak_memory() - before < pool_of_a_layer, "a step copied a pool"

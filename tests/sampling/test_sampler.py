"""What a Sampler reports besides tokens, what it keeps between steps, and what it costs."""

import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.sampling.sampler import Sampler
from tests.support.engine.sampling_cases import (
    FLAT,
    VOCAB,
    last_tokens,
    log_softmax,
    random_logits,
    request,
    sample,
)


@pytest.mark.mac
def test_the_most_likely_tokens_come_in_order_with_their_log_probabilities():
    logits = random_logits(rows=6, seed=20)
    requests = [request(seed=i, temperature=i % 2, logprobs=k) for i, k in enumerate((5,) * 6)]
    sampled = sample(logits, requests)
    expected = log_softmax(logits)
    order = np.argsort(-expected, axis=-1)[:, :5]
    assert (sampled.top_tokens.dtype, sampled.top_logprobs.dtype) == (mx.int32, mx.float32)
    np.testing.assert_array_equal(np.array(sampled.top_tokens), order)
    np.testing.assert_allclose(
        np.array(sampled.top_logprobs), np.take_along_axis(expected, order, axis=-1), atol=1e-5
    )


@pytest.mark.mac
def test_rows_may_ask_for_different_numbers_of_likely_tokens():
    logits = random_logits(rows=4, seed=21)
    sampled = sample(logits, [request(logprobs=k) for k in (2, 0, 6, 0)])
    order = np.argsort(-log_softmax(logits), axis=-1)[:, :6]
    np.testing.assert_array_equal(np.array(sampled.top_tokens)[[0, 2]], order[[0, 2]])
    assert sampled.top_tokens[1].tolist() == [0] * 6
    assert sampled.top_logprobs[1].tolist() == [-math.inf] * 6


def test_no_more_tokens_are_reported_than_there_are():
    sampled = sample(random_logits(rows=1, vocab=5), [request(logprobs=20)])
    assert sorted(sampled.top_tokens[0].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.mac
def test_of_equally_likely_tokens_the_first_is_reported_first():
    row = [0.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    sampled = sample(mx.array([row]), [request(logprobs=5)])
    assert sampled.top_tokens.tolist() == [[1, 3, 5, 2, 4]]


def test_nothing_is_reported_where_nobody_asks():
    sampled = sample(random_logits(rows=2), [request(), request(temperature=1.0)])
    assert sampled.top_tokens is sampled.top_logprobs is None and sampled.errors == {}


@pytest.mark.mac
def test_a_batch_of_other_requests_brings_its_own_options():
    """One sampler serves rows that join, leave, change places or have equal options."""
    logits, sampler = random_logits(rows=3, seed=22), Sampler()
    greedy, drawn, other = (request(seed=i, temperature=t) for i, t in enumerate((0.0, FLAT, FLAT)))
    alike = request(seed=1, temperature=0.0)
    for batch in (
        [greedy, drawn],
        [drawn, greedy],
        [drawn],
        [greedy, drawn, other],
        [other, alike],
    ):
        rows = logits[: len(batch)]
        tokens = sampler(rows, batch, last_tokens(batch)).tokens.tolist()
        assert tokens == sample(rows, batch).tokens.tolist()


def test_options_are_cut_to_the_vocabulary_at_hand():
    made, sampler = [request(logprobs=20)], Sampler()
    for vocab in (VOCAB, 5, VOCAB):
        sampled = sampler(random_logits(rows=1, vocab=vocab), made, last_tokens(made))
        assert sampled.top_tokens.shape == (1, min(20, vocab))


def test_a_step_run_again_draws_the_same_tokens():
    logits, sampler = random_logits(rows=40, seed=23), Sampler()
    requests = [request(seed=i, temperature=FLAT) for i in range(40)]
    first, again = (sampler(logits, requests, last_tokens(requests)).tokens for _ in range(2))
    assert first.tolist() == again.tolist()
    for made in requests:
        made.num_in_flight = 1
    following = sampler(logits, requests, first).tokens
    assert following.tolist() != first.tolist()


EVERY_OPTION: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "xtc_probability": 0.5,
    "xtc_special_tokens": [3],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "logits_processors": [lambda tokens, logits: logits * 2],
    "logprobs": 2,
}


def test_choosing_evaluates_nothing():
    """Neither the logits nor the tokens of the step before; both take many megabytes here."""
    requests = [request(seed=i, **EVERY_OPTION) for i in range(8)]
    sampler = Sampler()
    before = mx.get_active_memory()
    newest = mx.argmax(mx.random.normal((8, 500_000)), axis=-1).astype(mx.int32) % 7
    for _ in range(3):
        newest = sampler(mx.random.normal((8, 500_000)), requests, newest).tokens
        for made in requests:
            made.num_in_flight = 1
    assert mx.get_active_memory() - before < 2**20


def primitives(directory: Path, *outputs: mx.array) -> set[str]:
    """Names of the operations in the graph of `outputs`."""
    mx.export_to_dot(str(directory / "graph.dot"), *outputs)
    return set(re.findall(r'label ="([^"]+)", shape=rect', (directory / "graph.dot").read_text()))


IDLE: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "xtc_probability": 1.0},
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    {"repetition_penalty": 0.0, "logit_bias": {}},
]


@pytest.mark.parametrize("options", IDLE, ids=str)
def test_a_greedy_batch_is_neither_sorted_nor_copied(tmp_path, options):
    logits, requests = random_logits(rows=4), [request(**options) for _ in range(4)]
    newest = last_tokens(requests)
    mx.eval(logits, newest)
    sampled = Sampler()(logits, requests, newest)
    names = primitives(tmp_path, sampled.tokens, sampled.logprobs)
    assert names <= {
        "AsType",
        "Broadcast",
        "ExpandDims",
        "GatherAxis",
        "PagedLikeliest",
        "Slice",
        "Squeeze",
        "Subtract",
    }


def test_only_rows_that_ask_for_it_are_sorted(monkeypatch):
    shapes, sort = [], mx.sort
    monkeypatch.setattr(
        mx, "sort", lambda array, axis: shapes.append(array.shape) or sort(array, axis)
    )
    sample(random_logits(rows=9), [request(temperature=1.0, top_k=5 * (i == 4)) for i in range(9)])
    assert shapes == [(1, VOCAB)]


@pytest.mark.mac
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_told_of_logits_in_half_precision_has_the_precision_of_float32(temperature):
    logits = random_logits(rows=4, seed=22).astype(mx.bfloat16)
    options = {"temperature": temperature, "logprobs": 5}
    sampled = sample(logits, [request(seed=i, **options) for i in range(4)])
    expected, rows = log_softmax(logits), np.arange(4)
    np.testing.assert_allclose(
        np.array(sampled.logprobs), expected[rows, np.array(sampled.tokens)], atol=1e-5
    )
    tops = np.take_along_axis(expected, np.array(sampled.top_tokens), axis=-1)
    np.testing.assert_allclose(np.array(sampled.top_logprobs), tops, atol=1e-5)
    assert sampled.distributions.dtype == mx.bfloat16

"""The tokens chosen from a row of logits: filters as in mlx-lm, draws, log-probabilities."""

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_sampler

from mlx_paged.request import Request
from mlx_paged.sampling import sampler
from tests.support.engine.sampling_cases import (
    DTYPE_IDS,
    DTYPES,
    FLAT,
    VOCAB,
    log_softmax,
    random_logits,
    request,
    sample,
)

pytestmark = pytest.mark.mac

FILTERS: dict[str, dict[str, Any]] = {
    "top_p=0.5": {"top_p": 0.5},
    "top_p=0.9": {"top_p": 0.9},
    "top_p=0.99": {"top_p": 0.99},
    "top_p=1e-6": {"top_p": 1e-6},
    "top_k=1": {"top_k": 1},
    "top_k=7": {"top_k": 7},
    "top_k=47": {"top_k": 47},
    "min_p=0.02": {"min_p": 0.02},
    "min_p=0.3": {"min_p": 0.3},
    "min_p=1": {"min_p": 1.0},
    "top_p, top_k binds": {"top_p": 0.95, "top_k": 3},
    "top_p binds, top_k": {"top_p": 0.5, "top_k": 40},
    "top_p, min_p": {"top_p": 0.9, "min_p": 0.05},
    "min_p, top_k": {"min_p": 0.05, "top_k": 6},
    "all three": {"top_p": 0.9, "min_p": 0.02, "top_k": 12},
    "none": {},
    "top_p=0 is none": {"top_p": 0.0},
    "top_p=1 is none": {"top_p": 1.0},
    "top_p=0 is none, top_k": {"top_p": 0.0, "top_k": 7},
    "top_p=1 is none, top_k": {"top_p": 1.0, "top_k": 47},
    "top_k=vocab is none": {"top_k": 48},
    "top_k>vocab is none": {"top_k": 1000},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "xtc, threshold 0": {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    "xtc, threshold 0.5": {"xtc_probability": 1.0, "xtc_threshold": 0.5},
    "xtc never acts": {"xtc_probability": 0.0, "xtc_threshold": 0.05},
    "top_p raises xtc's probabilities": {
        "top_p": 0.5,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.12,
    },
    "min_p, xtc": {"min_p": 0.3, "xtc_probability": 1.0, "xtc_threshold": 0.12},
    "xtc, top_k of what is left": {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 3},
    "xtc keeps special tokens": {
        "xtc_probability": 1.0,
        "xtc_threshold": 0.02,
        "xtc_special_tokens": range(0, VOCAB, 2),
    },
    "special tokens beyond the vocabulary": {
        "xtc_probability": 1.0,
        "xtc_special_tokens": [VOCAB, 10**6],
    },
    "all four": {
        "top_p": 0.9,
        "min_p": 0.02,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.05,
        "xtc_special_tokens": range(0, VOCAB, 3),
        "top_k": 4,
    },
}


def draws(row: mx.array, count: int, **options: Any) -> list[int]:
    """`count` tokens from the logits `row` ``[vocab]``, each with a seed of its own."""
    params = request(**options).params
    requests = [Request(id=0, tokens=[0], params=params, seed=seed) for seed in range(count)]
    rows = mx.broadcast_to(row[None], (count, row.size))
    return sample(rows, requests).tokens.tolist()


def mlx_lm_survivors(
    row: mx.array,
    top_p: float = 0,
    min_p: float = 0,
    xtc_probability: float = 0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Iterable[int] = (),
    top_k: int = 0,
) -> set[int]:
    """The tokens that mlx-lm's sampler can draw, its filters in its order."""
    kept = (row - mx.logsumexp(row))[None]
    if 0 < top_p < 1:
        kept = apply_top_p(kept, top_p)
    if min_p > 0:
        kept = apply_min_p(kept, min_p)
    if xtc_probability > 0:
        special = [token for token in xtc_special_tokens if token < row.size]
        kept = apply_xtc(kept, xtc_probability, xtc_threshold, special)
    if 0 < top_k < row.size:
        kept = apply_top_k(kept, top_k)
    return set(np.flatnonzero(np.array(kept[0]) > -np.inf).tolist())


def chi_square_bound(degrees: int, p: float = 1e-4) -> float:
    """A chi-square variable exceeds this with probability `p` (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NormalDist().inv_cdf(1 - p) * math.sqrt(spread)) ** 3


def assert_drawn_from(tokens: list[int], probs: np.ndarray) -> None:
    """Chi-square test of draws against float64 `probs`; improbable tokens are counted together."""
    assert set(tokens) <= set(np.flatnonzero(probs))
    expected = probs * len(tokens)
    counts = np.bincount(tokens, minlength=len(probs)).astype(np.float64)
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    assert statistic < chi_square_bound(int(used.sum()) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("spread", [2.0, 8.0], ids=["flat", "peaked"])
def test_exactly_the_tokens_that_pass_mlx_lms_filters_are_drawn(spread, options):
    for row in random_logits(rows=3, spread=spread, seed=1):
        survivors = mlx_lm_survivors(row, **options)
        # Each of n equally likely tokens is missed by 40 n draws with probability e**-40.
        drawn = draws(row, 40 * VOCAB, temperature=FLAT, **options)
        assert set(drawn) == survivors


@pytest.mark.slow
def test_filters_see_the_distribution_before_the_temperature():
    row = random_logits(rows=1, seed=2)[0]
    cold, hot = (draws(row, 4000, temperature=t, top_p=0.8) for t in (0.8, FLAT))
    assert set(cold) == set(hot) == mlx_lm_survivors(row, top_p=0.8)


def test_some_token_always_passes():
    strictest = {"top_p": 1e-9, "top_k": 1, "min_p": 1.0}
    for row in random_logits(rows=8, seed=3):
        assert set(draws(row, 20, temperature=FLAT, **strictest)) == {mx.argmax(row).item()}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5], ids="T={}".format)
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    row = random_logits(rows=1, vocab=32, seed=4)
    probs = np.exp(log_softmax(row / temperature))[0]
    assert_drawn_from(draws(row[0], 20_000, temperature=temperature), probs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.5], ids="T={}".format)
def test_survivors_share_the_mass_of_the_filtered_tokens(temperature):
    row = random_logits(rows=1, seed=5)
    options = {"top_p": 0.95, "top_k": 12, "min_p": 0.01}
    probs = np.exp(log_softmax(row / temperature))[0]
    dropped = list(set(range(VOCAB)) - mlx_lm_survivors(row[0], **options))
    probs[dropped] = 0
    drawn = draws(row[0], 20_000, temperature=temperature, **options)
    assert_drawn_from(drawn, probs / probs.sum())


XTC_OPTIONS = {"xtc_probability": 0.3, "xtc_threshold": 0.05, "top_k": 4}


def xtc_mixture(row: mx.array, options: dict[str, Any]) -> np.ndarray:
    """Probabilities, float64 ``[vocab]``, of the tokens if XTC acts with its probability."""
    mixture = np.zeros(row.size)
    for weight, acts in ((options["xtc_probability"], 1.0), (1 - options["xtc_probability"], 0.0)):
        kept = list(mlx_lm_survivors(row, **options | {"xtc_probability": acts}))
        probs = np.exp(log_softmax(row[None]))[0, kept]
        mixture[kept] += weight * probs / probs.sum()
    return mixture


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["one seed, many tokens", "many seeds, one token"])
def test_xtc_acts_on_as_many_tokens_as_its_probability_says(streams):
    row, n = random_logits(rows=1, seed=18)[0], 20_000
    params = request(temperature=1.0, **XTC_OPTIONS).params
    seeds = [3] * n if streams == "one seed, many tokens" else range(n)
    requests = [Request(id=0, tokens=[0], params=params, seed=seed) for seed in seeds]
    if streams == "one seed, many tokens":
        for num_generated, made in enumerate(requests):
            made.num_prompt = 1 - num_generated
    tokens = sample(mx.broadcast_to(row[None], (n, VOCAB)), requests).tokens.tolist()
    assert_drawn_from(tokens, xtc_mixture(row, XTC_OPTIONS))


def test_xtc_leaves_the_most_likely_token_of_a_greedy_row():
    logits = random_logits(rows=8, seed=19)
    requests = [request(xtc_probability=1.0, xtc_threshold=0.0)] * 8
    assert sample(logits, requests).tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.slow
def test_successive_tokens_of_one_request_are_drawn_independently():
    row = random_logits(rows=1, vocab=4, spread=0.5, seed=6)
    steps = [request(seed=11, num_generated=n, temperature=1.0) for n in range(6001)]
    tokens = np.array(sample(mx.broadcast_to(row, (len(steps), 4)), steps).tokens)
    probs = np.exp(log_softmax(row))[0]
    pairs = tokens[:-1:2] * 4 + tokens[1::2]
    assert_drawn_from(pairs.tolist(), np.outer(probs, probs).ravel())


@pytest.mark.slow
def test_a_large_vocabulary_keeps_its_tail():
    """150,000 equally likely tokens: float32 sums lose neither the first nor the last of them."""
    vocab = 150_000
    tokens = draws(mx.zeros(vocab), 100, temperature=1.0)
    assert_drawn_from([token * 5 // vocab for token in tokens], np.full(5, 1 / 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_temperature_zero_takes_mlx_lms_token(dtype):
    """Among logits so close that half precision rounds the likeliest of them to the same value."""
    logits = random_logits(rows=16, spread=0.02, seed=7).astype(dtype)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = make_sampler(temp=0.0)(logprobs)
    assert sample(logits, [request()] * 16).tokens.tolist() == expected.tolist()


def test_greedy_rows_stay_greedy_among_sampled_ones():
    """Ties included: of the many tokens tied for the first place, the first one is taken."""
    logits = mx.round(random_logits(rows=40, spread=0.5, seed=8))
    requests = [request(seed=i, temperature=1.0 if i % 2 else 0.0) for i in range(40)]
    tokens = np.array(sample(logits, requests).tokens)
    best = np.array(mx.argmax(logits, axis=-1))
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).any()


def test_a_row_gets_the_same_token_alone_and_in_a_batch():
    rng = np.random.default_rng(9)
    logits = random_logits(rows=60, seed=9)
    requests = [
        request(
            seed=int(rng.integers(2**63)),
            num_generated=int(rng.integers(50)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, FLAT])),
            top_p=float(rng.choice([0.0, 0.5, 0.9, 1.0])),
            top_k=int(rng.choice([0, 1, 5, 30, 1000])),
            min_p=float(rng.choice([0.0, 0.05, 1.0])),
            xtc_probability=float(rng.choice([0.0, 0.5, 1.0])),
            xtc_threshold=float(rng.choice([0.02, 0.1])),
            xtc_special_tokens=rng.integers(VOCAB, size=rng.integers(9)).tolist(),
            logprobs=int(rng.choice([0, 3, 7])),
        )
        for _ in range(60)
    ]
    together = sample(logits, requests)
    for i, alone in enumerate(requests):
        single = sample(logits[i : i + 1], [alone])
        assert single.tokens.item() == together.tokens[i].item()
        assert single.logprobs.item() == pytest.approx(together.logprobs[i].item(), rel=1e-6)
        if count := alone.params.logprobs:
            assert single.top_tokens[0].tolist() == together.top_tokens[i, :count].tolist()


def test_a_request_draws_anew_with_every_token():
    row = random_logits(rows=1, spread=0.1, seed=10)
    steps = [request(seed=5, num_generated=n, temperature=1.0) for n in range(64)]
    assert len(set(sample(mx.broadcast_to(row, (64, VOCAB)), steps).tokens.tolist())) > 20


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_log_probabilities_are_the_models_own(dtype):
    """They are those of the unfiltered distribution at temperature 1, up to rounding."""
    logits = random_logits(rows=32, seed=11).astype(dtype)
    requests = [request(seed=i, temperature=0.5 * (i % 4), top_k=i % 3) for i in range(32)]
    sampled = sample(logits, requests)
    tokens = np.array(sampled.tokens)
    expected = log_softmax(logits)[np.arange(32), tokens]
    largest = 8  # bounds the logits and their logsumexp
    tolerance = largest * mx.finfo(dtype).eps
    np.testing.assert_allclose(np.array(sampled.logprobs), expected, rtol=0, atol=tolerance)


def test_results_have_one_type_whatever_the_logits_are():
    for dtype in DTYPES:
        for temperature in (0.0, 1.0):
            sampled = sample(random_logits(2).astype(dtype), [request(temperature=temperature)] * 2)
            assert (sampled.tokens.dtype, sampled.logprobs.dtype) == (mx.int32, mx.float32)
            assert sampled.tokens.shape == sampled.logprobs.shape == (2,)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-42, 1e-60], ids="T={:g}".format)
def test_a_tiny_temperature_is_greedy(temperature):
    for row in random_logits(rows=8, seed=12):
        assert set(draws(row, 20, temperature=temperature)) == {mx.argmax(row).item()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.001}, {"top_p": 0.9, "top_k": 8}],
    ids=str,
)
@pytest.mark.parametrize("masked", ["first", "last", "every other"])
def test_tokens_at_minus_infinity_are_never_drawn(masked, options):
    where = {"first": slice(0, 40), "last": slice(-40, None), "every other": slice(0, None, 2)}
    row = np.array(random_logits(rows=1, seed=13)[0])
    row[where[masked]] = -np.inf
    drawn = set(draws(mx.array(row), 2000, temperature=FLAT, **options))
    assert drawn == mlx_lm_survivors(mx.array(row), **options)
    assert np.isfinite(row[list(drawn)]).all()


@pytest.mark.parametrize("draw", [0, 1 - 2**-23], ids=["least", "largest"])
def test_the_outermost_draws_give_the_outermost_tokens_that_pass(monkeypatch, draw):
    monkeypatch.setattr(
        sampler, "uniform", lambda seeds, indices: np.full(len(seeds), draw, np.float32)
    )
    for row in np.array(random_logits(rows=8, seed=15)):
        row[[0, 1, -2, -1]] = -np.inf
        [token] = draws(mx.array(row), 1, temperature=1.0, top_k=10)
        survivors = mlx_lm_survivors(mx.array(row), top_k=10)
        assert token == (max(survivors) if draw else min(survivors))


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 1.0}], ids=str)
def test_a_vocabulary_of_one_token(options):
    sampled = sample(mx.array([[3.0]]), [request(temperature=1.0, **options)])
    assert sampled.tokens.tolist() == [0] and sampled.logprobs.tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
def test_half_precision_logits_are_filtered_in_float32(dtype):
    """Sums in half precision would give another nucleus."""
    row = random_logits(rows=1, vocab=500, spread=1.0, seed=16)[0].astype(dtype)
    logprobs = (row - mx.logsumexp(row)).astype(mx.float32)
    drawn = draws(row, 10_000, temperature=FLAT, top_p=0.8)
    assert set(drawn) == mlx_lm_survivors(logprobs, top_p=0.8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
def test_half_precision_logits_are_drawn_in_float32(dtype):
    """A cumulated sum in half precision could not tell 4,000 equally likely tokens apart."""
    tokens = draws(mx.zeros(4000, dtype), 4000, temperature=1.0)
    assert_drawn_from([token // 200 for token in tokens], np.full(20, 1 / 20))
    assert len(set(tokens)) > 2000  # 4000 * (1 - 1/e) = 2528 are expected

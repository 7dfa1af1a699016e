"""The tokens that come out of a row of logits: filters as in mlx-lm, draws, log-probabilities."""

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_sampler

from mlx_paged import sampling
from mlx_paged.request import Request
from mlx_paged.sampling import sample, uniform
from mlx_paged.sampling_params import SamplingParams

FLAT = 1e6
"""A temperature at which every token that passes the filters is as likely as any other."""

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
}
VOCAB = 48

SPLITMIX64_STEP = 0x9E3779B97F4A7C15

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
DTYPE_IDS = ["float32", "float16", "bfloat16"]


def request(seed: int = 0, num_generated: int = 0, **options: Any) -> Request:
    made = Request(id=0, tokens=[0], params=SamplingParams(**options), seed=seed)
    made.tokens += [0] * num_generated
    return made


def random_logits(rows: int, vocab: int = VOCAB, spread: float = 2.0, seed: int = 0) -> mx.array:
    """Float32 ``[rows, vocab]`` without ties."""
    rng = np.random.default_rng(seed)
    return mx.array((rng.normal(size=(rows, vocab)) * spread).astype(np.float32))


def draws(row: mx.array, count: int, **options: Any) -> list[int]:
    """`count` tokens from the logits `row` ``[vocab]``, each with a seed of its own."""
    params = SamplingParams(**options)
    requests = [Request(id=0, tokens=[0], params=params, seed=seed) for seed in range(count)]
    rows = mx.broadcast_to(row[None], (count, row.size))
    return sample(rows, requests).tokens.tolist()


def mlx_lm_survivors(row: mx.array, top_p: float = 0, min_p: float = 0, top_k: int = 0) -> set[int]:
    """The tokens that mlx-lm's sampler can draw, its filters in its order."""
    kept = (row - mx.logsumexp(row))[None]
    if 0 < top_p < 1:
        kept = apply_top_p(kept, top_p)
    if min_p > 0:
        kept = apply_min_p(kept, min_p)
    if 0 < top_k < row.size:
        kept = apply_top_k(kept, top_k)
    return set(np.flatnonzero(np.array(kept[0]) > -np.inf).tolist())


def log_softmax(logits: mx.array) -> np.ndarray:
    """Float64 ``[R, vocab]``."""
    x = np.array(logits.astype(mx.float32), np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def chi_square_bound(degrees: int, p: float = 1e-4) -> float:
    """What a chi-square variable exceeds with probability `p` (Wilson and Hilferty 1931)."""
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


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("spread", [2.0, 8.0], ids=["flat", "peaked"])
def test_exactly_the_tokens_that_pass_mlx_lms_filters_are_drawn(spread, options):
    for row in random_logits(rows=3, spread=spread, seed=1):
        survivors = mlx_lm_survivors(row, **options)
        # Each of n equally likely tokens is missed by 40 n draws with probability e**-40.
        drawn = draws(row, 40 * VOCAB, temperature=FLAT, **options)
        assert set(drawn) == survivors


def test_filters_see_the_distribution_before_the_temperature():
    row = random_logits(rows=1, seed=2)[0]
    cold, hot = (draws(row, 4000, temperature=t, top_p=0.8) for t in (0.8, FLAT))
    assert set(cold) == set(hot) == mlx_lm_survivors(row, top_p=0.8)


def test_some_token_always_passes():
    strictest = {"top_p": 1e-9, "top_k": 1, "min_p": 1.0}
    for row in random_logits(rows=8, seed=3):
        assert set(draws(row, 20, temperature=FLAT, **strictest)) == {mx.argmax(row).item()}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5], ids="T={}".format)
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    row = random_logits(rows=1, vocab=32, seed=4)
    probs = np.exp(log_softmax(row / temperature))[0]
    assert_drawn_from(draws(row[0], 20_000, temperature=temperature), probs)


@pytest.mark.parametrize("temperature", [0.5, 1.5], ids="T={}".format)
def test_survivors_share_the_mass_of_the_filtered_tokens(temperature):
    row = random_logits(rows=1, seed=5)
    options = {"top_p": 0.95, "top_k": 12, "min_p": 0.01}
    probs = np.exp(log_softmax(row / temperature))[0]
    dropped = list(set(range(VOCAB)) - mlx_lm_survivors(row[0], **options))
    probs[dropped] = 0
    drawn = draws(row[0], 20_000, temperature=temperature, **options)
    assert_drawn_from(drawn, probs / probs.sum())


def test_successive_tokens_of_one_request_are_drawn_independently():
    row = random_logits(rows=1, vocab=4, spread=0.5, seed=6)
    steps = [request(seed=11, num_generated=n, temperature=1.0) for n in range(6001)]
    tokens = np.array(sample(mx.broadcast_to(row, (len(steps), 4)), steps).tokens)
    probs = np.exp(log_softmax(row))[0]
    pairs = tokens[:-1:2] * 4 + tokens[1::2]
    assert_drawn_from(pairs.tolist(), np.outer(probs, probs).ravel())


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
        )
        for _ in range(60)
    ]
    together = sample(logits, requests)
    for i, alone in enumerate(requests):
        single = sample(logits[i : i + 1], [alone])
        assert single.tokens.item() == together.tokens[i].item()
        assert single.logprobs.item() == pytest.approx(together.logprobs[i].item(), rel=1e-6)


def test_a_request_draws_anew_with_every_token():
    row = random_logits(rows=1, spread=0.1, seed=10)
    steps = [request(seed=5, num_generated=n, temperature=1.0) for n in range(64)]
    assert len(set(sample(mx.broadcast_to(row, (64, VOCAB)), steps).tokens.tolist())) > 20


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_log_probabilities_are_the_models_own(dtype):
    """Those of the unfiltered distribution at temperature 1, to the rounding of its logsumexp."""
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
        sampling, "uniform", lambda seeds, indices: np.full(len(seeds), draw, np.float32)
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


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
def test_half_precision_logits_are_filtered_in_float32(dtype):
    """Masses summed up in half precision would cut the nucleus elsewhere."""
    row = random_logits(rows=1, vocab=500, spread=1.0, seed=16)[0].astype(dtype)
    logprobs = (row - mx.logsumexp(row)).astype(mx.float32)
    drawn = draws(row, 10_000, temperature=FLAT, top_p=0.8)
    assert set(drawn) == mlx_lm_survivors(logprobs, top_p=0.8)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
def test_half_precision_logits_are_drawn_in_float32(dtype):
    """A cumulated sum in half precision could not tell 4,000 equally likely tokens apart."""
    tokens = draws(mx.zeros(4000, dtype), 4000, temperature=1.0)
    assert_drawn_from([token // 200 for token in tokens], np.full(20, 1 / 20))
    assert len(set(tokens)) > 2000  # 4000 * (1 - 1/e) = 2528 are expected


def kolmogorov_smirnov(values: np.ndarray) -> float:
    """The largest distance between the distribution of `values` and the uniform one."""
    ordered, n = np.sort(values.astype(np.float64)), len(values)
    above = np.arange(1, n + 1) / n - ordered
    return float(max(above.max(), (ordered - np.arange(n) / n).max()))


STREAMS = {
    "one seed, many draws": (lambda n: [123] * n, lambda n: range(n)),
    "many seeds, first draw": (lambda n: range(n), lambda n: [0] * n),
    "many seeds, later draw": (lambda n: range(n), lambda n: [1000] * n),
    "seed and draw advance together": (lambda n: range(n), lambda n: range(n)),
    "seed advances, draw falls": (lambda n: range(n), lambda n: range(n)[::-1]),
    "seeds of 64 bits": (lambda n: range(2**64 - n, 2**64), lambda n: [0] * n),
}


@pytest.mark.parametrize(("seeds", "indices"), STREAMS.values(), ids=STREAMS)
def test_draws_are_uniform(seeds, indices):
    n = 50_000
    values = uniform(seeds(n), indices(n))
    assert values.dtype == np.float32
    assert values.min() >= 0 and values.max() < 1
    # Exceeded by uniform numbers with probability 1e-4: 2 exp(-2 n d**2) = 1e-4.
    assert kolmogorov_smirnov(values) < math.sqrt(math.log(2e4) / (2 * n))


@pytest.mark.parametrize(("seeds", "indices"), STREAMS.values(), ids=STREAMS)
def test_neighbouring_draws_are_uncorrelated(seeds, indices):
    n = 50_000
    values = uniform(seeds(n), indices(n)).astype(np.float64)
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(n)  # four standard deviations


def test_a_draw_depends_on_its_seed_and_number_only():
    rng = np.random.default_rng(14)
    seeds = [int(seed) for seed in rng.integers(2**64, size=100, dtype=np.uint64)]
    indices = [int(index) for index in rng.integers(10_000, size=100)]
    together = uniform(seeds, indices)
    alone = [uniform([seed], [index])[0] for seed, index in zip(seeds, indices, strict=True)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("step", [1, SPLITMIX64_STEP], ids=["1", "the generator's own step"])
def test_streams_of_different_seeds_do_not_overlap(step):
    """A stream that were another one, shifted, would show as repeated pairs of draws."""
    seeds = [i * step % 2**64 for i in range(50)]
    streams = np.stack([uniform([seed] * 1000, range(1000)) for seed in seeds])
    pairs = {pair for row in streams for pair in pairwise(row.tolist())}
    assert len(pairs) == 50 * 999


def splitmix64(state: int, index: int) -> int:
    """Output number `index` of SplitMix64 from an initial state, in Python's integers."""
    z = (state + (index + 1) * SPLITMIX64_STEP) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_draws_are_the_upper_bits_of_splitmix64():
    """The stream of a seed starts at the seed's own first output."""
    assert splitmix64(1234567, 0) == 6457827717110365317  # as published
    for seed in (0, 1, 2**64 - 1):
        for index in (0, 1, 12345):
            draw = splitmix64(splitmix64(seed, 0), index) >> 41
            assert uniform([seed], [index])[0] == draw / 2**23

"""The random numbers that choose tokens: a stream for each seed, a number for each token."""

import math
from itertools import pairwise

import numpy as np
import pytest

from mlx_paged.sampling.sampler import XTC_STREAM, uniform

SPLITMIX64_STEP = 0x9E3779B97F4A7C15


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
    """If a stream were a shifted copy of another, pairs of draws would repeat."""
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
    """The first output of a seed is the initial state of its stream."""
    assert splitmix64(1234567, 0) == 6457827717110365317  # as published
    for seed in (0, 1, 2**64 - 1):
        for index in (0, 1, 12345):
            draw = splitmix64(splitmix64(seed, 0), index) >> 41
            assert uniform([seed], [index])[0] == draw / 2**23


def test_whether_xtc_acts_is_drawn_independently_of_the_token():
    n = 50_000
    rng = np.random.default_rng(17)
    for seeds, indices in (
        (rng.integers(2**64, size=n, dtype=np.uint64), np.zeros(n, np.uint64)),
        (np.full(n, 5, np.uint64), np.arange(n, dtype=np.uint64)),
    ):
        tokens, acts = uniform(seeds, indices), uniform(seeds ^ np.uint64(XTC_STREAM), indices)
        for shift in (0, 1):
            correlation = np.corrcoef(tokens[: n - shift], acts[shift:])[0, 1]
            assert abs(correlation) < 4 / math.sqrt(n)

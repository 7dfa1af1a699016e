"""The next token of every row, each with its own temperature, filters and random stream."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams

MIN_TEMPERATURE = 1e-30
"""Smaller ones mean the same and would be zero in float32."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens ``[R]`` int32 and the log-probability ``[R]`` float32 of each under the model."""

    tokens: mx.array
    logprobs: mx.array


def sample(logits: mx.array, requests: Sequence[Request]) -> Sampled:
    """Choose a token for each row of `logits` ``[R, vocab]``.

    Filters act as in mlx-lm: top-p, min-p and top-k each look at probabilities at temperature 1,
    a token has to pass all of them, then the temperature is applied. The log-probabilities
    returned are those of the unfiltered distribution.
    """
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logprobs, axis=-1)
    sampling = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if len(sampling) == len(requests):
        tokens = _draw(logprobs, requests)
    elif sampling:
        rows = mx.array(sampling)
        tokens[rows] = _draw(logprobs[rows], [requests[i] for i in sampling])
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens.astype(mx.int32), chosen.astype(mx.float32))


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float32]:
    """Draw number `index` of the random stream of `seed`, for each pair: ``[R]`` in [0, 1).

    SplitMix64 (Steele et al. 2014, section 5), whose n-th number needs no state: a request draws
    the same numbers in any batch, chunking or preemption.
    """
    state = _mix64(np.asarray(seeds, np.uint64)) + np.asarray(indices, np.uint64) * _GAMMA
    return ((_mix64(state) >> np.uint64(41)).astype(np.float32)) * np.float32(2.0**-23)


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _draw(logprobs: mx.array, requests: Sequence[Request]) -> mx.array:
    """Inverse transform sampling: the first token whose cumulated probability exceeds a draw."""
    params = [request.params for request in requests]
    kept = _filtered(logprobs.astype(mx.float32), params)
    temperature = _column([max(p.temperature, MIN_TEMPERATURE) for p in params])
    scaled = (kept - kept.max(axis=-1, keepdims=True)) / temperature
    cumulated = mx.cumsum(mx.exp(scaled), axis=-1)
    draws = uniform([r.seed for r in requests], [r.num_generated for r in requests])
    passed = cumulated > mx.array(draws)[:, None] * cumulated[:, -1:]
    return mx.argmax(passed & (kept > -mx.inf), axis=-1)


def _filtered(logprobs: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """`logprobs` with -inf wherever a row's top-p, top-k or min-p drops the token."""
    floor = mx.full((len(params), 1), -mx.inf)
    if any(p.min_p > 0 for p in params):
        with np.errstate(divide="ignore"):
            log_min_p = _column(np.log([p.min_p for p in params]).tolist())
        floor = mx.maximum(floor, logprobs.max(axis=-1, keepdims=True) + log_min_p)
    if any(0 < p.top_p < 1 or p.top_k > 0 for p in params):
        floor = mx.maximum(floor, _rank_floor(logprobs, params))
    return mx.where(logprobs < floor, -mx.inf, logprobs)


def _rank_floor(logprobs: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """The smallest log-probability, ``[R, 1]``, that top-p and top-k let pass."""
    vocab = logprobs.shape[-1]
    descending = mx.sort(logprobs, axis=-1)[:, ::-1]
    probs = mx.exp(descending)
    mass_before = mx.cumsum(probs, axis=-1) - probs
    top_p = _column([p.top_p if 0 < p.top_p < 1 else 2.0 for p in params])
    in_nucleus = (mass_before < top_p * probs.sum(axis=-1, keepdims=True)).sum(axis=-1)
    top_k = mx.array([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    last = mx.maximum(mx.minimum(in_nucleus, top_k), 1) - 1
    return mx.take_along_axis(descending, last[:, None], axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]

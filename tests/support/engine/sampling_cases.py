"""Requests and logits to choose tokens from, and the distributions that come out."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.request import Request
from mlx_paged.sampling.sampler import Sampled, Sampler
from mlx_paged.sampling_params import SamplingParams

VOCAB = 48

FLAT = 1e6
"""A temperature at which every token that passes the filters is as likely as any other."""

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
DTYPE_IDS = ["float32", "float16", "bfloat16"]


def request(
    seed: int = 0, num_generated: int = 0, prompt: Sequence[int] = (0,), **options: Any
) -> Request:
    made = Request(id=0, tokens=list(prompt), params=SamplingParams(**options), seed=seed)
    made.tokens += [0] * num_generated
    return made


def random_logits(rows: int, vocab: int = VOCAB, spread: float = 2.0, seed: int = 0) -> mx.array:
    """Float32 ``[rows, vocab]`` without ties."""
    rng = np.random.default_rng(seed)
    return mx.array((rng.normal(size=(rows, vocab)) * spread).astype(np.float32))


def last_tokens(requests: Sequence[Request]) -> mx.array:
    return mx.array([request.tokens[-1] for request in requests], mx.int32)


def sample(logits: mx.array, requests: Sequence[Request]) -> Sampled:
    """One call of a new Sampler; all tokens of the requests are known."""
    return Sampler()(logits, requests, last_tokens(requests))


def distributions(sampled: Sampled) -> np.ndarray:
    """All log-probabilities ``[R, VOCAB]`` of rows that ask for ``logprobs=VOCAB``."""
    result = np.full(sampled.top_tokens.shape, np.nan, np.float32)
    np.put_along_axis(result, np.array(sampled.top_tokens), np.array(sampled.top_logprobs), axis=-1)
    return result


def log_softmax(logits: mx.array) -> np.ndarray:
    """Float64 ``[R, vocab]``."""
    x = np.array(logits.astype(mx.float32), np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

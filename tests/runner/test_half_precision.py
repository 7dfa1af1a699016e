"""Greedy answers to single requests in half precision: what they share with mlx-lm's, and where
they may leave them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.generate import generate_step

from mlx_paged import Engine
from mlx_paged.ops import cpu_layers
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy
from tests.support.ops.attention_paths import attending_by

Logprobs = npt.NDArray[np.float64]  # [tokens, vocab]

MODELS = {
    "llama": ("llama", {}),
    "llama, heads of 64": ("llama", {"head_dim": 64}),  # weights rounded to bfloat16 on some CPUs
    "gemma3": ("gemma3", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "phi3": ("phi3", {}),
}
HALVES = (mx.bfloat16, mx.float16)
NUM_TOKENS = 32
LENGTHS = (5, 31, 77, 200)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in LENGTHS]


class Answers(NamedTuple):
    """What mlx-lm answers to each prompt.

    Attributes:
        logprobs: that the model in half precision gives for each token.
        exact: those of the same weights in float32.
    """

    model: nn.Module
    tokens: list[list[int]]
    logprobs: list[Logprobs]
    exact: list[Logprobs]


class Dictation:
    """A sampler that chooses the tokens it is given and keeps the log-probabilities it sees."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = iter(tokens)
        self._rows: list[mx.array] = []

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._rows.append(logprobs.astype(mx.float32))
        return mx.array([next(self._left, 0)])  # mlx-lm computes one token more

    def logprobs(self) -> Logprobs:
        return np.array(mx.concatenate(self._rows), np.float64)[:NUM_TOKENS]


def mlx_lm_logprobs(model: nn.Module, prompt: list[int], tokens: list[int]) -> Logprobs:
    sampler = Dictation(tokens)
    list(generate_step(mx.array(prompt), model, max_tokens=len(tokens), sampler=sampler))
    return sampler.logprobs()


def float32_logprobs(model: nn.Module, prompt: list[int], tokens: list[int]) -> Logprobs:
    """In one forward without caches."""
    logits = model(mx.array([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]
    wide = np.array(logits, np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.fixture(scope="module", params=HALVES, ids=str)
def dtype(request) -> mx.Dtype:
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def answers(request, dtype) -> Answers:
    name, changes = MODELS[request.param]
    model, exact = build(name, **changes), build(name, **changes)
    model.set_dtype(dtype)
    exact.update(model.parameters())
    exact.set_dtype(mx.float32)
    tokens = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]

    def all_of(logprobs: Callable[..., Logprobs], model: nn.Module) -> list[Logprobs]:
        return [logprobs(model, *pair) for pair in zip(PROMPTS, tokens, strict=True)]

    return Answers(model, tokens, all_of(mlx_lm_logprobs, model), all_of(float32_logprobs, exact))


def alone(model: nn.Module) -> Iterator[list[int]]:
    """The engine's answers to one prompt after the other."""
    engine = Engine(model, num_blocks=100)
    for prompt in PROMPTS:
        yield engine.generate([prompt], max_tokens=NUM_TOKENS)[0].tokens


@pytest.mark.slow
def test_but_for_attention_and_norms_every_token_is_mlx_lm_s(answers, monkeypatch):
    """Attention rounds less often here, and norms sum in another order. Rows in place of a
    sequence, embeddings, activations and log-sum-exp change no token."""
    monkeypatch.setattr(cpu_layers, "_rms_norm", cpu_layers.mlx_rms_norm)
    with attending_by("gather"):
        assert list(alone(answers.model)) == answers.tokens


@pytest.mark.slow
def test_the_first_other_token_is_a_near_tie(answers):
    """In float32 the two tokens lie closer together than mlx-lm's rounding can bring any two."""
    for got, want, half, exact in zip(alone(answers.model), *answers[1:], strict=True):
        for at in np.flatnonzero(np.array(got) != want)[:1]:
            margin = abs(exact[at, got[at]] - exact[at, want[at]])
            assert margin <= 2 * np.abs(half[at] - exact[at]).max()


@pytest.mark.sampled(10)
def test_logprobs_are_as_near_to_float32_s_as_mlx_lm_s(answers):
    engine = Engine(answers.model, num_blocks=100)
    ours = []
    for prompt, tokens in zip(PROMPTS, answers.tokens, strict=True):
        sampler = Dictation(tokens)
        engine.generate([prompt], max_tokens=len(tokens), sampler=sampler)
        ours.append(sampler.logprobs())
    assert error(ours, answers.exact) <= 1.05 * error(answers.logprobs, answers.exact)


def error(logprobs: list[Logprobs], exact: list[Logprobs]) -> float:
    """Root mean square."""
    difference = np.concatenate(logprobs) - np.concatenate(exact)
    return float(np.sqrt(np.mean(difference**2)))

"""In bfloat16 and in 4 bits the next token is as likely as mlx-lm says, on the same tokens.

Both round, in other places. So both are compared with mlx-lm in float32, whose weights are those of
`4bit` exactly and those of `bfloat16` before they were rounded. mlx-lm itself in 4 bits is not
asked: on a CPU it takes seconds for a token.
"""

import json

import mlx.core as mx
import mlx_lm_answers
import numpy as np
import pytest

from mlx_paged import BatchGenerator
from mlx_paged.loading import load_model

CHATS = (0, 10)  # numbers of questions
NUM_PROMPT, NUM_TOKENS = 4, 20


@pytest.fixture(scope="module")
def rows(answers) -> list[tuple[list[int], list[int]]]:
    """Beginnings of answers as prompts, and the tokens that both are told to go on with."""
    texts = [answers[number][: NUM_PROMPT + NUM_TOKENS] for number in CHATS]
    return [(text[:NUM_PROMPT], text[NUM_PROMPT:]) for text in texts]


@pytest.fixture(scope="module")
def mlx_lms(directory, rows, tmp_path_factory):
    """Log-probabilities of mlx-lm by format, ``[positions, vocabulary]``."""
    folder = tmp_path_factory.mktemp("logprobs")
    (folder / "rows.json").write_text(json.dumps(rows))
    names = ("float32", "bfloat16")
    given = folder / "rows.json"
    starts = [
        mlx_lm_answers.start("logprobs", directory / name, folder / name, given) for name in names
    ]
    mlx_lm_answers.ended(starts)
    files = [np.load(folder / f"{name}.npz") for name in names]
    return {n: np.concatenate([*file.values()]) for n, file in zip(names, files, strict=True)}


def ours(directory, rows) -> np.ndarray:
    """The same of an engine that computes all chats in one batch; samplers say the tokens."""
    model, _ = load_model(str(directory))
    generator = BatchGenerator(model, num_blocks=100, prefill_step_size=64)
    found: list[list[mx.array]] = [[] for _ in rows]
    generator.insert(
        [prompt for prompt, _ in rows],
        [len(following) for _, following in rows],
        samplers=[told(following) for _, following in rows],
        logits_processors=[[noted(logits)] for logits in found],
    )
    while generator.next_generated():
        pass
    generator.close()
    logits = mx.concatenate([mx.concatenate(each) for each in found]).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def told(tokens: list[int]):
    """A sampler that says these tokens, whatever is likely."""
    following = iter(tokens)
    return lambda logprobs: mx.array([next(following)])


def noted(seen: list[mx.array]):
    """A logits processor that changes nothing and keeps what it gets."""

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits)
        return logits

    return process


def divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence, in nats a token."""
    return float((np.exp(expected) * (expected - found)).sum(-1).mean())


def agreement(expected: np.ndarray, found: np.ndarray) -> float:
    """Part of the tokens of which both find the same one likeliest."""
    return float((expected.argmax(-1) == found.argmax(-1)).mean())


def test_bfloat16_is_as_far_from_float32_as_mlx_lms(directory, rows, mlx_lms):
    """Two roundings of the same size: ours may be a quarter larger (measured: 1.04 times mlx-lm's
    1.04e-3 nats), and if they are independent they are twice as far from each other as mlx-lm's is
    from float32 (measured: 1.8 times). Of 40 tokens the likeliest is the same."""
    exact, theirs = mlx_lms["float32"], mlx_lms["bfloat16"]
    found = ours(directory / "bfloat16", rows)
    rounding = divergence(exact, theirs)
    assert 1e-4 < rounding < 5e-3
    assert divergence(exact, found) < 1.25 * rounding
    assert divergence(theirs, found) < 2.25 * rounding
    assert agreement(theirs, found) > 0.95


def test_4_bits_give_the_likelihoods_of_their_own_numbers(directory, rows, mlx_lms):
    """mlx-lm computes them in float32 from the same numbers. What is left is float16's rounding
    between layers: 1.7e-5 nats, where K/V in 8 bits alone would make 1e-3."""
    exact, found = mlx_lms["float32"], ours(directory / "4bit", rows)
    assert divergence(exact, found) < 5e-5
    assert agreement(exact, found) > 0.95

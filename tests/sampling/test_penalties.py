"""How logits change before a token is chosen, compared with mlx-lm's processors."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_paged import _ext
from mlx_paged.request import Request
from mlx_paged.sampling import penalties
from mlx_paged.sampling.sampler import Sampler
from tests.support.engine.sampling_cases import (
    DTYPE_IDS,
    DTYPES,
    VOCAB,
    distributions,
    last_tokens,
    random_logits,
    request,
    sample,
)


@pytest.fixture(autouse=True)
def _mlx_lm_s_normaliser(monkeypatch):
    """Use mlx-lm's normaliser, because the tests compare logits bit for bit."""

    def likeliest(x, allowed):
        total = mx.logsumexp(x.astype(mx.float32), axis=-1, keepdims=True)
        best = mx.argmax(x - total.astype(x.dtype), axis=-1, keepdims=True)
        return mx.concatenate([total, best.astype(mx.float32)], axis=-1)

    monkeypatch.setattr(_ext.layers, "likeliest", likeliest)


BIAS = {0: 3.5, 7: -2.0, VOCAB - 1: -np.inf}

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"logit_bias": BIAS},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.7},
    "repetition=1 is none": {"repetition_penalty": 1.0},
    "repetition=0 is none": {"repetition_penalty": 0.0},
    "repetition of the newest": {"repetition_penalty": 1.3, "repetition_context_size": 1},
    "repetition of all": {"repetition_penalty": 1.3, "repetition_context_size": 0},
    "presence": {"presence_penalty": 0.75},
    "negative presence": {"presence_penalty": -0.75, "presence_context_size": 6},
    "presence=0 is none": {"presence_penalty": 0.0},
    "frequency": {"frequency_penalty": 0.6},
    "negative frequency": {"frequency_penalty": -0.6, "frequency_context_size": 7},
    "frequency of all": {"frequency_penalty": 0.6, "frequency_context_size": 0},
    "frequency of more than there is": {"frequency_penalty": 0.6, "frequency_context_size": 10**9},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "all, one context each": {
        "logit_bias": BIAS,
        "repetition_penalty": 1.2,
        "repetition_context_size": 3,
        "presence_penalty": 0.5,
        "presence_context_size": 9,
        "frequency_penalty": 0.3,
        "frequency_context_size": 30,
    },
}


def mlx_lm_log_probabilities(tokens: Sequence[int], logits: mx.array, **options: Any) -> np.ndarray:
    """Float32 ``[vocab]``: mlx-lm's processors applied to one row of logits ``[1, vocab]``."""
    logits = mx.array(logits)
    for processor in make_logits_processors(**options):
        logits = processor(mx.array(tokens), logits)
    logits = logits.astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits))[0]


def penalised_request(length: int, seed: int = 0, **options: Any) -> Request:
    """A request of `length` tokens, many repeated, that reports the whole distribution."""
    tokens = np.random.default_rng(seed).integers(VOCAB // 3, size=length).tolist()
    return request(prompt=tokens, logprobs=VOCAB, **options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("length", [1, 5, 20, 21, 60])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_changes_logits_as_in_mlx_lm(options, length, dtype):
    logits = random_logits(rows=1, seed=length).astype(dtype)
    made = penalised_request(length, seed=length, **options)
    expected = mlx_lm_log_probabilities(made.tokens, logits, **options)
    np.testing.assert_array_equal(distributions(sample(logits, [made]))[0], expected)


@pytest.mark.mac
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_of_a_batch_have_their_own_options(dtype):
    rng = np.random.default_rng(1)
    cases = [(options, int(rng.integers(1, 60))) for options in [*OPTIONS.values()] * 3]
    rng.shuffle(cases)
    requests = [penalised_request(n, seed=i, **o) for i, (o, n) in enumerate(cases)]
    logits = random_logits(rows=len(cases), seed=2).astype(dtype)
    together = distributions(sample(logits, requests))
    for i, (options, _) in enumerate(cases):
        expected = mlx_lm_log_probabilities(requests[i].tokens, logits[i : i + 1], **options)
        np.testing.assert_array_equal(together[i], expected)


def changing_batches(requests: Sequence[Request], steps: int) -> Iterator[list[Request]]:
    """Random subsets of `requests` in random order, each for a few steps."""
    rng = np.random.default_rng(3)
    while steps > 0:
        batch = [requests[i] for i in rng.permutation(len(requests))[: rng.integers(1, 9)]]
        for _ in range(min(steps, int(rng.integers(1, 6)))):
            yield batch
            steps -= 1


@pytest.mark.mac
@pytest.mark.parametrize("ahead", [False, True], ids=["tokens known", "newest in flight"])
def test_penalties_follow_requests_through_changing_batches(ahead):
    """Each step runs once or twice. With `ahead` the newest tokens are not evaluated yet when the
    next ones are chosen."""
    cases = list(OPTIONS.values())
    requests = [
        penalised_request(1 + 5 * i, seed=i, temperature=i % 2, **options)
        for i, options in enumerate(cases)
    ]
    options_of = dict(zip(map(id, requests), cases, strict=True))
    newest = {id(made): mx.array(made.tokens[-1], mx.int32) for made in requests}
    sampler = Sampler()
    for step, batch in enumerate(changing_batches(requests, steps=60)):
        logits = random_logits(rows=len(batch), seed=step)
        last = mx.stack([newest[id(made)] for made in batch])
        for _ in range(1 + (step % 7 == 0)):
            sampled = sampler(logits, batch, last)
        for made in batch:
            if made.num_in_flight:
                made.tokens.append(newest[id(made)].item())
                made.num_in_flight = 0
        for i, made in enumerate(batch):
            expected = mlx_lm_log_probabilities(
                made.tokens, logits[i : i + 1], **options_of[id(made)]
            )
            np.testing.assert_array_equal(distributions(sampled)[i], expected)
            newest[id(made)] = sampled.tokens[i]
            if ahead:
                made.num_in_flight = 1
            else:
                made.tokens.append(sampled.tokens[i].item())


def test_a_dropped_step_leaves_no_trace_in_the_windows():
    options = {"frequency_penalty": 0.6, "frequency_context_size": 4}
    made, sampler, logits = penalised_request(9, **options), Sampler(), random_logits(rows=1)
    sampled = sampler(logits, [made], last_tokens([made]))
    made.num_in_flight = 1
    sampler(logits, [made], sampled.tokens)  # never looked at
    made.num_in_flight = 0
    made.tokens.append(11)
    expected = mlx_lm_log_probabilities(made.tokens, logits, **options)
    again = sampler(logits, [made], last_tokens([made]))
    np.testing.assert_array_equal(distributions(again)[0], expected)


def test_prompt_tokens_beyond_the_vocabulary_count_as_its_last_token():
    """Such a prompt changes no other row."""
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.6}
    logits = random_logits(rows=3, seed=7)
    for prompt in ([3, VOCAB], [3, 10**9], [VOCAB + 1, 3], [10**9, 3]):
        made = request(prompt=prompt, logprobs=VOCAB, **options)
        plain = request(logprobs=VOCAB)
        expected = mlx_lm_log_probabilities(np.minimum(prompt, VOCAB - 1), logits[1:2], **options)
        together = distributions(sample(logits, [plain, made, plain]))
        np.testing.assert_array_equal(together[1], expected)
        for row in (0, 2):
            untouched = mlx_lm_log_probabilities([0], logits[row : row + 1])
            np.testing.assert_array_equal(together[row], untouched)


PROCESSED = {"a processor": {"logits_processors": [lambda tokens, logits: logits * 2]}}


@pytest.mark.parametrize("options", (OPTIONS | PROCESSED).values(), ids=OPTIONS | PROCESSED)
def test_the_callers_logits_stay_as_they_are(options):
    logits = random_logits(rows=2)
    before = np.array(logits)
    mx.eval(sample(logits, [penalised_request(9, **options), request()]).tokens)
    np.testing.assert_array_equal(np.array(logits), before)


def test_a_biased_token_beyond_the_vocabulary_ends_its_row_alone():
    logits = random_logits(rows=3)
    bad, good = {VOCAB: 9.0, 2: 9.0}, {VOCAB - 1: 30.0}
    sampled = sample(logits, [request(logit_bias=bias) for bias in ({}, bad, good)])
    assert str(sampled.errors.pop(1)) == (
        f"[SamplingParams] logit_bias names token {VOCAB}: expected token ids below {VOCAB}"
    )
    assert sampled.errors == {}
    assert sampled.tokens.tolist()[::2] == [mx.argmax(logits[0]).item(), VOCAB - 1]


class Bigrams(nn.Module):
    """A model whose logits depend only on the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.table = random_logits(rows=VOCAB, seed=4)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.table[inputs]


class Recorder:
    """A processor that records its tokens and raises the logits of larger ids in each step."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.seen.append(tokens.tolist())
        return logits + 0.02 * len(tokens) * mx.arange(VOCAB)


@pytest.mark.mac
@pytest.mark.parametrize("ahead", [False, True], ids=["tokens known", "newest in flight"])
@pytest.mark.parametrize("max_tail", [3, 256])
def test_processors_see_what_mlx_lm_shows_them(monkeypatch, ahead, max_tail):
    """First the prompt, then one more token in each step, after penalties, in the given order."""
    monkeypatch.setattr(penalties, "MAX_TAIL", max_tail)
    prompt, steps, model = [5, 9, 9, 2, 30], 40, Bigrams()
    options: dict[str, Any] = {"logit_bias": {3: 1.0}, "repetition_penalty": 1.5}
    theirs, ours = Recorder(), Recorder()

    def halve(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, ::2] = logits[:, ::2] / 2  # in place, as processors do
        return logits

    generated = generate_step(
        mx.array(prompt),
        model,
        max_tokens=steps,
        logits_processors=[*make_logits_processors(**options), theirs, halve],
    )
    expected = [token for token, _ in islice(generated, steps)]
    made = request(prompt=prompt, logits_processors=[ours, halve], **options)
    sampler, newest = Sampler(), last_tokens([made])
    for _ in range(steps):
        sampled = sampler(model(newest), [made], newest)
        if made.num_in_flight:
            made.tokens.append(newest.item())
        made.num_in_flight = int(ahead)
        newest = sampled.tokens
        if not ahead:
            made.tokens.append(newest.item())
    assert made.num_tokens == len(prompt) + steps
    assert made.generated == expected[: len(made.generated)]
    assert newest.item() == expected[-1]
    assert ours.seen == theirs.seen[:steps]


class CountingTokens(list[int]):
    """Tokens that record the length of each slice."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.taken: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        if isinstance(index, slice):
            self.taken.append(len(result))
        return result


def test_a_long_history_is_converted_in_pieces(monkeypatch):
    monkeypatch.setattr(penalties, "MAX_TAIL", 10)
    made, sampler = request(logits_processors=[lambda tokens, logits: logits]), Sampler()
    made.tokens = CountingTokens(range(100))
    for _ in range(100):
        sampler(random_logits(rows=1), [made], last_tokens([made]))
        made.tokens.append(0)
    assert sum(n > 10 for n in made.tokens.taken) == 10  # the first, then one in 11 steps
    assert sum(made.tokens.taken) < 100 * 100 / 4


def test_a_dropped_step_leaves_no_trace_in_a_history(monkeypatch):
    monkeypatch.setattr(penalties, "MAX_TAIL", 0)
    seen = Recorder()
    made, sampler, logits = request(logits_processors=[seen]), Sampler(), random_logits(rows=1)
    sampler(logits, [made], mx.array([0]))
    made.tokens.append(1)
    made.num_in_flight = 1
    sampler(logits, [made], mx.array([7]))  # never looked at
    made.num_in_flight = 0
    sampler(logits, [made], mx.array([1]))
    assert seen.seen == [[0], [0, 1, 7], [0, 1]]


def fail(tokens: mx.array, logits: mx.array) -> mx.array:
    logits[:] = -mx.inf
    raise ZeroDivisionError("no such grammar")


WRONG_RESULTS = {
    "nothing": (lambda tokens, logits: None, "a NoneType"),
    "a list": (lambda tokens, logits: logits.tolist(), "a list"),
    "another shape": (
        lambda tokens, logits: logits[0],
        f"an array of mlx.core.float32 of shape ({VOCAB},)",
    ),
    "another vocabulary": (
        lambda tokens, logits: logits[:, :5],
        "an array of mlx.core.float32 of shape (1, 5)",
    ),
    "a mask": (
        lambda tokens, logits: logits > 0,
        f"an array of mlx.core.bool of shape (1, {VOCAB})",
    ),
}


def assert_only_the_middle_row_fails(processor: Any, error: type[Exception], message: str) -> None:
    logits = random_logits(rows=3, seed=5)
    double = {"logits_processors": [lambda tokens, logits: logits * 2], "logprobs": VOCAB}
    broken = double | {"logits_processors": [*double["logits_processors"], processor]}
    sampled = sample(logits, [request(**options) for options in (double, broken, double)])
    assert list(sampled.errors) == [1]
    assert type(sampled.errors[1]) is error and str(sampled.errors[1]) == message
    expected = (2 * logits) - mx.logsumexp(2 * logits, axis=-1, keepdims=True)
    np.testing.assert_array_equal(distributions(sampled)[::2], np.array(expected)[::2])
    untouched = mlx_lm_log_probabilities([0], logits[1:2])
    np.testing.assert_array_equal(distributions(sampled)[1], untouched)


def test_a_failing_processor_ends_its_row_alone():
    assert_only_the_middle_row_fails(fail, ZeroDivisionError, "no such grammar")


@pytest.mark.parametrize(("processor", "returned"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_a_processor_that_returns_no_logits_ends_its_row_alone(processor, returned):
    message = (
        f"[SamplingParams] logits_processors[1] returned {returned}: "
        f"expected an mx.array of floats of shape (1, {VOCAB})"
    )
    assert_only_the_middle_row_fails(processor, ValueError, message)


def test_an_error_is_gone_with_its_step():
    failures = [True, False]

    def fail_once(tokens: mx.array, logits: mx.array) -> mx.array:
        return fail(tokens, logits) if failures.pop(0) else logits

    made, sampler = request(logits_processors=[fail_once]), Sampler()
    steps = [sampler(random_logits(rows=1), [made], last_tokens([made])) for _ in range(2)]
    assert [list(step.errors) for step in steps] == [[0], []]


def test_a_processor_that_widens_its_logits_leaves_the_other_rows_narrow():
    logits = random_logits(rows=2, seed=6).astype(mx.bfloat16)
    widen = {"logits_processors": [lambda tokens, logits: logits.astype(mx.float32) * 2]}
    keep = {"logits_processors": [lambda tokens, logits: logits]}
    sampled = sample(logits, [request(logprobs=VOCAB, **options) for options in (widen, keep)])
    expected = mlx_lm_log_probabilities([0], logits[1:])
    np.testing.assert_array_equal(distributions(sampled)[1], expected)


def test_drafts_copy_no_more_tokens_than_the_window_has():
    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all tokens of the request are read")

    alone = penalised_request(60, repetition_penalty=1.3, repetition_context_size=5)
    drafts, expected = {alone.id: (3, 4)}, [*alone.tokens, 3, 4]
    alone.tokens = Long(alone.tokens)
    found = penalties.Penalties([alone] * 3, [0, 1, 2], drafts)._known_past(np.array([60, 61, 62]))
    assert found.tolist() == [expected[stop - 5 : stop - 1] for stop in (60, 61, 62)]


HUGE: dict[str, tuple[dict[str, Any], int | None]] = {
    "bias": ({"logit_bias": {5: 1e9, 7: -1e9, 3: -np.inf}}, 5),
    "bias beyond float32": ({"logit_bias": {5: 1e300, 7: -1e300}}, 5),
    "bias and penalties": ({"logit_bias": {5: 1e9}, "presence_penalty": -1e9}, None),
    "presence": ({"presence_penalty": 1e6}, None),
    "negative presence": ({"presence_penalty": -1e300}, 9),
    "frequency": ({"frequency_penalty": 1e6}, None),
    "negative frequency": ({"frequency_penalty": -1e5}, 9),
    "repetition": ({"repetition_penalty": 1e30}, None),
    "tiny repetition": ({"repetition_penalty": 1e-300}, None),
    "all": (
        {
            "logit_bias": {5: 1e9, 9: -np.inf},
            "repetition_penalty": 1e-6,
            "presence_penalty": 1e9,
            "frequency_penalty": -1e9,
        },
        5,
    ),
}
"""Options that overflow in float16 and most of them also in float32, and the token they force."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("options", "forced"), HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_huge_options_leave_finite_log_probabilities(dtype, options, forced, temperature):
    logits = random_logits(rows=2, seed=8).astype(dtype)
    made = request(
        prompt=[9] * 12,
        temperature=temperature,
        logprobs=VOCAB,
        frequency_context_size=0,
        **options,
    )
    sampled = sample(logits, [made, request(logprobs=VOCAB)])
    found = distributions(sampled)
    forbidden = [t for t, bias in dict(made.params.logit_bias).items() if bias == -np.inf]
    assert np.isfinite(np.delete(found[0], forbidden)).all()
    assert (found[0][forbidden] == -np.inf).all()
    assert np.isfinite(np.array(sampled.logprobs)).all()
    assert forced is None or int(sampled.tokens[0]) == forced
    np.testing.assert_array_equal(found[1], mlx_lm_log_probabilities([0], logits[1:]))

"""Samplers that callers pass, with the interface of mlx-lm's."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from mlx_paged import Engine, FinishReason
from tests.support.engine.sampling_cases import VOCAB, log_softmax, random_logits, request, sample
from tests.support.models.tiny_models import solo_greedy, tiny_model

PROMPT = [5, 9, 77, 3, 21, 64, 8]


def least_likely(logprobs: mx.array) -> mx.array:
    return mx.argmin(logprobs, axis=-1)


def fail(logprobs: mx.array) -> mx.array:
    raise ZeroDivisionError("no such die")


def test_a_callers_sampler_chooses_for_its_row_alone():
    logits = random_logits(rows=4, seed=1)
    rows = [{}, {"sampler": least_likely}, {"temperature": 1.0, "top_k": 1}, {"sampler": mx.argmax}]
    rows[3]["sampler"] = lambda logprobs: mx.argmax(logprobs, axis=-1).astype(mx.uint32)
    sampled = sample(logits, [request(**options) for options in rows])
    most, least = np.argmax(np.array(logits), axis=-1), np.argmin(np.array(logits), axis=-1)
    assert sampled.tokens.dtype == mx.int32
    assert sampled.tokens.tolist() == [most[0], least[1], most[2], most[3]]
    expected = log_softmax(logits)[np.arange(4), sampled.tokens.tolist()]
    np.testing.assert_allclose(np.array(sampled.logprobs), expected, atol=1e-5)


def test_a_sampler_is_shown_the_log_probabilities_of_its_row_after_penalties():
    seen = []

    def note(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    logits = random_logits(rows=3, seed=2)
    rows = [request(sampler=note), request(), request(sampler=note, logit_bias={3: 5.0})]
    sampled = sample(logits, rows)
    biased = logits.at[2, 3].add(5.0)
    np.testing.assert_allclose(
        np.array(mx.concatenate(seen)), log_softmax(biased)[[0, 2]], atol=1e-5
    )
    np.testing.assert_allclose(np.array(sampled.distributions), log_softmax(biased), atol=1e-5)


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (fail, ZeroDivisionError, "no such die"),
        (lambda _: 7, ValueError, "returned a int:"),
        (lambda logprobs: mx.argmax(logprobs), ValueError, "of shape ():"),
        (lambda logprobs: logprobs[:, 0], ValueError, "an array of mlx.core.float32"),
    ],
    ids=["raises", "no array", "another shape", "no integers"],
)
def test_a_failing_sampler_ends_its_row_alone(sampler, error, message):
    logits = random_logits(rows=3, seed=3)
    rows = [request(sampler=least_likely), request(sampler=sampler), request()]
    sampled = sample(logits, rows)
    assert list(sampled.errors) == [1] and type(sampled.errors[1]) is error
    assert message in str(sampled.errors[1])
    assert sampled.tokens[0].item() == np.argmin(np.array(logits)[0])
    assert sampled.tokens[2].item() == np.argmax(np.array(logits)[2])


@pytest.mark.parametrize(
    "options", [{"sampler": fail}, {"logits_processors": [lambda *_: fail(None)]}], ids=" ".join
)
def test_a_rows_error_keeps_nothing_of_its_callers_alive(options):
    (error,) = sample(random_logits(rows=1), [request(**options)]).errors.values()
    assert error.__traceback__ is None


def test_a_row_whose_processor_failed_is_not_shown_to_its_sampler():
    broken = request(sampler=fail, logits_processors=[lambda tokens, logits: None])
    sampled = sample(random_logits(rows=1), [broken])
    assert "logits_processors[0]" in str(sampled.errors[0])


@pytest.mark.parametrize(("given", "token"), [(-1, 0), (VOCAB, VOCAB - 1), (2**31 - 1, VOCAB - 1)])
def test_no_sampler_leads_outside_the_vocabulary(given, token):
    sampled = sample(random_logits(rows=1), [request(sampler=lambda _: mx.array([given]))])
    assert sampled.tokens.tolist() == [token]


def interrupt(*_: mx.array) -> mx.array:
    raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{"sampler": interrupt}, {"logits_processors": [interrupt]}])
def test_an_interrupt_is_not_the_rows_error(options):
    with pytest.raises(KeyboardInterrupt):
        sample(random_logits(rows=1), [request(**options)])


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [True, False])
def test_a_request_with_mlx_lms_sampler_generates_what_mlx_lm_generates(lookahead):
    model = tiny_model("llama")
    mx.random.seed(7)
    drawn = generate_step(mx.array(PROMPT), model, max_tokens=12, sampler=make_sampler(0.8, 0.9))
    expected = [int(token) for token, _ in drawn]
    engine = Engine(model, block_size=4, num_blocks=64, lookahead=lookahead, prewarm=False)
    mx.random.seed(7)
    (done,) = engine.generate([PROMPT], max_tokens=12, sampler=make_sampler(0.8, 0.9))
    assert done.tokens == expected != solo_greedy(model, PROMPT, 12)


def test_a_request_whose_sampler_fails_ends_alone():
    model = tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=64, prewarm=False)
    ids = [engine.add_request(PROMPT, max_tokens=8, sampler=s) for s in (None, fail)]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert done[ids[0]].tokens == solo_greedy(model, PROMPT, 8)
    assert done[ids[1]].finish_reason is FinishReason.ERROR
    assert done[ids[1]].error == "ZeroDivisionError: no such die"
    assert engine.manager.blocks_in_use == 0

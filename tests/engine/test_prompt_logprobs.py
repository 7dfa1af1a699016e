"""Log-probabilities of prompt tokens are those of mlx-lm's evaluate."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.request import Request
from mlx_paged.runner import model_runner
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.step_memory import step_bytes
from mlx_paged.sampling import prompt_scores
from mlx_paged.sampling.prompt_scores import PromptScores
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import MOST_SCORED
from tests.support.commands.server_harness import demo
from tests.support.engine.mlx_lm_scores import (
    CONTEXTS,
    ENDS,
    likeliest,
    loglikelihoods,
    scores_of,
)
from tests.support.models.tiny_models import VOCAB, tiny_model

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (5, 40, 1, 17, 150, 33, 2)]
SHARED = [PROMPTS[4][:100] + tail for tail in ([], PROMPTS[0], PROMPTS[3])]
CASES = [
    *(("llama", chunk) for chunk in (1, 7, 512)),
    *((kind, 16) for kind in ("gemma2", "gemma3_text", "mixtral", "jamba", "deepseek_v3")),
]


def make_engine(model, **options):
    return Engine(model, **({"block_size": 4, "num_blocks": 400, "max_running": 5} | options))


def assert_scores(model, prompt, completion, first=1):
    """The completion has mlx-lm's log-probabilities from the token `first` on."""
    given = completion.prompt_logprobs
    assert len(given) == len(prompt) and not any(given[:first])
    if first < len(prompt):
        expected, is_greedy = scores_of(model, prompt)
        found = [each.logprob for each in given[first:]]
        np.testing.assert_allclose(found, expected[first - 1 :], rtol=1e-4, atol=1e-4)
        assert [each.rank == 1 for each in given[first:]] == is_greedy[first - 1 :]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "chunk"), CASES)
def test_a_ragged_batch_has_mlx_lms_scores(kind, chunk):
    model = tiny_model(kind)
    engine = make_engine(model, prefill_chunk=chunk)
    done = engine.generate(PROMPTS, max_tokens=3, prompt_logprobs=3)
    plain = make_engine(model, prefill_chunk=chunk).generate(PROMPTS, max_tokens=3)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_scores(model, prompt, completion)
        tops = [[token for token, _ in each.top] for each in completion.prompt_logprobs[1:]]
        assert tops == likeliest(model, prompt, 3)
        for each in completion.prompt_logprobs[1:]:
            assert each.top[0][1] == max(logprob for _, logprob in each.top) >= each.logprob
    assert engine.manager.blocks_in_use == 0


def test_only_those_who_ask_get_them(llama):
    params = [SamplingParams(max_tokens=2, prompt_logprobs=n) for n in (None, 0, 2, None, 5)]
    done = make_engine(llama).generate(PROMPTS[:5], params)
    assert [len(c.prompt_logprobs) for c in done] == [0, 40, 1, 0, 150]
    assert {len(each.top) for each in done[1].prompt_logprobs[1:]} == {0}
    assert {len(each.top) for each in done[4].prompt_logprobs[1:]} == {5}


def test_a_known_prefix_is_computed_again_from_where_they_are_wanted(llama):
    engine = make_engine(llama)
    engine.generate(SHARED, max_tokens=1)
    for first, cached in ((0, 0), (1, 0), (61, 60), (101, 100)):
        options = {"prompt_logprobs": 0, "prompt_logprobs_from": first}
        done = engine.generate(SHARED[1:], max_tokens=1, **options)
        for prompt, completion in zip(SHARED[1:], done, strict=True):
            assert completion.cached_prompt_tokens == cached
            assert_scores(llama, prompt, completion, first=max(1, first))
    (last,) = engine.generate(SHARED[1:2], max_tokens=1, **options | {"prompt_logprobs_from": 999})
    assert last.prompt_logprobs == (None,) * 105 and last.cached_prompt_tokens == 104


def test_what_was_computed_for_them_is_a_prefix_for_others(llama):
    engine = make_engine(llama)
    engine.generate(SHARED[:1], max_tokens=1, prompt_logprobs=0)
    assert engine.generate(SHARED[1:2], max_tokens=1)[0].cached_prompt_tokens == 100


def test_every_sample_has_those_of_its_prompt(llama):
    engine = make_engine(llama, max_running=8, prefill_chunk=16)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 4, "prompt_logprobs": 1}
    for prompt, done in zip(PROMPTS, engine.sample(PROMPTS, 3, **options), strict=True):
        for completion in done:
            assert_scores(llama, prompt, completion)
    assert engine.stats.prompt_tokens == sum(map(len, PROMPTS))


def test_the_next_sample_takes_over_from_one_that_is_aborted(llama):
    engine = make_engine(llama, prefill_chunk=16)
    first, second = engine.add_samples(PROMPTS[4], 2, max_tokens=1, prompt_logprobs=0)
    engine.step()
    engine.abort(first)
    outputs = [output for _ in range(20) for output in engine.step()]
    (done,) = [output.completion for output in outputs if output.request_id == second]
    assert_scores(llama, PROMPTS[4], done)


def test_preemption_changes_nothing(llama):
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 100]
    engine = make_engine(llama, num_blocks=30, prefill_chunk=16, max_running=8)
    done = engine.generate(prompts, max_tokens=60, prompt_logprobs=0)
    assert engine.stats.preemptions > 0
    for prompt, completion in zip(prompts, done, strict=True):
        assert_scores(llama, prompt, completion)


def test_a_fork_has_those_of_its_suffix(llama):
    engine = make_engine(llama)
    parent = engine.add_request(PROMPTS[1], max_tokens=4, keep=True)
    while engine.has_work:
        engine.step()
    whole = engine.request(parent).tokens + PROMPTS[3]
    child = engine.fork(parent, PROMPTS[3], max_tokens=1, prompt_logprobs=0)
    (done,) = [o.completion for _ in range(3) for o in engine.step() if o.request_id == child]
    assert_scores(llama, whole, done, first=len(whole) - len(PROMPTS[3]))


def test_steps_have_few_rows_of_logits(llama, monkeypatch):
    rows = []

    class Counted(PromptScores):
        def __init__(self, spans, logits):
            super().__init__(spans, logits)
            rows.append(len(self._rows))

    monkeypatch.setattr(model_runner, "PromptScores", Counted)
    engine = make_engine(llama, max_running=16)
    engine.generate(PROMPTS + SHARED, max_tokens=1, prompt_logprobs=0)
    assert max(rows) == MOST_SCORED
    assert sum(rows) == sum(len(prompt) - 1 for prompt in PROMPTS + SHARED)
    assert len(rows) <= sum(rows) // MOST_SCORED + 3
    rows.clear()
    engine.generate([PROMPTS[4][:70]] * 6, max_tokens=1, prompt_logprobs=0)
    assert len(rows) == 1 + 6 * 69 // MOST_SCORED, "a request waits for blocks that it does not use"
    rows.clear()
    options = {"prompt_logprobs": 0, "prompt_logprobs_from": 120, "max_tokens": 1}
    engine.reset_prefix_cache()
    before = engine.stats.steps
    engine.generate(PROMPTS[4:5], **options)
    assert rows == [30] and engine.stats.steps == before + 1


@pytest.mark.parametrize("message", ["a bug", "[METAL] Command buffer execution failed: x"])
def test_a_part_that_fails_is_computed_again(llama, monkeypatch, message):
    """While the step before it is under way, whose tokens count if the device has not failed."""
    calls, original = [], prompt_scores.scored

    def fails_once(*arguments):
        calls.append(1)
        if len(calls) == 15:  # in the second step
            raise RuntimeError(message)
        return original(*arguments)

    monkeypatch.setattr(prompt_scores, "scored", fails_once)
    engine = make_engine(llama)
    done = engine.generate(PROMPTS, max_tokens=3, prompt_logprobs=0)
    plain = make_engine(llama).generate(PROMPTS, max_tokens=3)
    assert [c.tokens for c in done] == [c.tokens for c in plain]
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_scores(llama, prompt, completion)
    assert engine.stats.faults == 1 and engine.manager.blocks_in_use == 0


@pytest.mark.parametrize("count", [0, 5])
def test_a_step_takes_no_more_memory_than_is_counted(monkeypatch, count):
    model = tiny_model("llama", vocab_size=60_000)
    engine, peaks = make_engine(model, max_running=1, prefill_chunk=64, num_blocks=64), []

    class Measured(PromptScores):
        def __init__(self, spans, logits):
            mx.eval(logits)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            super().__init__(spans, logits)
            peaks.append(mx.get_peak_memory() - before)

    monkeypatch.setattr(model_runner, "PromptScores", Measured)
    engine.generate([PROMPTS[1]], prompt_logprobs=count, max_tokens=1)  # what is made once
    mx.synchronize()
    peaks.clear()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    engine.generate([PROMPTS[4]], prompt_logprobs=count, max_tokens=1)
    of_part = 4 * prompt_scores.ARRAYS * prompt_scores.PART * 60_000
    assert (0.3 if count else 0.05) * of_part < max(peaks) <= of_part
    profile = probe(model)
    assert mx.get_peak_memory() - before <= step_bytes(model, profile, 64, 1)


def test_steps_without_them_ask_no_request(llama, monkeypatch):
    asked = []
    monkeypatch.setattr(Request, "scored", lambda *_: asked.append(1) or range(0))
    engine = make_engine(llama, prefix_cache=False)
    engine.generate(PROMPTS, max_tokens=4)
    assert not asked


def test_log_likelihoods_are_those_of_mlx_lms_evaluate():
    """Contexts are shared: the engine computes each once."""
    model, tokenizer = demo()
    pairs = [(context, end) for context in CONTEXTS for end in ENDS]
    expected = loglikelihoods(model, tokenizer, pairs)
    engine = Engine(model, tokenizer, num_blocks=200)
    prompts = [tokenizer.encode(context + end) for context, end in pairs]
    firsts = [len(tokenizer.encode(context)) for context, _ in pairs]
    params = [SamplingParams(1, prompt_logprobs=0, prompt_logprobs_from=n) for n in firsts]
    done = engine.generate(prompts, params)
    for completion, first, (logprob, is_greedy) in zip(done, firsts, expected, strict=True):
        of_end = completion.prompt_logprobs[first:]
        assert sum(each.logprob for each in of_end) == pytest.approx(logprob, abs=1e-3)
        assert all(each.rank == 1 for each in of_end) == is_greedy
    assert any(is_greedy for _, is_greedy in expected) and not all(g for _, g in expected)


def test_equally_likely_tokens_have_different_ranks():
    """As for greedy decoding, the first one is the likeliest."""
    request = Request(0, [0, 2, 1, 3], SamplingParams(prompt_logprobs=2), 0)
    request.prompt_logprobs = [None] * 4
    PromptScores([(request, range(0, 3))], mx.array([[1.0, 5.0, 5.0, 0.0]] * 3)).deliver()
    ranks = [each.rank for each in request.prompt_logprobs[1:]]
    assert ranks == [2, 1, 4]
    assert [token for token, _ in request.prompt_logprobs[1].top] == [1, 2]


REFUSED = {
    "a beam search": (lambda e: e.beam_search([1], 2, prompt_logprobs=0), "None in a beam search"),
    "a number": (lambda e: e.generate([1], prompt_logprobs=-1), "expected None or an integer"),
    "from": (lambda e: e.generate([1], prompt_logprobs_from=-1), "expected an integer >= 0"),
}


@pytest.mark.parametrize(("call", "expected"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_refused_by_name(llama, call, expected):
    with pytest.raises(ValueError, match=rf"prompt_logprobs\w* is .*{expected}"):
        call(make_engine(llama))


def test_several_processes_refuse_them_by_name(llama):
    engine = make_engine(llama)
    engine.scheduler._scores = False
    with pytest.raises(ValueError, match="prompt_logprobs is 0: expected None, for several"):
        engine.add_request([1, 2], prompt_logprobs=0)

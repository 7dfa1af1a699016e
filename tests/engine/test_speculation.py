"""With drafts, right and wrong ones, an engine gives the tokens of mlx-lm without any."""

import random
import time

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_paged import Engine, SamplingParams
from mlx_paged.runner.compiled_decode import CompiledDecode
from mlx_paged.runner.drafting import DRAFTERS
from mlx_paged.scheduler.pace import Pace
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models.tiny_models import VOCAB, tiny_model
from tests.support.simulation.injected_drafts import InjectedDrafter
from tests.support.simulation.solo_runs import MlxLmSolo, solo_run

pytestmark = pytest.mark.usefixtures("eager")


ARCHITECTURES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral")
"""Full attention, windows, windows with sinks, latents, experts."""


def engine_with(model, share: float, **options: object) -> Engine:
    """An engine whose drafts are right as often as `share` says, and many."""
    options = {"block_size": 4, "num_blocks": 200, "prefill_chunk": 7} | options
    engine = Engine(model, speculate="ngram", **options)
    drafter = InjectedDrafter(random.Random(1), MlxLmSolo(model, VOCAB), share)
    scheduler = engine.scheduler
    scheduler.decoding = Speculation([drafter], scheduler.allocator, scheduler.budget)
    return engine


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(3, 30))] for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tokens_are_mlx_lms(architecture, share, temperature):
    model = tiny_model(architecture)
    engine, solo = engine_with(model, share), MlxLmSolo(model, VOCAB)
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=i) for i in range(5)]
    done = engine.generate(prompts(5), params)
    for prompt, param, completion in zip(prompts(5), params, done, strict=True):
        expected = solo_run(solo, prompt, param, param.seed, b"")
        first = next((i for i, t in enumerate(expected.tokens) if t != completion.tokens[i]), None)
        assert first is None or expected.margins[first] < 1e-4, (completion, expected)
    drafted, accepted = engine.stats.drafts, engine.stats.accepted_drafts
    assert drafted > 20 and accepted == sum(c.accepted_drafts for c in done)
    assert share == 0.6 or abs(accepted / drafted - share) < 0.2
    if share == 1.0:
        assert engine.stats.steps < 5 * 20 / 2, "drafts save steps"
    engine.scheduler.allocator.check_integrity()
    assert engine.scheduler.allocator.store.blocks_in_use == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.5, "repetition_context_size": 8},
        {"presence_penalty": 0.7, "presence_context_size": 5},
        {"frequency_penalty": 0.9, "frequency_context_size": 30},
        {"logit_bias": {3: 2.0, 5: -1.5}},
    ],
    ids=lambda p: next(iter(p)),
)
def test_penalties_see_the_accepted_tokens_before_each_draft(penalty):
    model = tiny_model("llama")
    engine = engine_with(model, 0.0, num_blocks=400)

    class Plain:  # the drafts must be right with the penalty, so they come from mlx-lm with it
        vocab, ends = VOCAB, frozenset()

        def tokens(self, prompt, params, seed, salt, begun=()):
            options = dict(penalty)
            steps = generate_step(
                mx.array(prompt),
                model,
                max_tokens=params.max_tokens,
                logits_processors=make_logits_processors(**options),
            )
            return [int(token) for token, _ in steps], []

    drafter = engine.scheduler.decoding.drafters[0]
    drafter._model, drafter.share = Plain(), 0.7
    done = engine.generate(prompts(4), SamplingParams(max_tokens=25, **penalty))
    for prompt, completion in zip(prompts(4), done, strict=True):
        assert completion.tokens == Plain().tokens(prompt, completion_params(25), 0, b"")[0]
    assert engine.stats.accepted_drafts > 30


def test_wrong_drafts_leave_no_penalty():
    """Two wrong drafts, then two right ones: the rows of two steps look alike, but their pasts are
    not."""
    model, params = tiny_model("llama"), SamplingParams(max_tokens=40, presence_penalty=3.0)
    processors = make_logits_processors(presence_penalty=3.0)
    prompt = mx.array(prompts(1)[0])
    steps = generate_step(prompt, model, max_tokens=40, logits_processors=processors)
    right = [int(token) for token, _ in steps]
    engine = engine_with(model, 0.0)

    class Alternating(InjectedDrafter):
        is_right = True

        def likelihood(self, request):
            return (0.99,)

        def _drafts(self, request, depth):
            self.is_right = not self.is_right
            start = request.num_generated
            first = start if self.is_right else start + 2  # wrong ones are those to come
            return right[first : first + min(2, depth)]

    engine.scheduler.decoding.drafters[0] = Alternating(random.Random(2), MlxLmSolo(model, VOCAB))
    (completion,) = engine.generate(prompts(1), params)
    assert completion.tokens == right
    assert completion.drafts > 30 and completion.accepted_drafts > 12


def completion_params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


SAMPLING = (
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0.0, "logprobs": 2, "frequency_penalty": 0.4},
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_tokens_and_logprobs_are_those_without_drafts(options):
    model = tiny_model("llama")
    params = [SamplingParams(max_tokens=24, seed=i, **options) for i in range(4)]
    plain = Engine(model, block_size=4, num_blocks=200).generate(prompts(4), params)
    right = {tuple(p): c.tokens for p, c in zip(prompts(4), plain, strict=True)}

    class Known:
        vocab, ends = VOCAB, frozenset()

        def tokens(self, prompt, params, seed, salt, begun=()):
            return right[tuple(prompt)], []

    engine = engine_with(model, 0.7)
    engine.scheduler.decoding.drafters[0]._model = Known()
    done = engine.generate(prompts(4), params)
    for ours, theirs in zip(done, plain, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        tops = zip(ours.top_logprobs, theirs.top_logprobs, strict=True)
        assert all([t for t, _ in a] == [t for t, _ in b] for a, b in tops)
    assert engine.stats.accepted_drafts > 20


@pytest.mark.slow
def test_a_small_pool_preempts_and_shares_as_without_drafts():
    model = tiny_model("llama")
    engine, solo = engine_with(model, 0.6, num_blocks=24), MlxLmSolo(model, VOCAB)
    shared = prompts(1)[0] * 2
    asked = [[*shared, i] for i in range(6)]
    done = engine.generate(asked, SamplingParams(max_tokens=30))
    for prompt, completion in zip(asked, done, strict=True):
        assert completion.tokens == solo_run(solo, prompt, completion_params(30), 0, b"").tokens
    assert engine.stats.preemptions > 0 and engine.stats.prefix_hit_tokens > 0
    again = engine.generate(asked, SamplingParams(max_tokens=30))
    assert [c.tokens for c in again] == [c.tokens for c in done]


@pytest.mark.slow
def test_forks_and_samples_continue_beside_drafts():
    model = tiny_model("llama")
    engine, solo = engine_with(model, 0.6), MlxLmSolo(model, VOCAB)
    prompt = prompts(1)[0]
    ids = engine.add_samples(prompt, 3, SamplingParams(max_tokens=20, temperature=0.9, seed=4))
    for _ in range(6):
        engine.step()
    parent = engine.request(ids[0])
    tokens = list(parent.tokens)
    child = engine.fork(ids[0], (), SamplingParams(max_tokens=10))
    assert parent.tokens[: len(tokens)] == tokens
    start = list(engine.request(child).tokens)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    for i, request_id in enumerate(ids):
        params = SamplingParams(max_tokens=20, temperature=0.9)
        assert done[request_id].tokens == solo_run(solo, prompt, params, 4 + i, b"").tokens
    assert done[child].tokens == solo_run(solo, start, completion_params(10), 0, b"").tokens


@pytest.mark.slow
def test_a_fork_of_a_request_that_ended_amid_right_drafts_computes_its_own_tokens():
    """K/V of the drafts after the stop token is in the blocks that the fork shares."""
    model, beyond = tiny_model("llama"), 0
    solo, prompt = MlxLmSolo(model, VOCAB), prompts(1)[0]
    tokens = solo_run(solo, prompt, completion_params(20), 0, b"").tokens
    for stop in sorted({tokens.index(token) for token in tokens}):
        engine = engine_with(model, 1.0)
        options = {"max_tokens": 20, "stop_token_ids": [tokens[stop]]}
        parent = engine.add_request(prompt, keep=True, **options)
        engine.scheduler.decoding.drafters[0]._right[parent] = tokens
        while engine.has_work:
            engine.step()
        kept = engine.scheduler.parked[parent]
        beyond += kept.num_computed > len(kept.tokens)
        child = engine.fork(parent, [7, 8, 9], completion_params(10))
        start, done = list(engine.request(child).tokens), []
        while engine.has_work:
            done += [output.completion for output in engine.step() if output.completion]
        assert done[0].tokens == solo_run(solo, start, completion_params(10), 0, b"").tokens
    assert beyond > 0, "no request ended amid its drafts"


def test_ngrams_copy_what_a_prompt_repeats():
    """Drafts from the prompt itself: a bias makes the model repeat one token for ever."""
    model = tiny_model("llama")
    params = SamplingParams(max_tokens=60, logit_bias={9: 100.0})
    engine = Engine(model, block_size=4, num_blocks=100, speculate="ngram")
    (completion,) = engine.generate([[1, 2, 3]], params)
    assert completion.tokens == [9] * 60
    assert completion.accepted_drafts > 30 and engine.stats.steps < 35
    (alone,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=60, speculate=False))
    assert alone.drafts == 0


def test_an_unknown_drafter_is_named():
    expected = f"speculate is 'magic': expected .*one of {', '.join(DRAFTERS)}"
    with pytest.raises(ValueError, match=expected):
        Engine(tiny_model("llama"), num_blocks=10, speculate="magic")


# Draft models


def drafted_by(draft_model, model, **options: object) -> Engine:
    options = {"block_size": 4, "num_blocks": 200, "prefill_chunk": 7} | options
    return Engine(model, draft_model=draft_model, num_draft_tokens=4, **options)


def check_alone(model, asked, params, done) -> None:
    """Each completion is what mlx-lm gives for the request alone."""
    solo = MlxLmSolo(model, VOCAB)
    for prompt, param, completion in zip(asked, params, done, strict=True):
        expected = solo_run(solo, prompt, param, param.seed, b"")
        first = next((i for i, t in enumerate(expected.tokens) if t != completion.tokens[i]), None)
        assert first is None or expected.margins[first] < 1e-4, (completion, expected)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_model_that_drafts_for_itself_is_always_right(architecture, temperature):
    model = tiny_model(architecture)
    engine = drafted_by(model, model)
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(5)]
    done = engine.generate(prompts(5), params)
    check_alone(model, prompts(5), params, done)
    drafted, accepted = engine.stats.drafts, engine.stats.accepted_drafts
    assert drafted > 20 and accepted > 0.95 * drafted
    draft_model = engine.scheduler.decoding.drafters[0]
    assert not draft_model._drafted and draft_model._allocator.store.blocks_in_use == 0
    draft_model._allocator.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [200, 24], ids=["roomy", "preempting"])
def test_another_model_costs_steps_but_changes_no_token(num_blocks):
    model, other = tiny_model("llama"), tiny_model("qwen2")
    engine = drafted_by(other, model, num_blocks=num_blocks)
    asked = [[*prompts(1)[0], i] for i in range(6)]
    params = [SamplingParams(max_tokens=30, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    done = engine.generate(asked, params)
    check_alone(model, asked, params, done)
    assert engine.stats.drafts > 10
    assert (engine.stats.preemptions > 0) == (num_blocks == 24)
    engine.scheduler.decoding.drafters[0]._allocator.check_integrity()


def test_a_draft_model_shares_prefixes_in_its_own_pool():
    model = tiny_model("llama")
    engine = drafted_by(model, model)
    prompt = prompts(1)[0] * 3
    for _ in range(2):
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=12))
        assert completion.accepted_drafts > 4
    assert engine.scheduler.decoding.drafters[0]._allocator.prefix_hit_tokens >= len(prompt) - 4


def test_a_trace_is_no_part_of_what_a_draft_takes(monkeypatch):
    """Else a first draft that traces a graph may cost so much that no other draft is made."""
    model, now = tiny_model("llama"), [0.0]
    engine = drafted_by(model, model, compile=True, prewarm=False)
    draft_model, traced = engine.scheduler.decoding.drafters[0], CompiledDecode._traced

    def slow(self, *arrays):
        now[0] += 1.0
        return traced(self, *arrays)

    monkeypatch.setattr(CompiledDecode, "_traced", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine.generate(prompts(3), completion_params(12))
    assert draft_model.pooled.reports["traces"].seconds >= 1
    assert draft_model.pace == Pace()


def test_a_draft_model_that_fails_ends_no_request(caplog):
    model = tiny_model("llama")
    engine = drafted_by(model, model)
    runner = engine.scheduler.decoding.drafters[0].pooled.runner
    runner.launch = lambda step, before: 1 / 0
    (completion,) = engine.generate(prompts(1), completion_params(20))
    expected = solo_run(MlxLmSolo(model, VOCAB), prompts(1)[0], completion_params(20), 0, b"")
    assert completion.tokens == expected.tokens and completion.drafts == 0
    assert "what drafts failed" in caplog.text and "division by zero" in caplog.text


@pytest.mark.parametrize("part", ["launch", "collect"])
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_a_draft_model_that_fails_later_ends_no_request(model_type, part, caplog):
    """What was planned of its sequences in the step that failed was not computed."""
    model = tiny_model("llama")
    engine = drafted_by(tiny_model(model_type), model)
    runner, calls = engine.scheduler.decoding.drafters[0].pooled.runner, []
    compute = getattr(runner, part)

    def failing(*args):
        calls.append(part)
        if len(calls) > 6:
            raise RuntimeError("no memory")
        return compute(*args)

    setattr(runner, part, failing)
    params = [completion_params(20)] * 3
    done = engine.generate(prompts(3), params)
    check_alone(model, prompts(3), params, done)
    assert "what drafts failed" in caplog.text
    engine.scheduler.decoding.drafters[0].pooled.check_integrity()


def test_after_a_fault_the_draft_model_starts_again(monkeypatch):
    model = tiny_model("llama")
    engine = drafted_by(model, model)
    failures = [False] * 5 + [True]
    launch = engine.runner.launch

    def fails_once(step, before):
        if failures and failures.pop(0):
            raise RuntimeError("the device failed")
        return launch(step, before)

    monkeypatch.setattr(engine.runner, "launch", fails_once)
    params = [completion_params(20)] * 3
    done = engine.generate(prompts(3), params)
    solo = MlxLmSolo(model, VOCAB)
    for prompt, completion in zip(prompts(3), done, strict=True):
        assert completion.tokens == solo_run(solo, prompt, params[0], 0, b"").tokens
    assert engine.stats.faults == 1


def test_the_memory_is_divided_by_what_a_token_takes():
    model = tiny_model("llama")
    alone = Engine(model, block_size=4, kv_memory=10**6)
    both = Engine(model, block_size=4, kv_memory=10**6, draft_model=model)
    blocks, others = alone.manager.allocator.num_blocks, both.manager.allocator.num_blocks
    drafting = both.scheduler.decoding.drafters[0]._allocator.num_blocks
    assert others == drafting and 2 * others <= blocks <= 2 * others + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": tiny_model("llama", vocab_size=99)}, "vocabulary of 99 .* expected 128"),
        ({"draft_model": tiny_model("gemma2")}, "one sequence at a time"),
        ({"draft_model": tiny_model("llama"), "speculate": "ngram"}, "speculate is 'ngram'"),
        ({"draft_model": tiny_model("llama"), "num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ],
    ids=["vocabulary", "one at a time", "two drafters", "no tokens"],
)
def test_what_cannot_draft_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model("llama"), block_size=4, num_blocks=50, **options)

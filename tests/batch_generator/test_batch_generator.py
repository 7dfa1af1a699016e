"""mlx_paged.BatchGenerator beside mlx-lm's, and under the callers of mlx-lm's."""

import sys
from argparse import Namespace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import server as stock_server
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.generate import GenerationBatch, StopSequences, batch_generate
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_paged.batch_generator.generator import BatchGenerator
from mlx_paged.cli import demo_model_path
from mlx_paged.loading import load_model
from mlx_paged.sampling_params import SamplingParams
from tests.support.engine.batch_generators import (
    PROMPTS,
    assert_drained,
    assert_drained_after,
    model,
    paged,
    run,
    tokens_of,
)
from tests.support.models.tiny_models import VOCAB, solo_greedy

stock_generate = sys.modules["mlx_lm.generate"]

MIXED_ROWS = {
    "samplers": [make_sampler(0), None, lambda p: mx.argmin(p, axis=-1), None, None],
    "logits_processors": [None, make_logits_processors(repetition_penalty=1.5), None, None, []],
}


@pytest.mark.mac
@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, MIXED_ROWS], ids=["greedy", "mixed rows"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("batch", [2, 32], ids="batch{}".format)
def test_tokens_and_log_probabilities_are_those_of_mlx_lm(options, batch, lookahead):
    found = []
    for kind in (StockGenerator, partial(paged, lookahead=lookahead)):
        first = (model(),) if kind is StockGenerator else ()
        generator = kind(*first, max_tokens=9, completion_batch_size=batch, prefill_batch_size=2)
        generator.insert(PROMPTS[:3], **{name: rows[:3] for name, rows in options.items()})
        generator.next()
        rest = {name: rows[3:] for name, rows in options.items()}
        assert generator.insert(PROMPTS[3:], [4, 12], **rest) == [3, 4]
        found.append(run(generator)[1])
    expected, ours = found
    assert tokens_of(ours) == tokens_of(expected)
    for uid in expected:
        for theirs, response in zip(expected[uid], ours[uid], strict=True):
            assert_alike(response, theirs)
    del theirs, response
    assert_drained_after(ours, generator)


def assert_alike(response, theirs):
    assert isinstance(response, GenerationBatch.Response)
    assert response.finish_reason == theirs.finish_reason
    assert response.all_tokens == theirs.all_tokens
    np.testing.assert_allclose(np.array(response.logprobs), np.array(theirs.logprobs), atol=1e-4)
    if theirs.prompt_cache is None:
        assert response.prompt_cache is None


@pytest.mark.mac
def test_a_stop_sequence_ends_its_sequence_with_the_token_that_completes_it():
    free = solo_greedy(model(), PROMPTS[1], 20)
    stops = [
        [free[3:5]],
        [free[6:9], [free[2], free[2] + 1]],
        [[VOCAB - 1] * 3],
        [free[7:8]],
        [free[4:5] * 2],
    ]
    found = []
    for kind in (StockGenerator, partial(BatchGenerator, lookahead=True)):
        generator = kind(model(), max_tokens=20, stop_tokens=[free[5:6]])
        generator.insert([PROMPTS[1]] * 5, stop_sequences=[StopSequences(s) for s in stops])
        generator.insert([PROMPTS[1]])
        responses = run(generator)[1]
        ends = {
            uid: (last[-1].finish_reason, last[-1].all_tokens) for uid, last in responses.items()
        }
        found.append((tokens_of(responses), ends))
    assert found[0] == found[1]
    assert_drained_after(responses, generator)
    assert generator._engine.stats.generation_tokens <= 6 * 20 - 40  # those that ended do not go on
    assert {reason for reason, _ in found[0][1].values()} == {"stop", "length"}


@pytest.mark.mac
@pytest.mark.parametrize("step_size", [4, 16, 512])
def test_the_ends_of_segments_are_told_as_by_mlx_lm(step_size):
    segments = [[PROMPTS[1][:7], PROMPTS[1][7:30], PROMPTS[1][30:]], [[], PROMPTS[0][:1]]]
    segments += [[PROMPTS[3][:16], PROMPTS[3][16:]], [PROMPTS[4]]]
    ends = []
    for kind in (StockGenerator, paged):
        first = (model(),) if kind is StockGenerator else ()
        generator = kind(*first, max_tokens=3, prefill_step_size=step_size)
        generator.insert_segments(segments)
        prompts, _ = run(generator)
        ends.append(
            {
                uid: [(r.progress, r.end_of_prompt) for r in told if r.end_of_segment]
                for uid, told in prompts.items()
            }
        )
    assert ends[1] == ends[0]
    for told in prompts.values():
        done = [response.progress[0] for response in told]
        assert done == sorted(set(done)) and done[-1] == told[-1].progress[1]
        assert all(b - a <= step_size for a, b in zip([0, *done], done, strict=False))


def test_a_prompt_is_told_to_be_computed_before_its_first_token_comes():
    generator, told = paged(max_tokens=2), []
    generator.insert(PROMPTS)
    while True:
        prompts, tokens = generator.next()
        if not prompts and not tokens:
            break
        assert {response.uid for response in tokens} <= set(told)
        told += [response.uid for response in prompts if response.end_of_prompt]
    assert sorted(told) == list(range(len(PROMPTS)))


@pytest.mark.mac
@pytest.mark.sampled(2)
@pytest.mark.parametrize("calls", range(1, 12))
def test_a_removed_sequence_is_not_heard_of_again_and_leaves_no_block(calls):
    generator = paged(max_tokens=9)
    generator.insert([PROMPTS[1], PROMPTS[0]], max_tokens=[9, 3])
    _, before = run(generator, calls)
    generator.remove([1, 77])
    _, after = run(generator)
    assert 1 not in after
    assert tokens_of(before).get(0, []) + tokens_of(after).get(0, []) == solo_greedy(
        model(), PROMPTS[1], 9
    )
    before.clear()
    assert_drained_after(after, generator)


@pytest.mark.mac
def test_context_comes_before_the_prompt_and_is_not_told_of():
    cache = make_prompt_cache(model())
    model()(mx.array([PROMPTS[1]]), cache=cache)
    generator = paged(max_tokens=6)
    generator.insert([[3, 4, 5], [6]], caches=[cache, None], all_tokens=[PROMPTS[1], []])
    assert generator.extract_cache([0]) == {0: (cache, PROMPTS[1])}
    told = []
    while not told:
        told = [response for response in generator.next()[0] if response.uid == 0]
    assert told[0].progress == (2, 3)
    extracted, held = generator.extract_cache([0])[0]
    assert held == PROMPTS[1] + [3, 4] and extracted[0].offset == 42
    _, tokens = run(generator)
    assert tokens_of(tokens)[0] == solo_greedy(model(), PROMPTS[1] + [3, 4, 5], 6)
    assert tokens[0][-1].all_tokens[:43] == PROMPTS[1] + [3, 4, 5]


def raising(tokens, logits):
    if tokens.size > 7:
        raise ZeroDivisionError("no such grammar")
    return logits


def test_a_processor_that_raises_ends_its_own_sequence_with_an_error():
    generator = paged(max_tokens=6)
    generator.insert([PROMPTS[0]] * 2, logits_processors=[[raising], None])
    _, tokens = run(generator)
    expected = solo_greedy(model(), PROMPTS[0], 6)
    assert tokens_of(tokens)[1] == expected
    *good, last = tokens[0]
    assert [response.token for response in good] == expected[:3]
    assert last.finish_reason == "error" and last.error == "ZeroDivisionError: no such grammar"
    assert last.prompt_cache is None and last.all_tokens == PROMPTS[0] + expected[:3]
    assert last.token == expected[2] and last.logprobs[last.token].item() is not None
    del good, last
    assert_drained_after(tokens, generator)


def test_a_step_that_fails_costs_no_token(monkeypatch):
    generator = paged(max_tokens=6)
    runner, failures = generator._engine.runner, [MemoryError("no room")]
    collect = runner.collect

    def fail_once(launched):
        if failures and generator._engine.stats.steps == 4:
            raise failures.pop()
        return collect(launched)

    monkeypatch.setattr(runner, "collect", fail_once)
    generator.insert(PROMPTS)
    _, tokens = run(generator)
    assert not failures
    assert tokens_of(tokens) == {
        uid: solo_greedy(model(), prompt, 6) for uid, prompt in enumerate(PROMPTS)
    }


@pytest.mark.mac
def test_a_seeded_row_draws_the_same_tokens_in_any_company():
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    alone, together = paged(), paged()
    alone.insert([PROMPTS[0]], params=[params])
    together.insert(PROMPTS[1:])
    run(together, 3)
    (uid,) = together.insert([PROMPTS[0]], params=[params])
    drawn = tokens_of(run(alone)[1])[0]
    assert tokens_of(run(together)[1])[uid] == drawn != solo_greedy(model(), PROMPTS[0], 8)


@pytest.mark.mac
def test_sequences_that_do_not_fit_wait_and_prompts_that_start_alike_share():
    generator = paged(num_blocks=13, max_tokens=4)
    generator.insert([PROMPTS[1]] * 3 + [PROMPTS[4]])
    _, tokens = run(generator)
    expected = [solo_greedy(model(), PROMPTS[i], 4) for i in (1, 1, 1, 4)]
    assert list(dict(sorted(tokens_of(tokens).items())).values()) == expected
    assert generator._engine.stats.cached_prompt_tokens > 39


MISTAKES = {
    "max_tokens": ({"max_tokens": [1]}, "max_tokens has 1 entries: expected 2"),
    "samplers": ({"samplers": [None] * 3}, "samplers has 3 entries: expected 2"),
    "no tokens": ({"max_tokens": [4, 0]}, "max_tokens is 0"),
    "params": ({"params": [SamplingParams()]}, "params has 1 entries: expected 2"),
    "both": (
        {"params": [SamplingParams()] * 2, "samplers": [None] * 2},
        "params is given beside max_tokens, samplers or logits_processors",
    ),
    "too long": ({"max_tokens": [4, 999]}, "expected a shorter prompt"),
    "all_tokens": ({"all_tokens": [[], [VOCAB]]}, f"prompt has token {VOCAB}"),
    "stop": ({"stop_sequences": [StopSequences()]}, "stop_sequences has 1 entries: expected 2"),
    "one number": ({"max_tokens": 4}, "max_tokens is 4: expected a list with an entry for each"),
    "an array": ({"max_tokens": np.array([4])}, "max_tokens has 1 entries: expected 2"),
    "no list": ({"samplers": len}, "samplers is <built-in function len>: expected a list"),
    "no tokens before": ({"all_tokens": [None, []]}, "all_tokens[0] is None: expected a list"),
    "no caches": ({"caches": [None, "x"]}, "caches[1] is 'x': expected caches or None"),
    "lists of stops": ({"stop_sequences": [[[3]]] * 2}, "stop_sequences[0] is [[3]]: expected St"),
    "a processor": ({"logits_processors": [len, None]}, "logits_processors[0] is <built-in"),
    "no params": ({"params": [None, 3]}, "params is 3: expected SamplingParams"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_and_nothing_is_inserted(options, message):
    generator = paged()
    with pytest.raises(ValueError) as error:
        generator.insert([[3], [4, 5]], **options)
    assert message in str(error.value)
    assert generator.next() == ([], [])
    assert_drained(generator)
    assert generator.insert([[3]]) == [0]


@pytest.mark.parametrize("prompts", ["text", ["text"], [3, 4], None, 3, mx.array([3, 4]), {3: 4}])
def test_what_is_no_list_of_token_lists_is_named(prompts):
    generator = paged()
    with pytest.raises(ValueError, match=r"^\[insert\] (prompts|segments\[0\]) is .*: expected "):
        generator.insert(prompts)
    assert generator.next() == ([], [])


def test_mistakes_of_other_calls_are_named():
    generator = paged()
    for given in ("text", None, 3):
        with pytest.raises(ValueError, match=f"segments is {given!r}: expected a list"):
            generator.insert_segments(given)
    for call in (generator.remove, generator.extract_cache):
        with pytest.raises(ValueError, match="uids is 0: expected a collection"):
            call(0)
    for name, value in {"stop_tokens": [2], "prefill_step_size": None}.items():
        with pytest.raises(ValueError, match=rf"^\[BatchGenerator\] {name} is .*: expected "):
            paged(**{name: value})


def test_empty_prompts_and_caches_of_unknown_tokens_are_refused():
    cache = make_prompt_cache(model())
    generator = paged()
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generator.insert([[3], []])
    assert generator.insert([[3]], caches=[cache]) == [0]
    model()(mx.array([[1, 2, 3]]), cache=cache)
    for tokens in ([], [1, 2]):
        with pytest.raises(ValueError, match=r"caches\[0\] holds 3 tokens"):
            generator.insert([[3]], caches=[cache], all_tokens=[tokens])
    state = make_prompt_cache(model("mamba2"))
    model("mamba2")(mx.array([[1, 2, 3]]), cache=state)
    with pytest.raises(ValueError, match=r"caches\[0\] holds some tokens"):
        paged("mamba2").insert([[3]], caches=[state])
    with pytest.raises(ValueError, match="max_kv_size is 64"):
        paged("qwen2", max_kv_size=64)
    assert paged(max_kv_size=64).max_kv_size == 64  # of no effect on this model in mlx-lm either


def test_what_was_done_is_counted():
    generator = paged(max_tokens=5)
    generator.insert(PROMPTS)
    with generator.stats() as stats:
        run(generator, 3)
        with generator.stats() as rest:
            run(generator)
    assert stats.prompt_tokens == sum(map(len, PROMPTS))
    assert stats.generation_tokens == 5 * len(PROMPTS) > rest.generation_tokens > 0
    assert 5 <= stats.generation_steps <= 25
    assert 0 < stats.prompt_time + stats.decode_time <= stats.wall_time
    assert generator.stream is not None and generator.completion_batch_size == 32
    assert paged(completion_batch_size=2).completion_batch_size == 8  # prefill_batch_size
    generator.close()


def test_batch_generate_of_mlx_lm_runs_on_it(monkeypatch):
    demo, tokenizer = load_model()
    prompts = [
        tokenizer.encode(text) for text in ("def main():\n", "import os", "class A:\n    def")
    ]
    options = {"max_tokens": [5, 12, 9], "return_prompt_caches": True, "return_logprobs": True}
    expected = batch_generate(demo, tokenizer, prompts, **options)
    monkeypatch.setattr(stock_generate, "BatchGenerator", BatchGenerator)
    found = batch_generate(demo, tokenizer, prompts, **options)
    assert found.texts == expected.texts
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for ours, theirs in zip(found.caches, expected.caches, strict=True):
        assert ours[0].offset == theirs[0].offset
        np.testing.assert_allclose(
            np.array(ours[0].keys_and_values()[0]),
            np.array(theirs[0].keys_and_values()[0]),
            atol=1e-4,
        )


SERVER_ARGS = Namespace(
    model=str(demo_model_path()), adapter_path=None, draft_model=None, pipeline=False,
    trust_remote_code=False, chat_template="", use_default_chat_template=False,
    chat_template_args={}, decode_concurrency=8, prompt_concurrency=4, prefill_step_size=16,
    prompt_cache_bytes=None, kv_bits=None,
)  # fmt: skip


def served_texts(prompts):
    """What mlx-lm's server answers to text prompts, asked one after the other and all twice."""
    server = stock_server
    backend = server.ResponseGenerator(server.ModelProvider(SERVER_ARGS), LRUPromptCache(10))
    sampling = server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1)
    processing = server.LogitsProcessorArguments(None, 1.3, 20, 0.0, 20, 0.0, 20)
    texts = []
    try:
        for prompt in prompts * 2:
            _, responses = backend.generate(
                server.CompletionRequest("text", prompt, [], None, None),
                server.GenerationArguments(
                    server.ModelDescription("default_model", "default_model", None),
                    sampling, processing, ["return"], 24, 0, True, 3, None, None,
                ),
            )  # fmt: skip
            texts.append(
                [(r.text, r.token, r.finish_reason, round(r.logprob, 3)) for r in responses]
            )
    finally:
        backend.stop_and_join()
    return texts


@pytest.mark.slow
def test_the_server_of_mlx_lm_runs_on_it(monkeypatch):
    prompts = ["def main():\n", "import os\nimport sys\n" * 8]
    expected = served_texts(prompts)
    monkeypatch.setattr(stock_server, "BatchGenerator", BatchGenerator)
    assert served_texts(prompts) == expected


def test_a_generator_takes_no_drafts():
    """Its callers expect one token of each sequence in a step."""
    with pytest.raises(ValueError, match="speculate is 'ngram': expected None"):
        BatchGenerator(model("llama"), speculate="ngram")


@pytest.mark.parametrize("name", ["foo", "max_running", "prefill_chunk"])
def test_an_unknown_argument_is_its_own(name):
    """`completion_batch_size` and `prefill_step_size` are what the engine calls otherwise."""
    message = rf"^BatchGenerator\(\) got an unexpected keyword argument '{name}'$"
    with pytest.raises(TypeError, match=message):
        BatchGenerator(model("llama"), **{name: 1})

"""Caches of mlx-lm out of a BatchGenerator."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.batch_generator.generator import BatchGenerator
from tests.support.engine.batch_generators import (
    PROMPTS,
    continued,
    model,
    paged,
    run,
    tokens_of,
)
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "lfm2", "deepseek_v3"])
@pytest.mark.parametrize("end", ["length", "stop"])
def test_caches_of_ended_and_running_sequences_go_on_in_mlx_lm(model_type, end):
    generator = paged(model_type)
    stop = [solo_greedy(model(model_type), PROMPTS[3], 6)] if end == "stop" else None
    generator.insert(
        [PROMPTS[3], PROMPTS[0]],
        max_tokens=[6 if end == "length" else 20, 30],
        stop_sequences=[StopSequences(stop), StopSequences()],
    )
    responses = []
    while len(responses) < 11 or not any(response.finish_reason for response in responses):
        responses += generator.next_generated()
    last = next(response for response in responses if response.finish_reason)
    assert last.finish_reason == end
    extracted, tokens = generator.extract_cache([0, 1, 5])[1]
    expected = [solo_greedy(model(model_type), PROMPTS[i], 30) for i in (3, 0)]
    for cache, held, prompt, tail in (
        (last.prompt_cache, last.all_tokens, PROMPTS[3], expected[0]),
        (extracted, tokens, PROMPTS[0], expected[1]),
    ):
        assert held == prompt + tail[: len(held) - len(prompt)] and len(held) > len(prompt) + 3
        assert [type(c) for c in cache] == [type(c) for c in make_prompt_cache(model(model_type))]
        following = tail[len(held) - len(prompt) :]
        assert continued(copy.deepcopy(cache), [7, 8], 6, model_type) == continued(
            None, [*held, 7, 8], 6, model_type
        )
        assert len(following) > 3
    assert last.prompt_cache is last.prompt_cache
    rest = tokens_of(run(generator)[1])[1]
    assert expected[1] == [r.token for r in responses if r.uid == 1] + rest


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
@pytest.mark.parametrize("step_size", [8, 512])
def test_the_caches_at_the_end_of_a_segment_hold_just_that(step_size, model_type):
    generator = paged(model_type, prefill_step_size=step_size)
    generator.insert_segments([[PROMPTS[1][:7], PROMPTS[1][7:30], PROMPTS[1][30:]]], [4])
    held = []
    while True:
        prompts, tokens = generator.next()
        if not prompts and not tokens:
            break
        if prompts and prompts[0].end_of_segment:
            cache, context = generator.extract_cache([0])[0]
            assert context == PROMPTS[1][: prompts[0].progress[0]]
            held.append(cache[1].offset)
            assert continued(cache, PROMPTS[1][len(context) :] or [3], 3, model_type) == continued(
                None, PROMPTS[1] if len(context) < 40 else [*PROMPTS[1], 3], 3, model_type
            )
    assert held == [7, 30, 39, 40]


def test_caches_that_nobody_reads_are_not_made(monkeypatch):
    made = []
    generator = paged(max_tokens=2)
    monkeypatch.setattr(generator, "_caches_of", lambda *args: made.append(args))
    generator.insert(PROMPTS)
    _, tokens = run(generator)
    assert "finish_reason='length'" in repr(tokens[0][-1]) and not made
    assert tokens[0][-1].prompt_cache is None and len(made) == 1


def test_caches_are_copied_but_for_the_newest_token(monkeypatch):
    generator, computed = paged(), []
    generator.insert([PROMPTS[1]], [4])
    _, tokens = run(generator)

    def count(inputs, cache):
        computed.append(inputs.shape)
        return model()(inputs, cache=cache)

    monkeypatch.setattr(generator._engine.runner, "model", count)
    monkeypatch.setattr("mlx_paged.batch_generator.sequences.make_prompt_cache", empty_caches)
    assert tokens[0][-1].prompt_cache[0].offset == 44
    assert computed == [(1, 1)]


def empty_caches(_):
    return make_prompt_cache(model())


def test_caches_are_computed_when_the_pool_needed_their_blocks():
    generator = paged(num_blocks=14, prefix_cache=False)
    generator.insert([PROMPTS[1]], [4])
    _, tokens = run(generator)
    generator.insert([PROMPTS[4], PROMPTS[3]], [16, 3])
    run(generator)
    last = tokens[0][-1]
    assert not generator._engine.manager.allocator.__contains__(0)
    assert continued(last.prompt_cache, [7], 4) == continued(None, [*last.all_tokens, 7], 4)


def test_blocks_of_responses_that_are_gone_do_not_count():
    generator = paged(max_tokens=2)
    generator.insert(PROMPTS[:1])
    _, tokens = run(generator)
    assert generator.prompt_cache_nbytes > 0
    tokens.clear()
    assert generator.prompt_cache_nbytes == 0


def test_removal_may_return_what_was_computed():
    generator = paged(max_tokens=9)
    generator.insert(PROMPTS[:2])
    run(generator, 6)
    cache, tokens = generator.remove([0], return_prompt_caches=True)[0]
    assert tokens[:5] == PROMPTS[0] and cache[0].offset == len(tokens) > 5
    assert generator.remove([0], return_prompt_caches=True) == {}


def test_caches_of_what_a_window_has_left_are_computed():
    """The prompt is computed to its end before the end of its first segment is reported, and the
    next prompt takes the blocks that the windows have left."""
    generator = paged("gemma3_text", prefill_step_size=40, prefix_cache=False)
    generator.insert_segments([[PROMPTS[1][:14], PROMPTS[1][14:]], [PROMPTS[4]]], [8, 8])
    prompts, _ = generator.next()
    assert prompts[0].progress == (14, 40)
    cache, context = generator.extract_cache([0])[0]
    assert context == PROMPTS[1][:14]
    assert continued(cache, [7, 8], 6, "gemma3_text") == continued(
        None, [*context, 7, 8], 6, "gemma3_text"
    )


def test_caches_without_rotation_may_be_trimmed_behind_the_window():
    """mlx-lm keeps all tokens of mistral3's layers with a window."""
    mistral = build("mistral3")
    generator = BatchGenerator(mistral, block_size=4, num_blocks=20, prefix_cache=False)
    prompts = [[token % VOCAB for token in PROMPTS[i]] for i in (1, 4)]
    [first, _] = generator.insert(prompts, max_tokens=[8, 30])
    responses = [r for _ in range(16) for r in generator.next_generated()]
    last = next(r for r in responses if r.uid == first and r.finish_reason)
    cache, tokens = last.prompt_cache, last.all_tokens
    expected = make_prompt_cache(mistral)
    mistral(mx.array([tokens]), cache=expected)
    for ours, theirs in zip(cache, expected, strict=True):
        for found, stock in zip(ours.state[:2], theirs.state[:2], strict=True):
            np.testing.assert_allclose(np.array(found), np.array(stock), atol=1e-4)

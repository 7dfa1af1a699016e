"""Samples, forks and beams: what they share, and that sharing changes no token."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_paged import Engine, FinishReason, SamplingParams, demo_model_path
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

PROMPT = np.random.default_rng(0).integers(0, VOCAB, 37).tolist()
BLOCK = 4


def make_engine(model, **options) -> Engine:
    return Engine(
        model, **({"block_size": BLOCK, "num_blocks": 256, "prefill_chunk": 16} | options)
    )


@pytest.fixture
def engine(model):
    return make_engine(model)


def finish(engine: Engine) -> dict:
    """Run everything; completions by request id."""
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.manager.check_integrity()
    return done


def assert_nothing_is_held(engine: Engine) -> None:
    assert engine.manager.blocks_in_use == 0
    assert not engine.scheduler.parked and not engine.scheduler.running


# Samples


@pytest.mark.slow
@pytest.mark.parametrize("max_running", [32, 3])
def test_samples_draw_what_the_same_seeds_draw_alone(model, max_running):
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=100)
    engine = make_engine(model, max_running=max_running)
    (samples,) = engine.sample([PROMPT], 8, params)
    alone = [
        make_engine(model).generate([PROMPT], max_tokens=12, temperature=0.9, seed=100 + i)[0]
        for i in range(8)
    ]
    assert [c.tokens for c in samples] == [c.tokens for c in alone]
    for sample, solo in zip(samples, alone, strict=True):
        np.testing.assert_allclose(sample.logprobs, solo.logprobs, atol=1e-4)
    assert len({tuple(c.tokens) for c in samples}) == 8
    assert_nothing_is_held(engine)


@pytest.mark.mac
def test_a_prompt_is_computed_once_for_all_its_samples(model):
    engine = make_engine(model, prefix_cache=False)
    engine.sample([PROMPT], 16, max_tokens=10, temperature=1.0)
    assert engine.stats.prompt_tokens == len(PROMPT)
    tails = 16 * -(-(len(PROMPT) % BLOCK + 10) // BLOCK)
    assert engine.stats.peak_blocks_in_use <= len(PROMPT) // BLOCK + 1 + tails


@pytest.mark.mac
def test_greedy_samples_are_all_the_solo_completion(model, engine):
    with pytest.warns(UserWarning, match="temperature is 0: all 3 completions") as warned:
        (samples,) = engine.sample([PROMPT], 3, max_tokens=9)
    assert [w.filename for w in warned] == [__file__]
    assert [c.tokens for c in samples] == [solo_greedy(model, PROMPT, 9)] * 3


@pytest.mark.mac
def test_best_of_returns_the_likeliest_first(engine):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    every = engine.sample([PROMPT], 6, params)[0]
    best = engine.sample([PROMPT], 2, params, best_of=6)[0]
    ranked = sorted(every, key=lambda c: -np.mean(c.logprobs))
    assert [c.tokens for c in best] == [c.tokens for c in ranked[:2]]


@pytest.mark.mac
def test_several_prompts_with_several_completions_each(model, engine):
    prompts = [PROMPT, PROMPT[::-1], PROMPT[5:25]]
    groups = engine.sample(prompts, 4, max_tokens=6, temperature=0.8, seed=1)
    assert [[c.prompt_tokens for c in group] for group in groups] == [[37] * 4, [37] * 4, [20] * 4]
    solo = make_engine(model).generate([prompts[1]], max_tokens=6, temperature=0.8, seed=3)[0]
    assert groups[1][2].tokens == solo.tokens


@pytest.mark.sampled(8)
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_aborting_the_first_sample_leaves_the_others(model_type, steps):
    model = tiny_model(model_type)
    engine = make_engine(model, lookahead=False)
    ids = engine.add_samples(PROMPT, 4, max_tokens=10)
    for _ in range(steps):
        engine.step()
    engine.abort(ids[0])
    done = finish(engine)
    assert sorted(done) == ids[1:]
    assert all(c.tokens == solo_greedy(model, PROMPT, 10) for c in done.values())
    assert_nothing_is_held(engine)


@pytest.mark.mac
def test_samples_survive_a_pool_too_small_for_all(model):
    engine = make_engine(model, num_blocks=18)
    (samples,) = engine.sample([PROMPT], 6, max_tokens=30, temperature=0.9, seed=7)
    large = make_engine(model).sample([PROMPT], 6, max_tokens=30, temperature=0.9, seed=7)[0]
    assert [c.tokens for c in samples] == [c.tokens for c in large]
    assert engine.stats.preemptions > 0
    assert_nothing_is_held(engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", ["jamba", "mamba2", "gemma3_text"])
def test_samples_of_other_kinds_of_models(model_type):
    model = tiny_model(model_type)
    engine = make_engine(model)
    (samples,) = engine.sample([PROMPT], 4, max_tokens=8, temperature=0.9, seed=50)
    alone = [
        make_engine(model).generate([PROMPT], max_tokens=8, temperature=0.9, seed=50 + i)[0].tokens
        for i in range(4)
    ]
    assert [c.tokens for c in samples] == alone


# Forks


def run_until(engine: Engine, request_id: int, num_tokens: int) -> None:
    seen = 0
    while seen < num_tokens:
        seen += sum(output.request_id == request_id for output in engine.step())


@pytest.mark.mac
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
def test_a_fork_of_a_running_request_goes_on_like_its_parent(model_type):
    model = tiny_model(model_type)
    engine = make_engine(model)
    parent = engine.add_request(PROMPT, max_tokens=20)
    run_until(engine, parent, 7)
    child = engine.fork(parent, max_tokens=10)
    done = finish(engine)
    expected = solo_greedy(model, PROMPT, 20)
    assert done[parent].tokens == expected
    start = done[child].prompt_tokens - len(PROMPT)
    assert 7 <= start <= 9
    assert done[child].tokens == expected[start : start + 10]
    assert_nothing_is_held(engine)


@pytest.mark.mac
def test_a_fork_moves_no_block_and_its_first_write_copies_one(model):
    engine = make_engine(model, prefix_cache=False)
    parent = engine.add_request(PROMPT, max_tokens=40)
    run_until(engine, parent, 8)
    engine._settle()
    in_use, clones = engine.manager.blocks_in_use, engine.manager.allocator.store.cow_clones
    children = [engine.fork(parent, temperature=1.0, seed=i, max_tokens=2) for i in range(5)]
    assert (
        engine.manager.blocks_in_use == in_use
        and engine.manager.allocator.store.cow_clones == clones
    )
    engine.step()
    assert engine.manager.allocator.store.cow_clones - clones <= len(children) + 1
    assert engine.manager.blocks_in_use <= in_use + len(children) + 1
    engine.abort(parent)
    finish(engine)
    assert_nothing_is_held(engine)


@pytest.mark.mac
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_branches_from_an_ended_request_that_was_kept(model_type):
    model = tiny_model(model_type)
    engine = make_engine(model)
    root = engine.add_request(PROMPT, max_tokens=9, keep=True)
    trunk = finish(engine)[root].tokens
    held = engine.manager.blocks_in_use
    assert held == -(-(len(PROMPT) + 8) // BLOCK)
    suffixes = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    before = engine.stats.prompt_tokens
    branches = [engine.fork(root, suffix, max_tokens=6) for suffix in suffixes]
    done = finish(engine)
    for branch, suffix in zip(branches, suffixes, strict=True):
        assert done[branch].tokens == solo_greedy(model, PROMPT + trunk + suffix, 6)
    assert engine.stats.prompt_tokens - before == sum(1 + len(s) for s in suffixes)
    assert engine.manager.blocks_in_use == held
    engine.release(root)
    assert_nothing_is_held(engine)
    with pytest.raises(ValueError, match="request_id is 0: expected a request under way"):
        engine.fork(root)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_a_branch_may_begin_right_where_a_stop_token_ended_its_parent(model_type):
    """The step under way has computed that token's K/V, or state, by then."""
    model = tiny_model(model_type)
    expected = solo_greedy(model, PROMPT, 16)
    stop = next(t for i, t in enumerate(expected) if i >= 4 and t not in expected[:i])
    length = expected.index(stop) + 1
    engine = make_engine(model)
    root = engine.add_request(PROMPT, max_tokens=16, stop_token_ids=[stop], keep=True)
    assert finish(engine)[root].tokens == expected[:length]
    branches = [engine.fork(root, suffix, max_tokens=5) for suffix in ([], [7, 8])]
    done = finish(engine)
    for branch, suffix in zip(branches, ([], [7, 8]), strict=True):
        assert done[branch].tokens == solo_greedy(model, PROMPT + expected[:length] + suffix, 5)
    engine.release(root)
    assert_nothing_is_held(engine)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_kept", [37, 9])
def test_a_kept_request_gives_its_blocks_to_those_that_need_them(model, num_kept):
    """At once, or when those that run have grown."""
    engine = make_engine(model, num_blocks=16)
    prompt = PROMPT[:num_kept]
    root = engine.add_request(prompt, max_tokens=2, keep=True)
    trunk = finish(engine)[root].tokens
    other = engine.generate([PROMPT[::-1]], max_tokens=24)[0]
    assert other.tokens == solo_greedy(model, PROMPT[::-1], 24)
    assert engine.stats.preemptions == 0
    branch = engine.fork(root, [3], max_tokens=5)
    assert finish(engine)[branch].tokens == solo_greedy(model, [*prompt, *trunk, 3], 5)
    engine.release(root)
    assert_nothing_is_held(engine)


def test_a_fork_of_a_waiting_request_waits_too(model):
    engine = make_engine(model, max_running=1)
    first = engine.add_request(PROMPT[::-1], max_tokens=8)
    engine.step()
    parent = engine.add_request(PROMPT, max_tokens=8)
    child = engine.fork(parent, [5])
    done = finish(engine)
    assert done[first].tokens == solo_greedy(model, PROMPT[::-1], 8)
    assert done[parent].tokens == solo_greedy(model, PROMPT, 8)
    assert done[child].tokens == solo_greedy(model, [*PROMPT, 5], 8)


def test_forks_beyond_the_places_wait_with_their_blocks(model):
    engine = make_engine(model, max_running=2)
    parent = engine.add_request(PROMPT, max_tokens=12)
    run_until(engine, parent, 3)
    children = [engine.fork(parent, max_tokens=6) for _ in range(4)]
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.parked) == 3
    done = finish(engine)
    expected = solo_greedy(model, PROMPT, 20)
    for child in children:
        start = done[child].prompt_tokens - len(PROMPT)
        assert done[child].tokens == expected[start : start + 6]
    assert_nothing_is_held(engine)


# Beams


def plain_beam_search(model, prompt, num_beams, max_tokens, length_penalty, stop):
    """No cache, no sharing: every hypothesis is computed from the start in every step."""
    live, finished = [([], [], 0.0)], []
    while live:
        pool = []
        for i, (tokens, _, total) in enumerate(live):
            logits = model(mx.array([prompt + tokens]))[0, -1].astype(mx.float32)
            row = np.array(logits - mx.logsumexp(logits), np.float64)
            pool += [(total + row[t], i, t, row[t]) for t in range(len(row))]
        pool.sort(key=lambda entry: (-entry[0], entry[1]))
        following = []
        for rank, (total, i, token, logprob) in enumerate(pool):
            if len(following) == num_beams:
                break
            tokens, logprobs, _ = live[i]
            entry = ([*tokens, token], [*logprobs, logprob], total)
            if token not in stop:
                following.append(entry)
            elif rank < num_beams:
                finished.append(entry)
        live = following
        if len(live[0][0]) == max_tokens:
            finished += live
            break
    score = [(total / len(t) ** length_penalty, t) for t, _, total in finished]
    return sorted(score, key=lambda entry: -entry[0])[:num_beams]


@pytest.mark.mac
@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_beams", [1, 2, 4])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("num_stop", [0, 12])
def test_beams_equal_a_plain_search(model, num_beams, length_penalty, num_stop):
    engine = make_engine(model)
    stop = set(range(0, VOCAB, VOCAB // num_stop)) if num_stop else set()
    expected = plain_beam_search(model, PROMPT, num_beams, 7, length_penalty, stop)
    completion = engine.beam_search(
        PROMPT, num_beams, max_tokens=7, length_penalty=length_penalty, stop_token_ids=stop
    )
    assert [beam.tokens for beam in completion.beams] == [tokens for _, tokens in expected]
    np.testing.assert_allclose(
        [beam.score for beam in completion.beams], [score for score, _ in expected], atol=1e-4
    )
    assert completion.tokens == expected[0][1]
    assert_nothing_is_held(engine)


def test_hypotheses_share_blocks_and_are_pruned_at_once(model):
    engine = make_engine(model, prefix_cache=False)
    engine.beam_search(PROMPT, 8, max_tokens=16)
    own = 8 * (-(-16 // BLOCK) + 1)
    assert engine.stats.peak_blocks_in_use <= len(PROMPT) // BLOCK + 1 + own
    assert engine.stats.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("options", [{"num_blocks": 14}, {"max_running": 2}])
def test_beams_without_room_for_all_find_the_same(model, options):
    expected = make_engine(model).beam_search(PROMPT, 4, max_tokens=12)
    engine = make_engine(model, **options)
    found = engine.beam_search(PROMPT, 4, max_tokens=12)
    assert [beam.tokens for beam in found.beams] == [beam.tokens for beam in expected.beams]
    assert_nothing_is_held(engine)


@pytest.mark.mac
def test_beams_beside_other_requests(model, engine):
    others = [engine.add_request(PROMPT[i:], max_tokens=15) for i in (3, 9)]
    search = engine.add_beam_search(PROMPT, 3, max_tokens=8)
    doomed = engine.add_beam_search(PROMPT[::-1], 3, max_tokens=8)
    for _ in range(5):
        engine.step()
    assert engine.abort(doomed).finish_reason is FinishReason.ABORT
    done = finish(engine)
    assert next(iter(done)) == search, "its hypotheses did not advance in every step"
    expected = plain_beam_search(model, PROMPT, 3, 8, 1.0, set())
    assert [beam.tokens for beam in done[search].beams] == [tokens for _, tokens in expected]
    for start, other in zip((3, 9), others, strict=True):
        assert done[other].tokens == solo_greedy(model, PROMPT[start:], 15)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add_samples(PROMPT, 0), "n is 0: expected an integer >= 1"),
        (lambda e: e.sample([PROMPT], 3, best_of=2), "n is 3 and best_of 2"),
        (lambda e: e.add_beam_search(PROMPT, 0), "num_beams is 0"),
        (lambda e: e.add_beam_search(PROMPT, 2, temperature=1.0), "temperature, stop or sampler"),
        (lambda e: e.fork(99), "request_id is 99: expected a request under way"),
        (lambda e: e.fork(e.add_beam_search(PROMPT, 2)), "request_id is 0"),
        (lambda e: e.fork(e.add_request(PROMPT), [VOCAB]), f"token {VOCAB}"),
        (lambda e: e.fork(e.add_request(PROMPT), [1] * 2000), "expected a shorter prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine)


def test_a_request_that_ends_while_it_is_forked_is_refused_at_once():
    """The step under way may choose its last token, which only `fork` reads."""
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    engine = Engine(model, tokenizer, num_blocks=64)
    refused = 0
    for max_tokens in range(1, 6):
        parent = engine.add_request("class Stack:", max_tokens=max_tokens)
        for _ in range(max_tokens - 1):
            engine.step()
        assert engine.is_open(parent)
        try:
            engine.fork(parent, max_tokens=2)
        except ValueError as error:
            assert "expected a request under way" in str(error)
            refused += 1
        while engine.has_work:
            engine.step()
        engine.manager.check_integrity()
    assert refused > 0

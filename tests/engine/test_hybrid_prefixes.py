"""Models with recurrent layers: what begins alike is computed once, up to where a state is kept."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_paged import Completion, Engine
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy

BLOCK = 8
NUM_TOKENS = 6
TOLERANCE = 1e-4
"""Largest difference of log-probabilities."""

RNG = np.random.default_rng(1)
SYSTEM = RNG.integers(0, VOCAB, 43).tolist()
LAST_BLOCK = len(SYSTEM) // BLOCK * BLOCK

HYBRID = ("jamba", "lfm2", "qwen3_next", "qwen3_5", "falcon_h1", "nemotron_h", "granitemoehybrid")
WINDOWED = ("recurrent_gemma", "baichuan_m1")
STATE_ONLY = ("mamba", "mamba2", "rwkv7")


def text(num_tokens: int) -> list[int]:
    return RNG.integers(0, VOCAB, num_tokens).tolist()


@pytest.fixture(params=[False, True], ids=["step by step", "one step ahead"])
def lookahead(request):
    return request.param


@pytest.fixture(scope="module")
def jamba():
    return build("jamba")


@pytest.fixture
def make_engine(jamba, lookahead) -> Callable[..., Engine]:
    def make(**options) -> Engine:
        defaults = {"block_size": BLOCK, "num_blocks": 64, "prefill_chunk": 32}
        return Engine(jamba, **(defaults | {"lookahead": lookahead} | options))

    return make


def completed(engine: Engine, prompt: list[int], **options):
    """Complete a prompt; also says how many of its tokens were computed for that."""
    before = engine.stats.prompt_tokens
    (completion,) = engine.generate([prompt], **({"max_tokens": NUM_TOKENS} | options))
    engine.manager.check_integrity()
    return completion, engine.stats.prompt_tokens - before


def assert_as_alone(model: nn.Module, prompt: list[int], completion: Completion) -> None:
    """Tokens and their log-probabilities are what mlx-lm has for the prompt on its own cache."""
    steps = generate_step(mx.array(prompt), model, max_tokens=len(completion.tokens))
    tokens, logprobs = zip(*((int(t), logprobs[t].item()) for t, logprobs in steps), strict=True)
    assert completion.tokens == list(tokens)
    assert np.abs(np.subtract(completion.logprobs, logprobs)).max() < TOLERANCE


def num_snapshots(engine: Engine) -> int:
    assert engine.manager.allocator.states.snapshots is not None
    return len(engine.manager.allocator.states.snapshots)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", HYBRID + WINDOWED + STATE_ONLY)
def test_every_turn_of_a_chat_computes_only_what_is_new(name, lookahead):
    """And the last token of the turn before, which nobody had computed."""
    model = build(name)
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=32, lookahead=lookahead)
    history = list(SYSTEM)
    completion, _ = completed(engine, history)
    for num_new in (3, 9, 17):
        history += completion.tokens
        prompt = history + text(num_new)
        completion, num_computed = completed(engine, prompt)
        assert_as_alone(model, prompt, completion)
        assert completion.cached_prompt_tokens == len(history) - 1
        assert num_computed == num_new + 1
        history = prompt


@pytest.mark.sampled(8)
@pytest.mark.parametrize("num_prompt", range(17, 26))
@pytest.mark.parametrize("num_generated", [1, 2, 8])
def test_a_turn_goes_on_from_any_place_in_a_block(jamba, make_engine, num_prompt, num_generated):
    engine = make_engine()
    prompt = text(num_prompt)
    first, _ = completed(engine, prompt, max_tokens=num_generated)
    history = prompt + first.tokens + text(2)
    second, _ = completed(engine, history)
    assert second.cached_prompt_tokens == num_prompt + num_generated - 1
    assert_as_alone(jamba, history, second)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("past", range(1, 2 * BLOCK + 5))
@pytest.mark.parametrize("name", HYBRID + WINDOWED + STATE_ONLY)
def test_no_state_is_wrong_after_a_prompt_that_ended_past_a_block(name, past):
    """Whether the next prompts go on from its end, from its last block, or from within it."""
    model = build(name)
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=32)
    first = SYSTEM[:BLOCK] + text(past)
    done, _ = completed(engine, first, max_tokens=2)
    assert_as_alone(model, first, done)
    for prompt in (first + done.tokens[:1] + text(5), first + text(30), first[:-1] + text(3)):
        completion, _ = completed(engine, prompt, max_tokens=4)
        assert_as_alone(model, prompt, completion)
        assert completion.cached_prompt_tokens >= BLOCK


def test_where_the_answer_comes_back_changed_its_prompt_is_known(jamba, make_engine):
    """As when a template leaves out what a model thought."""
    engine = make_engine()
    completed(engine, SYSTEM)
    prompt = SYSTEM + text(20)
    second, _ = completed(engine, prompt)
    assert second.cached_prompt_tokens == LAST_BLOCK
    assert_as_alone(jamba, prompt, second)


def test_a_prompt_says_where_others_depart_from_it(jamba, make_engine):
    """A system prompt and a task, whose next turn leaves out the last tokens of the prompt."""
    engine = make_engine(prefill_chunk=128)
    prompt = SYSTEM + text(40)
    first, num_computed = completed(engine, prompt, turn_ends=[len(SYSTEM), len(prompt) - 20])
    assert num_computed == len(prompt)
    assert_as_alone(jamba, prompt, first)
    for begin in (SYSTEM, prompt[:-20]):
        other = begin + text(9)
        completion, _ = completed(engine, other)
        assert completion.cached_prompt_tokens == len(begin) // BLOCK * BLOCK
        assert_as_alone(jamba, other, completion)
    samples = engine.sample([prompt], 2, max_tokens=2, temperature=1.0, turn_ends=(3,))
    assert samples[0][0].cached_prompt_tokens == (len(prompt) - 20) // BLOCK * BLOCK


@pytest.mark.parametrize("wrong", [7, [-1], ["7"]])
def test_turn_ends_are_numbers_of_tokens(make_engine, wrong):
    with pytest.raises(ValueError, match=r"\[add_request\] turn_ends is "):
        make_engine().add_request(SYSTEM, turn_ends=wrong)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*WINDOWED, "baichuan_m1, windows only"])
def test_blocks_behind_windows_are_freed(name):
    """And a text shares the beginning of another one as long as its window there is known."""
    model = build(name)
    engine = Engine(model, block_size=4, num_blocks=64, prefill_chunk=16, max_running=2)
    groups = engine.manager.allocator.groups
    assert [group.window for group in groups] == [None, 6][-len(groups) :]
    prompt = text(160)
    request_id = engine.add_request(prompt, max_tokens=30)
    held = []
    while engine.has_work:
        (output,) = engine.step() or [None]
        if engine.has_work:
            allocator = engine.manager.allocator
            firsts = allocator._sequence(request_id).first_entries
            held.append([allocator.blocks_needed(len(prompt)) - first for first in firsts])
    assert min(held)[-1] <= 3 and output.completion is not None
    assert_as_alone(model, prompt, output.completion)
    for num_shared in (160, 112, 47):
        other = prompt[:num_shared] + text(6)
        completion, _ = completed(engine, other)
        assert_as_alone(model, other, completion)
        assert completion.cached_prompt_tokens >= num_shared - 3 * 16
    completed(engine, text(200))  # takes the blocks of most windows
    completion, _ = completed(engine, prompt)
    assert_as_alone(model, prompt, completion)


def test_a_turn_that_ended_by_a_stop_token_is_known(jamba, make_engine):
    engine = make_engine()
    stop = solo_greedy(jamba, SYSTEM, 5)[-1]
    first, _ = completed(engine, SYSTEM, max_tokens=30, stop_token_ids=frozenset([stop]))
    assert first.finish_reason == "stop"
    history = SYSTEM + first.tokens
    second, _ = completed(engine, history + text(4))
    assert second.cached_prompt_tokens == len(history) - (not engine.lookahead)


@pytest.mark.sampled(2)
def test_a_system_prompt_is_known_to_the_next_request_and_better_to_those_after(jamba, make_engine):
    """The first to share it finds the end of a chunk, and leaves a state where the texts part."""
    engine = make_engine()
    completed(engine, SYSTEM + text(30))
    prompt = SYSTEM + text(30)
    second, num_computed = completed(engine, prompt)
    assert second.cached_prompt_tokens == 32 and second.prefix_miss == "no_state"
    assert_as_alone(jamba, prompt, second)
    assert num_computed == len(prompt) - 32

    prompts = [SYSTEM + text(n) for n in (1, 6, 11, 40)]
    done = engine.generate(prompts, max_tokens=NUM_TOKENS)
    assert [c.cached_prompt_tokens for c in done] == [LAST_BLOCK] * 4
    for prompt, completion in zip(prompts, done, strict=True):
        assert_as_alone(jamba, prompt, completion)
    engine.manager.check_integrity()


@pytest.mark.sampled(2)
def test_a_miss_has_a_reason(make_engine):
    engine = make_engine()
    prompt = SYSTEM + text(30)
    first, _ = completed(engine, prompt)
    prompts = {
        "unseen": text(20),
        "diverged": SYSTEM[:32] + text(12),
        "no_state": SYSTEM[:31] + text(12),
        "too_short": SYSTEM[:1],
        "end": prompt + first.tokens[:-1] + text(30),
    }
    reasons = {name: completed(engine, p)[0].prefix_miss for name, p in prompts.items()}
    assert completed(engine, prompt[:33])[0].prefix_miss is None
    completed(engine, text(500))
    reasons["evicted"] = completed(engine, prompt)[0].prefix_miss
    assert reasons == {name: name for name in reasons}


def test_tenants_share_nothing(jamba, make_engine):
    engine = make_engine()
    completed(engine, SYSTEM, cache_salt="a")
    other, _ = completed(engine, SYSTEM, cache_salt="b")
    same, _ = completed(engine, SYSTEM, cache_salt="a")
    assert (other.cached_prompt_tokens, other.prefix_miss) == (0, "unseen")
    assert same.cached_prompt_tokens == LAST_BLOCK
    assert_as_alone(jamba, SYSTEM, other)
    assert_as_alone(jamba, SYSTEM, same)
    short = text(4)
    first, _ = completed(engine, short, cache_salt="a", max_tokens=3)
    second, _ = completed(engine, short + first.tokens + text(1), cache_salt="a")
    assert second.cached_prompt_tokens == len(short) + 2


def test_a_reset_forgets(make_engine):
    engine = make_engine()
    completed(engine, SYSTEM)
    assert num_snapshots(engine) > 0
    engine.reset_prefix_cache()
    assert num_snapshots(engine) == 0
    assert completed(engine, SYSTEM)[1] == len(SYSTEM)


def test_nothing_from_before_a_failed_step_is_known(jamba, make_engine):
    engine = make_engine()
    completed(engine, SYSTEM)
    launch, failed = engine.runner.launch, []

    def fail_once(step, before):
        if any(span.reads and span.start == LAST_BLOCK for span in step.spans) and not failed:
            failed.append(step)
            launch(step, before)
            raise RuntimeError("out of memory")
        return launch(step, before)

    engine.runner.launch = fail_once
    culprit, _ = completed(engine, SYSTEM)
    assert culprit.finish_reason == "error" and num_snapshots(engine) == 0
    again, num_computed = completed(engine, SYSTEM)
    assert num_computed == len(SYSTEM)
    assert_as_alone(jamba, SYSTEM, again)
    assert completed(engine, SYSTEM)[0].cached_prompt_tokens == LAST_BLOCK


@pytest.mark.sampled(2)
def test_a_preempted_request_goes_on_from_its_last_state(jamba, make_engine):
    engine = make_engine(num_blocks=14)
    launch, starts = engine.runner.launch, []

    def record(step, before):
        for span in step.spans:
            if span.request.num_preempted and span.reads and span.stop - span.start > 1:
                starts.append(span.start)
        return launch(step, before)

    engine.runner.launch = record
    prompts = [text(30), text(30)]
    done = engine.generate(prompts, max_tokens=40)
    engine.manager.check_integrity()
    assert sum(c.preemptions for c in done) > 0
    assert starts and all(position >= 24 for position in starts), starts
    for prompt, completion in zip(prompts, done, strict=True):
        assert_as_alone(jamba, prompt, completion)


@pytest.mark.slow
def test_a_pool_that_holds_few_prompts_changes_no_token(jamba, make_engine):
    engine = make_engine(num_blocks=16, max_running=4)
    prompts = [SYSTEM[: 8 * (i % 4)] + text(7 + 5 * (i % 6)) for i in range(16)]
    for _ in range(2):
        done = engine.generate(prompts, max_tokens=12)
        for prompt, completion in zip(prompts, done, strict=True):
            assert_as_alone(jamba, prompt, completion)
        engine.manager.check_integrity()
    assert sum(c.cached_prompt_tokens for c in done) > 0


def test_samples_and_forks_go_on_from_a_restored_state(jamba, make_engine):
    engine = make_engine()
    completed(engine, SYSTEM)
    prompt = SYSTEM + text(5)
    (samples,) = engine.sample([prompt], 3, max_tokens=NUM_TOKENS, temperature=0.0)
    for sample in samples:
        assert_as_alone(jamba, prompt, sample)
    assert samples[0].cached_prompt_tokens == LAST_BLOCK

    trunk = engine.add_request(prompt, max_tokens=20, keep=True)
    for _ in range(6):
        engine.step()
    branch = engine.fork(trunk, text(11), max_tokens=NUM_TOKENS)
    prompts = {trunk: prompt, branch: list(engine.request(branch).tokens)}
    done = {}
    while engine.has_work:
        outputs = engine.step()
        done |= {o.request_id: o.completion for o in outputs if o.completion}
    for request_id, completion in done.items():
        assert_as_alone(jamba, prompts[request_id], completion)
    engine.release(trunk)
    engine.manager.check_integrity()
    history = prompt + done[trunk].tokens
    following, _ = completed(engine, history + text(3))
    assert following.cached_prompt_tokens == len(history) - 1


class TestTheBound:
    @staticmethod
    def state_bytes(model) -> int:
        cache = model.make_cache()
        model(mx.array([SYSTEM]), cache=cache)
        states = [leaf.cache for leaf in cache if hasattr(leaf, "cache")]
        return sum(array.nbytes for state in states for array in state)

    @pytest.mark.sampled(2)
    def test_is_a_number_of_bytes(self, jamba, make_engine):
        engine = make_engine(snapshot_memory=3 * self.state_bytes(jamba) + 1)
        seen = set()
        for _ in range(4):
            for prompt in (SYSTEM, text(20), text(50)):
                completed(engine, prompt)
                seen.add(num_snapshots(engine))
        assert max(seen) == 3

    def test_those_that_save_few_tokens_go_first(self, jamba, make_engine):
        engine = make_engine(snapshot_memory=4 * self.state_bytes(jamba))
        a, b, c = (text(17) for _ in range(3))  # each leaves two: at 16, and at its end
        for prompt in (a, b, a, c):
            completed(engine, prompt)
        cached = [completed(engine, p)[0].cached_prompt_tokens for p in (c, a, b)]
        assert cached == [16, 16, 16]

    def test_is_part_of_the_memory_that_the_pool_takes_by_default(self, jamba, monkeypatch):
        limit = 4 << 20
        monkeypatch.setattr("mlx_paged.kv.memory.HOST_LIMIT", limit)
        monkeypatch.setattr("mlx_paged.runner.pooled_model.positions_of", lambda model: None)
        monkeypatch.setattr("mlx_paged.kv.default_pool.USUAL_TOKENS", 1 << 24)
        monkeypatch.setattr("mlx_paged.kv.default_pool.LONG_PROMPT", 64)
        for max_running, share in ((4, 0.0), (1000, 0.25)):
            engine = Engine(jamba, block_size=BLOCK, max_running=max_running)
            pool = engine.manager.pool
            most = engine.manager.allocator.states.snapshots.max_snapshots
            snapshots = most * self.state_bytes(jamba)
            total = pool.num_blocks * pool.block_bytes + snapshots
            assert limit - pool.block_bytes < total <= limit
            assert most == 4 * max_running or share - 0.01 < snapshots / limit <= share

    def test_none_at_all_means_no_shared_prefixes(self, make_engine):
        engine = make_engine(snapshot_memory=0)
        for _ in range(2):
            completion, num_computed = completed(engine, SYSTEM)
            assert (completion.prefix_miss, num_computed) == ("disabled", len(SYSTEM))

    def test_too_little_for_one_is_refused(self, jamba, make_engine):
        message = (
            r"\[Engine\] snapshot_memory is 1 bytes, but the recurrent states of one "
            rf"sequence take {self.state_bytes(jamba)} bytes: expected"
        )
        with pytest.raises(ValueError, match=message):
            make_engine(snapshot_memory=1)

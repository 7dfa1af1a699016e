"""Prompts that begin alike are computed once, by anybody, and whoever misses is told why."""

import numpy as np
import pytest

from mlx_paged import Engine
from tests.support.models.tiny_models import VOCAB, solo_greedy

pytestmark = pytest.mark.mac

BLOCK = 8
RNG = np.random.default_rng(1)
SYSTEM = RNG.integers(0, VOCAB, 43).tolist()


def text(num_tokens: int) -> list[int]:
    return RNG.integers(0, VOCAB, num_tokens).tolist()


@pytest.fixture
def engine(model):
    return Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=32)


def computed(engine: Engine, prompt: list[int], **options):
    """Complete a prompt; also says how many of its tokens were computed for that."""
    before = engine.stats.prompt_tokens
    (completion,) = engine.generate([prompt], **({"max_tokens": 6} | options))
    engine.manager.check_integrity()
    return completion, engine.stats.prompt_tokens - before


@pytest.mark.sampled(6)
@pytest.mark.parametrize("num_generated", range(5, 14))
def test_the_second_turn_of_a_chat_computes_only_what_is_new(model, engine, num_generated):
    """And the last token of the first turn, whose K/V nobody had needed until then."""
    first, _ = computed(engine, SYSTEM, max_tokens=num_generated)
    history = SYSTEM + first.tokens
    for _ in range(4):
        user = text(9)
        turn, num_computed = computed(engine, history + user)
        known = len(history) - 1
        whole = known // BLOCK * BLOCK
        reusable = known if known - whole >= BLOCK // 4 else whole
        assert turn.cached_prompt_tokens == reusable
        assert num_computed == len(history) + len(user) - reusable
        assert turn.tokens == solo_greedy(model, history + user, 6)
        history += user + turn.tokens


def test_running_requests_share_what_they_have_computed(model, engine):
    first = engine.add_request(SYSTEM + text(3), max_tokens=30)
    for _ in range(5):
        engine.step()
    tail = text(4)
    (second,) = engine.generate([SYSTEM + tail], max_tokens=5)
    assert second.cached_prompt_tokens == len(SYSTEM)
    assert second.tokens == solo_greedy(model, SYSTEM + tail, 5)
    assert engine.abort(first) is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [16, 32, 512])
def test_requests_that_come_together_compute_what_they_share_once(model, chunk):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=chunk)
    own = [[first, *text(num_tokens)] for first, num_tokens in enumerate((4, 2, 3, 10))]
    prompts = [SYSTEM + tokens for tokens in own]
    other = text(26)  # too long to overtake the first one, which would move the ends of its chunks
    done = engine.generate([*prompts, other], max_tokens=6)
    assert engine.stats.prompt_tokens == len(SYSTEM) + sum(map(len, own)) + len(other)
    assert [c.tokens for c in done] == [solo_greedy(model, p, 6) for p in [*prompts, other]]


def test_nobody_waits_for_a_tenant_he_shares_nothing_with(engine):
    ids = [engine.add_request(SYSTEM[:9], max_tokens=2, cache_salt=salt) for salt in "ab"]
    assert [output.request_id for output in (engine.step() or engine.step())] == ids


def test_a_prompt_does_not_wait_for_the_few_tokens_that_it_shares(engine):
    prompts = [SYSTEM[:BLOCK] + text(7), SYSTEM[:BLOCK] + text(9)]
    ids = [engine.add_request(prompt, max_tokens=2) for prompt in prompts]
    assert [output.request_id for output in (engine.step() or engine.step())] == ids


def test_tenants_share_nothing(model, engine):
    computed(engine, SYSTEM, cache_salt="a")
    other, _ = computed(engine, SYSTEM, cache_salt="b")
    same, _ = computed(engine, SYSTEM, cache_salt="a")
    assert (other.cached_prompt_tokens, other.prefix_miss) == (0, "unseen")
    assert same.cached_prompt_tokens == len(SYSTEM) - 1
    assert other.tokens == same.tokens == solo_greedy(model, SYSTEM, 6)


@pytest.mark.slow
def test_a_preempted_request_finds_its_own_prefix_again(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=14, prefill_chunk=32)
    prompts = [text(30), text(30)]
    done = engine.generate(prompts, max_tokens=40)
    assert engine.stats.preemptions > 0
    assert [c.tokens for c in done] == [solo_greedy(model, p, 40) for p in prompts]


def test_a_miss_has_a_reason(model, engine):
    computed(engine, SYSTEM)
    unseen, _ = computed(engine, text(20))
    diverged, _ = computed(engine, SYSTEM[:16] + text(12))
    end, _ = computed(engine, [*SYSTEM[:-1], (SYSTEM[-1] + 1) % VOCAB, *text(30)])
    short, _ = computed(engine, [SYSTEM[0]])
    whole, _ = computed(engine, SYSTEM)
    assert unseen.prefix_miss == "unseen"
    assert diverged.prefix_miss == "diverged" and diverged.cached_prompt_tokens == 16
    assert end.prefix_miss in ("diverged", "end") and end.cached_prompt_tokens == len(SYSTEM) - 1
    assert short.prefix_miss == "too_short"
    assert whole.prefix_miss is None and whole.cached_prompt_tokens == len(SYSTEM) - 1


def test_an_evicted_prefix_is_called_so(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=10)
    computed(engine, SYSTEM)
    computed(engine, text(70))
    again, _ = computed(engine, SYSTEM)
    assert (again.cached_prompt_tokens, again.prefix_miss) == (0, "evicted")


def test_without_the_cache_nothing_is_looked_for(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefix_cache=False)
    for _ in range(2):
        completion, num_computed = computed(engine, SYSTEM)
        assert (completion.prefix_miss, num_computed) == ("disabled", len(SYSTEM))


def test_a_reset_forgets(engine):
    computed(engine, SYSTEM)
    engine.reset_prefix_cache()
    assert computed(engine, SYSTEM)[1] == len(SYSTEM)

"""A pool that changes its size between steps changes no token, and keeps what is known."""

import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.engine.pool_size import PoolSize
from mlx_paged.metrics.stats import resident_bytes
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy, tiny_model

NUM_TOKENS = 12
RNG = np.random.default_rng(0)
SYSTEM = RNG.integers(0, VOCAB, 9).tolist()
PROMPTS = [SYSTEM + RNG.integers(0, VOCAB, length).tolist() for length in (3, 25, 1, 14)]
KINDS = {
    "full": "llama",
    "windows": "gemma3",
    "latents": "deepseek_v3",
    "states": "jamba",
    "states alone": "rwkv7",
    "heads of several sizes": "gemma4_text",
}


class Sizes:
    """Changes the pool's size before every second step, to one of these in turn."""

    def __init__(self, engine: Engine, sizes: tuple[int, ...]) -> None:
        runner, follow = engine._models.pooled.runner, engine._models.follow
        unended = engine._requests.values
        self.size = PoolSize(engine.scheduler, runner, engine.stats, unended, follow)
        self.engine, self.sizes, self.calls = engine, sizes, 0
        self.found: list[int] = []
        self.is_whole = True
        engine._pipeline.pause = self

    def is_due(self) -> bool:
        assert self.is_whole, "a change of size has failed"  # the engine recovers from this
        self.calls += 1
        return self.calls % 3 != 0

    def run(self) -> None:
        self.is_whole = False
        self.size.change(self.sizes[self.calls % len(self.sizes)])
        self.found.append(self.size.now)
        self.engine.manager.check_integrity()
        self.is_whole = True

    def rest(self) -> None:
        pass


@pytest.mark.sampled(4)
@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_tokens_are_mlx_lms_whatever_the_size_becomes(name, compile):
    model = build(name)
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = Engine(
        model, block_size=4, num_blocks=80, prefill_chunk=16, max_running=3, compile=compile
    )
    sizes = Sizes(engine, (1, 40, 1000, 20, 60))
    for _ in range(2):  # the second time with known prefixes
        done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        assert [completion.tokens for completion in done] == expected
    has_blocks = engine.manager.pool.block_bytes > 0
    assert len(set(sizes.found)) > 3 or not has_blocks, "the size has hardly changed"
    assert engine.manager.pool.num_blocks == engine.stats.num_blocks == sizes.size.now
    assert engine.manager.blocks_in_use == 0


def test_a_draft_models_pool_follows():
    model, draft = tiny_model("llama"), tiny_model("llama")
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = Engine(model, block_size=4, num_blocks=80, max_running=3, draft_model=draft)
    sizes = Sizes(engine, (30, 60, 1000, 44))
    for _ in range(2):
        done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        assert [completion.tokens for completion in done] == expected
    drafter = engine.scheduler.decoding.drafters[0]
    assert drafter.pooled.pool.num_blocks == sizes.size.now
    drafter.pooled.check_integrity()
    assert engine.stats.drafts > 0


def test_forks_and_known_prefixes_survive():
    model = tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=80)
    parent = engine.add_request(PROMPTS[1], max_tokens=4, keep=True)
    while engine.has_work:
        engine.step()
    tokens = engine.request(parent).tokens
    size = PoolSize(engine.scheduler, engine.runner, engine.stats, engine._requests.values)
    held = engine.manager.blocks_in_use
    assert held and size.change(held) and size.now == held
    size.change(80)
    child = engine.fork(parent, SYSTEM[:3], max_tokens=1)
    while engine.has_work:
        for output in engine.step():
            completion = output.completion
    assert completion.request_id == child
    assert completion.cached_prompt_tokens >= len(tokens) - 1
    assert completion.tokens == solo_greedy(model, tokens + SYSTEM[:3], 1)


def test_a_pool_never_becomes_too_small_for_a_request():
    engine = Engine(tiny_model("llama"), block_size=4, num_blocks=80, max_running=1)
    for _ in range(2):
        engine.add_request(PROMPTS[1], max_tokens=40)
    size = PoolSize(engine.scheduler, engine.runner, engine.stats, engine._requests.values)
    assert size.change(1) and size.now == -(-(len(PROMPTS[1]) + 39) // 4)
    with pytest.raises(ValueError, match="expected a shorter prompt"):
        engine.add_request(PROMPTS[1], max_tokens=60)
    assert size.change(1000) and size.now == size.largest == 80
    engine.add_request(PROMPTS[1], max_tokens=60)


def test_an_error_of_memory_loses_no_request(monkeypatch):
    model = tiny_model("llama")
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = Engine(model, block_size=4, num_blocks=80, max_running=3)
    sizes = Sizes(engine, (40, 60, 30))
    take, calls = mx.take, []

    def fails(*args, **options):
        calls.append(args)
        if len(calls) == 2:  # one array has been replaced, and another has not
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return take(*args, **options)

    monkeypatch.setattr("mlx_paged.kv.pool.mx.take", fails)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert [completion.tokens for completion in done] == expected
    assert len(calls) > 2 and sizes.found


def test_the_system_gets_the_memory_of_blocks_back():
    engine = Engine(tiny_model("llama"), block_size=16, num_blocks=16_000, prewarm=False)
    pool = engine.manager.pool
    for handles in pool.stored:
        handles[:] = [
            mx.contiguous(array.transpose(1, 0, 2, 3) + 1).transpose(1, 0, 2, 3)
            for array in handles
        ]
    mx.eval(pool.stored)
    pool._first = [list(handles) for handles in pool.stored]
    assert pool.nbytes > 1 << 25
    size = PoolSize(engine.scheduler, engine.runner, engine.stats, engine._requests.values)
    before, bytes_before = resident_bytes(), pool.nbytes
    size.change(1000)
    mx.clear_cache()
    assert before - resident_bytes() > 0.8 * (bytes_before - pool.nbytes)


def test_random_sizes_of_a_wide_pool_keep_every_block():
    """Layers of several sizes share memory, so that one entry is several blocks."""
    engine = Engine(build("gemma4_text"), block_size=8, num_blocks=60)
    rng = random.Random(0)
    size = PoolSize(engine.scheduler, engine.runner, engine.stats, engine._requests.values)
    owners = engine.manager.pool._owners
    assert len(set(owners)) < len(owners), "no arrays share memory"
    for _ in range(10):
        engine.generate([PROMPTS[rng.randrange(4)]], max_tokens=3)
        size.change(rng.randint(1, size.largest))
        engine.manager.check_integrity()
        pool = engine.manager.pool
        for layer, owner in enumerate(owners):
            memory = {
                np.asarray(pool.k[i].transpose(1, 0, 2, 3)).ctypes.data for i in (layer, owner)
            }
            assert len(memory) == 1, "they share it no more"

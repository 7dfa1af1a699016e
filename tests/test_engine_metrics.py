"""An engine's metrics: what they count, what a stall is put down to, what profiling adds."""

import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_model import VOCAB as FAKE_VOCAB
from fake_model import FakeClock, FakeRunner
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny_models import VOCAB, tiny_model

from mlx_paged import Engine
from mlx_paged.block_allocator import BlockAllocator
from mlx_paged.engine_core import EngineCore
from mlx_paged.scheduler import Scheduler
from mlx_paged.stats import EngineStats
from mlx_paged.tick import COUNTS, PARTS, PHASES

STALL = 0.3
WARM_UP = 20
BLOCK = 4
PROMPT = [5, 9, 77, 3, 21, 64, 8]
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, VOCAB, n).tolist() for n in (30, 7, 18, 25, 41, 12)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


# Stalls, on a clock that passes only where somebody lets it


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def core(clock, request) -> EngineCore:
    """Two streams that have decoded for a while; nobody but `stalled` collects garbage."""
    allocator = BlockAllocator(60, BLOCK)
    engine = EngineCore(
        Scheduler(allocator, max_running=8, prefill_chunk=16),
        FakeRunner(allocator, clock, random.Random(0), recurrent=False),
        EngineStats(BLOCK, 1, 60),
        vocab_size=FAKE_VOCAB,
        lookahead=request.param,
        clock=clock,
    )
    gc.disable()
    for start in (0, 10):
        engine.add_request(list(range(start, start + 6)), max_tokens=60, keep=True)
    for _ in range(WARM_UP):
        engine.step()
    yield engine
    gc.enable()


@contextmanager
def stalled(owner: Any, name: str, stall: Callable[[], None]) -> Iterator[None]:
    """The next call of ``owner.name``, and only that, comes with a stall."""
    function, stalls = getattr(owner, name), [stall]

    def slow(*args: Any) -> Any:
        while stalls:
            stalls.pop()()
        return function(*args)

    setattr(owner, name, slow)
    yield
    setattr(owner, name, function)
    assert not stalls, f"{name} was not called"


def only_spike(engine: EngineCore) -> dict[str, Any]:
    (spike,) = engine.metrics()["spikes"]
    assert 1000 * STALL <= spike["tick_ms"] < 1100 * STALL
    (slow,) = (tick for tick in engine.ticks if tick.index == spike["index"])
    assert list(slow.causes) == spike["causes"]
    assert sum(getattr(slow, part) for part in PARTS) == pytest.approx(slow.tick_ms)
    return spike


@pytest.mark.parametrize(
    ("part", "name", "cause"),
    [
        ("scheduler", "schedule", "host"),
        ("scheduler", "commit", "host"),
        ("_outputs", "append", "host"),
        ("runner", "launch", "launch"),
        ("runner", "collect", "device"),
    ],
)
def test_a_stall_is_a_spike_and_put_down_to_where_it_happened(core, clock, part, name, cause):
    def stall() -> None:
        clock.now += STALL

    with stalled(getattr(core, part), name, stall):
        core.step()
    assert only_spike(core)["causes"] == [cause]


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_stall_while_a_prompt_is_computed_is_put_down_to_it(core, clock, name):
    def stall() -> None:
        clock.now += STALL

    core.add_request([*range(23, 3, -1)] * 2, max_tokens=2)
    core.step()
    with stalled(core.runner, name, stall):
        core.step()
    assert only_spike(core)["causes"] == ["prefill"]


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_collection_is_a_spike_wherever_it_happens(core, clock, name):
    def spend(phase: str, info: dict[str, int]) -> None:
        clock.now += STALL if phase == "start" else 0

    gc.callbacks.append(spend)
    try:
        with stalled(core.runner, name, gc.collect):
            core.step()
    finally:
        gc.callbacks.remove(spend)
    assert only_spike(core)["causes"] == ["gc"]


def test_a_stall_over_a_preemption_is_put_down_to_it(core, clock):
    preempt = core.scheduler._preempt

    def slow(request: Any) -> None:
        clock.now += STALL
        preempt(request)

    core.scheduler._preempt = slow
    for _ in range(2):  # the pool is full before these have all that they want
        core.add_request(list(range(20)), max_tokens=90)
    while not core.stats.preemptions:
        core.step()
    assert only_spike(core)["causes"] == ["preemption"]


def test_a_stall_over_a_first_copy_is_put_down_to_warming_up(core, clock):
    """And over a later one to the copy."""

    def stall() -> None:
        clock.now += STALL

    for _ in range(2):
        core.fork(0, max_tokens=3)
        with stalled(core.runner, "launch", stall):
            core.step()
            core.step()  # the first may only hand out what was known before the fork
        for _ in range(2 * BLOCK - 2):  # the same place in the last block again
            core.step()
    assert core.stats.cow_clones >= 2
    causes = [spike["causes"] for spike in core.metrics()["spikes"]]
    assert causes == [["prewarm", "cow"], ["cow"]]


def test_a_failed_step_is_a_tick_and_its_stall_a_fault(core, clock):
    def fail() -> None:
        clock.now += STALL
        raise RuntimeError("a step fails")

    ticks = len(core.ticks)
    with stalled(core.runner, "collect", fail):
        core.step()
    assert len(core.ticks) == ticks + 1 and core.ticks[-1].faults == 1
    assert only_spike(core)["causes"] == ["fault"]


def test_a_sleep_in_a_logits_processor_is_a_spike_of_a_real_engine(model):
    def sleepy(tokens: Any, logits: Any) -> Any:
        if len(tokens) == len(PROMPT) + 20:
            time.sleep(STALL)
        return logits

    engine = Engine(model, block_size=BLOCK, num_blocks=64, lookahead=False)
    engine.generate([PROMPT], max_tokens=30, logits_processors=[sleepy])
    assert engine.ticks[20].launch_ms >= 1000 * STALL
    assert any(spike.index == 20 and spike.causes[0] == "launch" for spike in engine.ticks.spikes)


# Counts


def busy_engine(model: Any, **options: Any) -> Engine:
    """After preemptions, samples, beams and found prefixes, all from one seed."""
    engine = Engine(model, block_size=BLOCK, num_blocks=30, prefill_chunk=16, seed=7, **options)
    engine.generate(PROMPTS, max_tokens=20, temperature=1.0)
    engine.sample([PROMPTS[0]], 4, max_tokens=6, temperature=1.0)
    engine.beam_search(PROMPTS[0], 3, max_tokens=5)
    return engine


@pytest.mark.parametrize("lookahead", [False, True])
def test_what_does_not_depend_on_time_is_the_same_in_every_run(model, lookahead):
    first, second = (busy_engine(model, lookahead=lookahead) for _ in range(2))
    assert [tick.counts() for tick in first.ticks] == [tick.counts() for tick in second.ticks]
    assert len(first.ticks) > 40


@pytest.mark.parametrize("lookahead", [False, True])
def test_what_ticks_count_adds_up_to_what_happened(model, lookahead):
    engine = busy_engine(model, lookahead=lookahead)
    found, allocator = engine.metrics(), engine.scheduler.allocator
    total = {name: sum(getattr(tick, name) for tick in engine.ticks) for name in COUNTS}
    assert total["preemptions"] == engine.scheduler.num_preemptions == found["preemptions"] > 0
    assert total["cow_clones"] == allocator.cow_clones == found["cow_clones"] > 0
    assert total["evictions"] == allocator.evictions == found["evictions"] > 0
    assert total["prefix_hit_tokens"] == allocator.prefix_hit_tokens > 0
    assert found["tokens_by_phase"] == {
        "prefill": total["prefill_tokens"],
        "decode": total["decode_tokens"],
        "prefix_hit": total["prefix_hit_tokens"],
        "sampled": total["sampled"],
    }
    assert found["cow_clones_per_token"] == total["cow_clones"] / total["sampled"]
    assert found["kv_bytes_read"] == total["kv_bytes_read"]
    assert found["blocks_touched"] == total["blocks_touched"]
    assert found["ticks"] == len(engine.ticks) and found["steps"] <= found["ticks"]


def test_a_single_request_counts_every_token_once(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=3)
    engine.generate([PROMPT], max_tokens=10)
    assert [tick.prefill_tokens for tick in engine.ticks] == [3, 3, 1] + [0] * 9
    assert [tick.decode_tokens for tick in engine.ticks] == [0] * 3 + [1] * 9
    assert [tick.sampled for tick in engine.ticks] == [0] * 2 + [1] * 10
    contexts = [3, 6, 7, *range(8, 17)]
    assert [tick.live_tokens for tick in engine.ticks] == contexts
    assert [tick.blocks_touched for tick in engine.ticks] == [-(-c // BLOCK) for c in contexts]
    layers, kv, heads, dim, size = len(model.layers), 2, model.args.num_key_value_heads, 16, 4
    token_bytes = layers * kv * heads * dim * size
    assert [tick.kv_bytes_read for tick in engine.ticks] == [c * token_bytes for c in contexts]


def test_a_window_bounds_what_is_read():
    model = tiny_model("llama", num_hidden_layers=2)
    model.make_cache = lambda: [RotatingKVCache(12), KVCache()]
    engine = Engine(model, block_size=BLOCK, num_blocks=64)
    engine.generate([PROMPTS[0]], max_tokens=5)
    layer_bytes = [shape.token_bytes for shape in engine.manager.pool.shapes]
    read = [tick.kv_bytes_read for tick in engine.ticks]
    assert read == [30 * sum(layer_bytes)] + [
        12 * layer_bytes[0] + context * layer_bytes[1] for context in range(31, 35)
    ]


def test_levels_are_those_at_the_end_of_the_tick(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, max_running=2, lookahead=False)
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, max_tokens=3)
    while engine.has_work:
        engine.step()
        tick, allocator = engine.ticks[-1], engine.scheduler.allocator
        assert tick.running == len(engine.scheduler.running)
        assert tick.waiting == len(engine.scheduler.waiting)
        assert tick.blocks_in_use == allocator.blocks_in_use
        assert tick.blocks_cached == allocator.num_cached
    assert engine.ticks[0].waiting == 1 and engine.ticks[0].running == 2


def test_the_references_of_blocks_are_counted(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64)
    engine.add_samples(PROMPTS[0][:9], 3, max_tokens=9, temperature=1.0)
    engine.step()
    engine.step()
    assert engine.metrics()["refcount_histogram"] == {"0": 59, "1": 3, "3": 2}


def test_metrics_are_json(model):
    engine = busy_engine(model)
    assert json.loads(json.dumps(engine.metrics())) == engine.metrics()


def test_an_engine_that_did_nothing_has_metrics(model):
    found = Engine(model, num_blocks=8).metrics()
    assert found["ticks"] == 0 and found["cow_clones_per_token"] == 0 and found["spikes"] == []


def test_an_engine_that_is_gone_leaves_no_callback(model):
    gc.collect()
    callbacks = list(gc.callbacks)
    engine = Engine(model, num_blocks=8)
    assert len(gc.callbacks) == len(callbacks) + 1
    del engine
    gc.collect()
    assert gc.callbacks == callbacks


# Profiling


@pytest.mark.parametrize("architecture", ["llama", "jamba", "gemma3_text"])
def test_profiling_times_the_phases_and_changes_no_token(architecture):
    model = tiny_model(architecture)
    options = {"block_size": BLOCK, "num_blocks": 64, "prefill_chunk": 16}
    plain = Engine(model, **options)
    profiled = Engine(model, profile=True, **options)
    expected = plain.generate(PROMPTS, max_tokens=8)
    found = profiled.generate(PROMPTS, max_tokens=8)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    for tick in profiled.ticks:
        phases = [getattr(tick, name) for name in PHASES]
        assert 0 < sum(phases) <= tick.launch_ms
        assert tick.kv_write_ms > 0 and tick.forward_ms > 0
    assert all(getattr(tick, name) is None for tick in plain.ticks for name in PHASES)
    assert profiled.metrics()["profile"] and not plain.metrics()["profile"]


@pytest.mark.parametrize("lookahead", [False, True])
def test_profiling_goes_on_after_a_failure(model, lookahead):
    engine = Engine(model, num_blocks=64, profile=True, lookahead=lookahead)
    launch = engine.runner.launch
    engine.add_request(PROMPT, max_tokens=6)
    engine.step()
    engine.runner.launch = lambda *args: 1 / 0
    engine.step()
    engine.runner.launch = launch
    while engine.has_work:
        engine.step()
    assert engine.stats.faults and engine.ticks[-1].sample_ms is not None
    assert max(tick.sample_ms for tick in list(engine.ticks)[-3:]) > 0


def test_without_profiling_nothing_is_wrapped(model):
    engine = Engine(model, num_blocks=8)
    wrapped = {"write", "gather", "copy_blocks", "attend"}
    for owner in (engine.manager.pool, *engine.runner.layers):
        assert not wrapped & vars(owner).keys()

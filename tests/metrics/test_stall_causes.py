"""The cause that a stall of 300 ms in a known phase of a step gets."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mlx_paged import Engine
from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.metrics.tick import PARTS
from mlx_paged.scheduler.scheduler import Scheduler
from tests.support.models.tiny_models import tiny_model
from tests.support.simulation.fake_model import FakeRunner
from tests.support.simulation.hash_model import VOCAB

STALL = 0.3
WARM_UP = 20
BLOCK = 4
PROMPT = [5, 9, 77, 3, 21, 64, 8]


@pytest.fixture
def stall(clock) -> Callable[[], None]:
    def spend() -> None:
        clock.now += STALL

    return spend


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def core(clock, request) -> EngineCore:
    """Two streams after some decodes; only `stalled` collects garbage."""
    allocator = BlockAllocator(60, BLOCK)
    engine = EngineCore(
        Scheduler(allocator, max_running=8, prefill_chunk=16, clock=clock),
        FakeRunner(allocator, clock, random.Random(0), recurrent=False),
        EngineStats(BLOCK, 1, 60),
        vocab_size=VOCAB,
        lookahead=request.param,
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
    """Only the next call of ``owner.name`` stalls."""
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
    ("owner", "name", "part", "cause"),
    [
        ("scheduler", "schedule", "schedule_ms", "host"),
        ("scheduler", "commit", "schedule_ms", "host"),
        ("_outputs", "append", "output_ms", "host"),
        ("runner", "launch", "launch_ms", "launch"),
        ("runner", "collect", "wait_ms", "device"),
    ],
)
def test_a_stall_is_a_spike_and_put_down_to_where_it_happened(
    core, stall, owner, name, part, cause
):
    with stalled(getattr(core, owner), name, stall):
        core.step()
    assert only_spike(core)["causes"] == [cause]
    assert getattr(core.ticks[-1], part) >= 1000 * STALL


@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_stall_while_a_prompt_is_computed_is_put_down_to_it(core, stall, name):
    core.add_request([*range(23, 3, -1)] * 2, max_tokens=2)
    core.step()
    with stalled(core.runner, name, stall):
        core.step()
    assert only_spike(core)["causes"] == ["prefill"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_collection_is_a_spike_wherever_it_happens(core, clock, name):
    def spend(phase: str, info: dict[str, int]) -> None:
        clock.now += STALL if phase == "stop" else 0

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
    for first in (0, 3):  # the pool is full before these have all that they want
        core.add_request(list(range(first, first + 20)), max_tokens=90)
    while core.has_work and not core.stats.preemptions:
        core.step()
    assert only_spike(core)["causes"] == ["preemption", "eviction"]  # of what was preempted


def test_a_stall_over_a_first_copy_is_put_down_to_warming_up(core, stall):
    """A stall at a later copy gets the cause `cow`."""

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


def test_a_sleep_in_a_logits_processor_is_a_spike_of_a_real_engine():
    """It lasts 20 times as long as any step before, however busy the machine is."""
    sleeps: list[float] = []

    def sleepy(tokens: Any, logits: Any) -> Any:
        if len(tokens) == len(PROMPT) + 20:
            sleeps.append(max(STALL, max(tick.tick_ms for tick in engine.ticks) / 50))
            time.sleep(sleeps[0])
        return logits

    engine = Engine(tiny_model("llama"), block_size=BLOCK, num_blocks=64, lookahead=False)
    engine.generate([PROMPT], max_tokens=30, logits_processors=[sleepy])
    assert engine.ticks[20].launch_ms >= 1000 * sleeps[0]
    assert any(spike.index == 20 and spike.causes[0] == "launch" for spike in engine.ticks.spikes)

"""What an engine gives back is given in order, measured, logged and taken again after some time."""

import logging
import re
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_paged import Engine
from mlx_paged.engine.memory_watch import watch_memory
from mlx_paged.pressure.ladder import CACHE
from mlx_paged.pressure.rungs import LEAST_CHUNK, Kept, SmallerChunk, SmallerPool, watch
from mlx_paged.pressure.system import Level
from mlx_paged.pressure.watch import GROW_AFTER_S, Clocks
from mlx_paged.request import PoolShrunkError
from mlx_paged.scheduler.budget import ChunkBudget
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy, tiny_model

KEPT, CHUNK, POOL = "snapshots and features of pictures", "a smaller chunk", "the pool"
PROMPTS = [[(7 * i + j) % VOCAB for i in range(40 + j)] for j in range(3)]


class Machine:
    """An engine on a system whose level and clock a test sets. The footprint is what MLX holds, and
    what the steps take that have the chunk of the latest one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.now, self.awake, self.trims = engine, Level.NORMAL, 0.0, 0
        parts = SimpleNamespace(
            scheduler=engine.scheduler, models=engine._models, stats=engine.stats
        )
        clocks = Clocks(lambda: self.awake, lambda: self.awake)
        watch_memory(engine._pipeline, parts, engine._requests.values, self, clocks=clocks, least=1)

    def level(self) -> Level:
        return self.now

    def footprint(self) -> int:
        steps = self.engine.scheduler.budget.chunk << 20
        return mx.get_active_memory() + mx.get_cache_memory() + steps

    def trim(self) -> None:
        self.trims += 1

    def run(self, seconds: float, num_steps: int) -> None:
        """Let some steps follow one another, so many seconds apart."""
        for _ in range(num_steps):
            self.awake += seconds
            if not self.engine.has_work:
                self.engine.add_request(PROMPTS[0], max_tokens=20)
            self.engine.step()

    @property
    def sizes(self) -> tuple[int, int]:
        """Prompt tokens of a step, and blocks of the pool."""
        return self.engine.scheduler.budget.chunk, self.engine.manager.pool.num_blocks


@pytest.fixture
def machine() -> Machine:
    """Of a model with recurrent layers, whose states snapshots keep."""
    return Machine(
        Engine(build("jamba"), block_size=4, num_blocks=400, prefill_chunk=256, max_running=3)
    )


def given(caplog) -> list[str]:
    """What the log says to have given bytes back, in order."""
    return re.findall(r"pressure: (.*) gave back [\d.]+ MB", caplog.text)


def test_an_engine_gives_back_in_order_and_every_rung_has_its_line(machine, caplog):
    caplog.set_level(logging.INFO, "mlx_paged")
    expected = [solo_greedy(build("jamba"), prompt, 6) for prompt in PROMPTS]
    machine.run(1.0, 30)  # snapshots are made
    assert len(machine.engine.manager.allocator.states.snapshots) > 0
    assert not given(caplog) and machine.sizes == (256, 400)
    machine.now = Level.WARNING
    machine.run(1.0, 12)
    first = list(dict.fromkeys(given(caplog)))
    assert first[-3:] == [KEPT, CHUNK, POOL] and set(first) <= {CACHE, KEPT, CHUNK, POOL}
    report = machine.engine.stats.pressure["given_back"]
    assert [*report] == [CACHE, KEPT, CHUNK, POOL]
    for name in (KEPT, CHUNK, POOL):
        assert report[name]["uses"] > 0 and report[name]["bytes"] > 0, name
        assert given(caplog).count(name) == report[name]["uses"]
    assert machine.trims > 0
    assert machine.sizes[0] < 256 and machine.sizes[1] < 400
    done = machine.engine.generate(PROMPTS, max_tokens=6)
    assert [completion.tokens for completion in done] == expected


def test_what_was_given_back_is_not_taken_again_before_its_time(machine):
    machine.now = Level.CRITICAL
    machine.run(1.0, 4)
    chunk, blocks = machine.sizes
    assert chunk < 256 and blocks < 400
    machine.now = Level.NORMAL
    machine.run(1.0, int(GROW_AFTER_S) - 1)
    assert machine.sizes == (chunk, blocks)
    machine.run(1.0, 3)
    assert machine.sizes == (2 * chunk, min(2 * blocks, 400))
    for _ in range(10):
        machine.run(GROW_AFTER_S, 2)
    assert machine.sizes == (256, 400)


def test_a_request_for_the_configured_pool_is_told_of_the_shortage():
    engine = Engine(tiny_model("llama"), block_size=4, num_blocks=80, max_running=3)
    machine = Machine(engine)
    machine.now = Level.CRITICAL
    machine.run(1.0, 4)
    assert machine.sizes[1] < 80
    with pytest.raises(PoolShrunkError, match=r"of 80 while the system is short of memory"):
        engine.add_request(PROMPTS[0], max_tokens=270)
    with pytest.raises(ValueError, match="or a larger pool") as raised:
        engine.add_request(PROMPTS[0], max_tokens=300)
    assert not isinstance(raised.value, PoolShrunkError)
    machine.now = Level.NORMAL
    for _ in range(10):
        machine.run(GROW_AFTER_S, 2)
    engine.add_request(PROMPTS[0], max_tokens=270)


def test_all_that_is_kept_goes_at_once():
    had = [True, False, True]
    calls: list[int] = []
    forget = [lambda i=i: calls.append(i) or had[i] for i in range(3)]
    assert Kept(forget).act(Level.WARNING) and calls == [0, 1, 2]
    assert not Kept(forget[1:2]).act(Level.WARNING)


def test_a_chunk_is_halved_down_to_a_least_one_and_doubled_up_to_its_own():
    budget = ChunkBudget(8 * LEAST_CHUNK + 1, None)
    chunks = SimpleNamespace(shorten_chunks=budget.shorten, lengthen_chunks=budget.lengthen)
    rung = SmallerChunk(chunks)
    assert [rung.act(Level.WARNING) for _ in range(4)] == [True, True, True, False]
    assert budget.chunk == LEAST_CHUNK
    found = []
    for _ in range(4):
        rung.undo()
        found.append(budget.chunk)
    assert found == [2 * LEAST_CHUNK, 4 * LEAST_CHUNK, 8 * LEAST_CHUNK + 1, 8 * LEAST_CHUNK + 1]


class Size:
    """Of a pool of 100 blocks, of which running requests hold some."""

    def __init__(self, held: int, log: list[object]) -> None:
        self.now, self.largest, self.held, self.log = 100, 100, held, log

    def change(self, num_blocks: int) -> bool:
        self.log.append(num_blocks)
        before, self.now = self.now, min(num_blocks, self.largest)
        return self.now != before


def pool_of(held: int) -> tuple[SmallerPool, Size, list[object]]:
    log: list[object] = []
    more = [True, True, False]
    size = Size(held, log)
    return SmallerPool(size, lambda: log.append("save") or more.pop(0)), size, log


@pytest.mark.parametrize(
    ("level", "held", "expected"),
    [(Level.WARNING, 20, 50), (Level.WARNING, 70, 70), (Level.CRITICAL, 70, 50)],
)
def test_only_a_critical_level_takes_blocks_of_running_requests(level, held, expected):
    rung, size, log = pool_of(held)
    assert rung.act(level) and size.now == expected
    assert log == ["save", "save", "save", expected]  # known prefixes go to a disk first
    rung.undo()
    assert size.now == min(100, 2 * expected)


def test_a_pool_whose_blocks_are_all_held_gives_nothing_at_a_warning():
    rung, size, log = pool_of(100)
    assert not rung.act(Level.WARNING) and log == [] and size.now == 100


def test_a_pool_that_cannot_change_is_no_rung(machine):
    budget = machine.engine.scheduler
    found = watch(machine, [], budget, None, lambda: False, SimpleNamespace())
    assert [*found.report["given_back"]] == [CACHE, KEPT, CHUNK]
    found._growing.grow()  # without a pool, too
    mx.eval(mx.zeros(1 << 20))
    before = mx.get_cache_memory()
    found._ladder.flush()
    assert mx.get_cache_memory() == 0 < before

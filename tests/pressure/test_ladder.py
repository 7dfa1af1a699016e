"""Rungs are climbed in order, and what brings no bytes is none; with clocks of a stand-in."""

from dataclasses import dataclass, field

from mlx_paged.pressure.ladder import CACHE, LEAST, Ladder
from mlx_paged.pressure.system import Level
from mlx_paged.pressure.watch import (
    GROW_AFTER_S,
    TRY_AGAIN_S,
    UNWIRE_AFTER_S,
    Clocks,
    Watch,
)

MB = 1 << 20


@dataclass
class StandIn:
    """A system whose figures a test sets."""

    bytes: int = 1000 * MB
    now: Level = Level.NORMAL
    reads: int = 0

    def level(self) -> Level:
        self.reads += 1
        return self.now

    def footprint(self) -> int:
        return self.bytes

    def trim(self) -> None:
        pass


@dataclass
class FakeRung:
    name: str
    system: StandIn
    log: list[str]
    brings: list[int] = field(default_factory=list)
    is_late: bool = False
    repeats: bool = False

    def act(self, level: Level) -> bool:
        if not self.brings:
            return False
        self.log.append(self.name)
        self.system.bytes -= self.brings.pop(0)
        return True

    def undo(self) -> None:
        self.log.append(f"no {self.name}")


class Wiring:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def rest(self) -> None:
        self.log.append("rest")

    def work(self) -> None:
        self.log.append("work")

    def grow(self) -> None:
        self.log.append("grow")


class Machine:
    """A watch on a stand-in, whose clocks a test moves."""

    def __init__(self, kept=(), chunk=(), pool=()) -> None:
        self.system, self.log, self.awake, self.slept = StandIn(), [], 0.0, 0.0
        names = (("kept", kept), ("chunk", chunk), ("pool", pool))
        rungs = [FakeRung(name, self.system, self.log, [*own]) for name, own in names]
        rungs[1].is_late, rungs[2].repeats = True, True
        self.cached = 0
        self.ladder = Ladder(self.flush, rungs, self.system)
        clocks = Clocks(lambda: self.awake, lambda: self.awake + self.slept)
        wiring = Wiring(self.log)
        self.watch = Watch(self.system, self.ladder, wiring, wiring, clocks)

    def flush(self) -> None:
        self.system.bytes -= self.cached
        self.cached = 0

    def step(self, seconds: float) -> None:
        self.awake += seconds
        if self.watch.is_due():
            self.watch.run()


def test_each_reading_climbs_to_the_next_rung_that_brings_bytes():
    machine = Machine(kept=[5 * MB], chunk=[3 * MB], pool=[7 * MB, 2 * MB])
    machine.cached, machine.system.now = 4 * MB, Level.WARNING
    seen = []
    for _ in range(6):
        machine.step(1.0)
        seen.append(list(machine.log))
    assert seen[0] == [] and seen[1] == ["kept"] and seen[2] == ["kept", "chunk"]
    assert seen[5] == ["kept", "chunk", "pool", "pool"]
    given = {name: (each.uses, each.bytes) for name, each in machine.ladder.given.items()}
    assert given == {
        CACHE: (1, 4 * MB),
        "kept": (1, 5 * MB),
        "chunk": (1, 3 * MB),
        "pool": (2, 9 * MB),
    }


def test_a_rung_without_bytes_is_passed_over_and_undone():
    machine = Machine(kept=[LEAST - 1], chunk=[0], pool=[0, 8 * MB])
    machine.system.now = Level.WARNING
    machine.step(1.0)
    assert machine.log == ["kept", "chunk"]
    machine.step(1.0)
    assert machine.log == ["kept", "chunk", "no chunk", "pool", "pool"]
    assert machine.ladder.given["kept"].vain == machine.ladder.given["pool"].vain == 1


def test_a_critical_level_climbs_all_rungs_at_once():
    machine = Machine(kept=[5 * MB], chunk=[3 * MB], pool=[7 * MB])
    machine.system.now = Level.CRITICAL
    machine.step(1.0)
    assert machine.log == ["kept", "chunk", "pool"]


def test_figures_are_read_once_a_second_and_an_empty_ladder_rests():
    machine = Machine()
    machine.system.now = Level.WARNING
    for _ in range(40):
        machine.step(0.25)
    assert machine.system.reads == 10
    assert machine.ladder.given[CACHE].vain == 1
    machine.step(TRY_AGAIN_S)
    assert machine.ladder.given[CACHE].vain == 2


def test_nothing_grows_for_some_time():
    machine = Machine(pool=[2 * MB])
    machine.system.now = Level.WARNING
    machine.step(1.0)
    machine.system.now = Level.NORMAL
    machine.step(GROW_AFTER_S - 1)
    assert machine.log == ["pool"]
    machine.step(2.0)
    machine.step(2.0)
    assert machine.log == ["pool", "grow"]


def test_nothing_is_wired_after_idle_minutes_or_a_sleep_until_the_next_step():
    machine = Machine()
    machine.awake += UNWIRE_AFTER_S - 1
    machine.watch.rest()
    assert machine.log == []
    machine.awake += 1
    machine.watch.rest()
    machine.watch.rest()
    assert machine.log == ["rest"] and not machine.watch.report["is_wired"]
    machine.step(0.1)
    assert machine.log == ["rest", "work"]
    machine.slept += 8 * 3600
    machine.watch.rest()
    assert machine.log == ["rest", "work", "rest"]
    assert machine.watch.sleeps == 1 and machine.watch.slept_s == 8 * 3600


def test_bytes_of_other_rungs_are_not_those_of_a_late_one():
    machine = Machine(chunk=[0], pool=[5 * MB])
    machine.system.now = Level.CRITICAL
    machine.step(1.0)
    assert machine.log == ["chunk", "pool"]
    machine.step(1.0)
    assert machine.log == ["chunk", "pool", "no chunk"]
    assert machine.ladder.given["chunk"].uses == 0 < machine.ladder.given["pool"].uses

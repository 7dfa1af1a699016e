"""Reads the system's figures between steps, and acts on them while no step is under way. No mlx."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_paged.pressure.ladder import Ladder, as_json
from mlx_paged.pressure.system import Level, System

LOGGER = logging.getLogger(__name__)

READ_EVERY_S = 1.0
TRY_AGAIN_S = 30.0
"""Seconds until the ladder is climbed anew, after its last rung."""
GROW_AFTER_S = 300.0
"""Seconds without pressure until a part of what was given back is taken again."""
UNWIRE_AFTER_S = 180.0
"""Seconds without a step until memory is wired no more."""
SLEPT_S = 5.0
"""How far the wall clock and the clock of awake time part in a sleep, at least: less is what a
server of the time corrects."""


class Growing(Protocol):
    """What grows again when there is no pressure."""

    def grow(self) -> None:
        """Take back a part of what was given back, if anything was."""


class Wired(Protocol):
    """What keeps the memory in use wired."""

    def rest(self) -> None:
        """No step is computed at present."""

    def work(self) -> None:
        """A step is about to be computed."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Two clocks, in seconds.

    Attributes:
        awake: does not count the time that the machine sleeps.
        wall: counts it.
    """

    awake: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Watch:
    """Watches one engine's memory: the pause between its steps (`engine/pipeline.py`).

    Attributes:
        level: of the latest reading.
        sleeps: of the machine, while the engine lived.
        report: what was read and done, as plain JSON values, as of the latest reading.
    """

    def __init__(
        self,
        system: System,
        ladder: Ladder,
        growing: Growing,
        wired: Wired,
        clocks: Clocks | None = None,
    ) -> None:
        self._system, self._ladder, self._growing = system, ladder, growing
        self._wired, self._clocks = wired, clocks or Clocks()
        now = self._clocks.awake()
        self.level, self.sleeps, self.slept_s = Level.NORMAL, 0, 0.0
        self._apart = self._clocks.wall() - now
        self._read_at = self._worked_at = now
        self._may_climb_at = now
        self._may_grow_at = now + GROW_AFTER_S
        self._is_due, self._rests = False, False
        self.report: dict[str, Any] = {}
        self._note()

    def is_due(self) -> bool:
        """A step is about to be computed; whether something is to be done before the next one."""
        now = self._clocks.awake()
        self._worked_at = now
        if self._rests:
            self._rests = False
            self._wired.work()
        self._note_sleep(now)
        return self._is_due or self._read(now)

    def run(self) -> None:
        """Climb the ladder, or take back what was given back, while no step is under way."""
        self._is_due = False
        now = self._clocks.awake()
        may_climb, self._may_climb_at = now >= self._may_climb_at, now + TRY_AGAIN_S
        self._ladder.measure()
        if self.level > Level.NORMAL:
            if may_climb and self._ladder.climb(self.level):
                self._may_climb_at = now
        elif now >= self._may_grow_at:
            self._may_grow_at = now + GROW_AFTER_S
            self._growing.grow()
        self._note()

    def rest(self) -> None:
        """There is no step to compute: act at once, and let memory be unwired after some time."""
        now = self._clocks.awake()
        slept = self._note_sleep(now)
        if not self._rests and (slept or now - self._worked_at >= UNWIRE_AFTER_S):
            self._rests = True
            self._wired.rest()
        if self._is_due or self._read(now):
            self.run()

    def _note(self) -> None:
        self.report.update(
            level=self.level.name.lower(),
            footprint_bytes=self._system.footprint(),
            given_back=as_json(self._ladder.given),
            is_wired=not self._rests,
            sleeps=self.sleeps,
            slept_s=round(self.slept_s, 1),
        )

    def _read(self, now: float) -> bool:
        """Read the level, at most once in READ_EVERY_S; returns whether :meth:`run` has work."""
        if now < self._read_at + READ_EVERY_S:
            return False
        self._read_at, before, self.level = now, self.level, self._system.level()
        if self.level != before:
            LOGGER.info("memory pressure: %s", self.level.name.lower())
        if self.level > Level.NORMAL:
            self._may_grow_at = now + GROW_AFTER_S
            self._is_due = now >= self._may_climb_at
        else:
            self._ladder.calm()
            self._may_climb_at = now
            self._is_due = now >= self._may_grow_at
        self._is_due |= self._ladder.is_waiting
        self._note()
        return self._is_due

    def _note_sleep(self, now: float) -> bool:
        """Whether the machine has slept since the call before. Every time-out of this package is of
        awake time, so that none fires; the system's figures are read at once."""
        apart, before = self._clocks.wall() - now, self._apart
        self._apart = apart
        if apart - before < SLEPT_S:
            return False
        self.sleeps += 1
        self.slept_s += apart - before
        self._read_at = now - READ_EVERY_S
        LOGGER.info("the machine slept for %.0f s", apart - before)
        return True

"""What is given back under memory pressure, in order, and the bytes that it brings. No mlx."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_paged.pressure.system import Level, System

LOGGER = logging.getLogger(__name__)

CACHE = "MLX's cache"
LEAST = 1 << 20
"""Bytes that a rung has to bring. Fewer count as none: a process takes some pages more or less."""


class Rung(Protocol):
    """Something that can be given back while no step is under way.

    Attributes:
        name: in the log and in the counters.
        is_late: whether its bytes come back with the steps that follow. They are measured at the
            next reading, and :meth:`undo` is called if there are none.
        repeats: whether it may bring bytes, or more of them, when it acts again at once.
    """

    name: str
    is_late: bool
    repeats: bool

    def act(self, level: Level) -> bool:
        """Give something back; returns whether there was anything."""

    def undo(self) -> None:
        """Take back what brought no bytes, or what is not needed any more."""


@dataclass(slots=True)
class Given:
    """What a rung has brought.

    Attributes:
        uses: how often it brought bytes.
        bytes: by which the footprint fell, in all.
        vain: how often it brought none.
    """

    uses: int = 0
    bytes: int = 0
    vain: int = 0


@dataclass(slots=True)
class _Late:
    rung: Rung
    before: int  # the footprint when it began
    others: int = 0  # bytes that other rungs have brought since then


@dataclass(slots=True, eq=False)
class Ladder:
    """Climbs from rung to rung, one at each call; at a critical level all at once. A rung that
    brings no bytes is passed over.

    Args:
        flush: gives back what has been freed, so that the system has it: the first rung, `CACHE`.
        rungs: the others.
        least: bytes that a rung has to bring.

    Attributes:
        given: what each rung has brought, by its name, in their order.
    """

    flush: Callable[[], None]
    rungs: Sequence[Rung]
    system: System
    least: int = LEAST
    given: dict[str, Given] = field(init=False)
    _next: int = 0  # 0: the cache
    _late: _Late | None = None

    def __post_init__(self) -> None:
        self.given = {name: Given() for name in (CACHE, *[rung.name for rung in self.rungs])}

    @property
    def is_waiting(self) -> bool:
        """Whether the bytes of a rung are still to be measured."""
        return self._late is not None

    def climb(self, level: Level) -> bool:
        """Take the next rung that brings bytes. Returns whether there may be more above it; the
        next call begins with the first one again if there is not."""
        while self._next <= len(self.rungs):
            if self._next == 0:
                brought, repeats = self._note(CACHE, self._flush()), False
            else:
                rung = self.rungs[self._next - 1]
                found = self._act(rung, level)
                brought, repeats = bool(found), rung.repeats and found is not None
            if not repeats:
                self._next += 1
            if brought and (level < Level.CRITICAL or repeats):
                return True
        self._next = 0
        return False

    def calm(self) -> None:
        """There is no pressure: the next climb begins with the first rung."""
        self._next = 0

    def measure(self) -> None:
        """Measure what a rung has brought whose bytes come late."""
        late, self._late = self._late, None
        if late is None:
            return
        returned = late.before - self.system.footprint() - late.others
        if not self._note(late.rung.name, returned):
            late.rung.undo()

    def _act(self, rung: Rung, level: Level) -> bool | None:
        """Climb a rung; returns whether it brought bytes, or will. None: it has nothing to give."""
        if rung.is_late:
            before = self.system.footprint()
            if self._late is not None or not rung.act(level):
                return None
            self.flush()
            self._late = _Late(rung, before)
            return True
        self._flush()  # what follows is the rung's alone
        before = self.system.footprint()
        if not rung.act(level):
            return None
        self.flush()
        returned = before - self.system.footprint()
        if self._late is not None:
            self._late.others += returned
        return self._note(rung.name, returned)

    def _flush(self) -> int:
        before = self.system.footprint()
        self.flush()
        return before - self.system.footprint()

    def _note(self, name: str, returned: int) -> bool:
        """Count and log the bytes that a rung has brought; returns whether they are enough."""
        given, now = self.given[name], self.system.footprint() / 1e9
        if returned < self.least:
            given.vain += 1
            LOGGER.info("memory pressure: %s gave nothing back", name)
            return False
        given.uses += 1
        given.bytes += returned
        LOGGER.warning(
            "memory pressure: %s gave back %.1f MB, %.2f GB are left", name, returned / 1e6, now
        )
        return True


def as_json(given: dict[str, Given]) -> dict[str, Any]:
    """Counters as plain JSON values."""
    return {
        name: {"uses": each.uses, "bytes": each.bytes, "vain": each.vain}
        for name, each in given.items()
    }

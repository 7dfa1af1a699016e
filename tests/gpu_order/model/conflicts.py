"""Pairs of accesses that nothing orders."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.gpu_order.model.encoder import Memory, Touch
from tests.gpu_order.model.ordering import Ordering
from tests.gpu_order.model.trace import Unit


@dataclass(frozen=True)
class Hazard:
    """Two accesses of one part of memory that may run at once.

    Attributes:
        kind: "RAW", "WAR" or "WAW".
        first: the access that is encoded first.
        second: the other one.
        unit: the part; None: all of the memory.
    """

    kind: str
    first: Touch
    second: Touch
    unit: Unit | None

    def __str__(self) -> str:
        verbs = [("reads", "writes")[touch.is_write] for touch in (self.first, self.second)]
        where = "memory" if self.unit is None else f"block {self.unit} of memory"
        return (
            f"{self.kind}: {self.second.op.name} in {self.second.label} {verbs[1]} {where} "
            f"{self.first.memory}, which {self.first.op.name} in {self.first.label} {verbs[0]}"
        )


@dataclass(eq=False)
class _Part:
    """The accesses of a part of memory that a later one may meet."""

    write: Touch | None = None
    reads: list[Touch] = field(default_factory=list)


class Conflicts:
    """The hazards among the accesses of encoders, which are added as they end."""

    def __init__(self, ordering: Ordering) -> None:
        self.found: list[Hazard] = []
        self._ordering = ordering
        self._parts: dict[Memory, dict[Unit | None, _Part]] = {}

    def add(self, touches: Iterable[Touch]) -> None:
        for touch in touches:
            parts = self._parts.setdefault(touch.memory, {})
            if touch.units is None:
                units: Iterable[Unit | None] = [*parts] if touch.is_write else [*parts, None]
                for unit in units:
                    self._meet(touch, parts.get(unit), unit)
                if touch.is_write:
                    parts.clear()
                self._note(touch, parts.setdefault(None, _Part()))
                continue
            for unit in touch.units:
                self._meet(touch, parts.get(None), unit)
                part = parts.setdefault(unit, _Part())
                self._meet(touch, part, unit)
                self._note(touch, part)

    def _meet(self, touch: Touch, part: _Part | None, unit: Unit | None) -> None:
        for kind, other in self._met(touch, part):
            if other.op is not touch.op and not self._ordering.is_ordered(other, touch):
                self.found.append(Hazard(kind, other, touch, unit))

    @staticmethod
    def _met(touch: Touch, part: _Part | None) -> Iterator[tuple[str, Touch]]:
        if part is None:
            return
        if part.write is not None:
            yield ("WAW" if touch.is_write else "RAW"), part.write
        if touch.is_write:
            for read in part.reads:
                yield "WAR", read

    @staticmethod
    def _note(touch: Touch, part: _Part) -> None:
        if touch.is_write:
            part.write, part.reads = touch, []
        else:
            part.reads.append(touch)

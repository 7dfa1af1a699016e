"""Snapshots of recurrent states: where they are kept, a bounded number, LRU. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Snapshot:
    """The states of a model's recurrent layers after the first `position` tokens of a text.

    Attributes:
        is_spare: kept only where there is room for it, and the first to go.
        states: what the runner keeps of them, never changed; None until they are computed.
    """

    position: int
    is_spare: bool = False
    states: object | None = None


class Snapshots:
    """At most `most` snapshots by place: a block of known content and how many of its tokens count.

    A snapshot leaves with its block, without whose K/V it is of no use, or as the one unused
    longest when there are too many.
    """

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"[Snapshots] most is {most}: expected >= 1")
        self.most = most
        self._by_place: OrderedDict[tuple[int, int], Snapshot] = OrderedDict()  # next to go first
        self._runs: dict[int, set[int]] = {}  # by block

    def __len__(self) -> int:
        return len(self._by_place)

    def __contains__(self, block: int) -> bool:
        return block in self._runs

    @property
    def is_full(self) -> bool:
        return len(self) >= self.most

    def add(self, block: int, run: int, snapshot: Snapshot) -> bool:
        """Keep a snapshot after the first `run` tokens of `block`; whether it is wanted."""
        place = (block, run)
        known = self._by_place.get(place)
        if known is not None and known.states is not None:
            self._by_place.move_to_end(place)
            return False
        if known is None and snapshot.is_spare and self.is_full:
            return False
        self._by_place[place] = snapshot
        self._by_place.move_to_end(place, last=not snapshot.is_spare)
        self._runs.setdefault(block, set()).add(run)
        while len(self) > self.most:
            self._discard(next(iter(self._by_place)))
        return True

    def longest(self, block: int, run: int) -> int:
        """Of the first `run` tokens of `block`, how many there is a snapshot after; 0: none."""
        runs = self._runs.get(block, ())
        return max((r for r in runs if r <= run and self._is_filled(block, r)), default=0)

    def use(self, block: int, run: int) -> Snapshot:
        """The snapshot at a place, from now on the one used last."""
        self._by_place.move_to_end((block, run))
        return self._by_place[block, run]

    def move(self, source: int, target: int) -> None:
        """Block `target` begins with all that `source` holds, and takes its snapshots over."""
        for run in sorted(self._runs.get(source, ())):
            snapshot = self._discard((source, run))
            if (target, run) not in self._by_place:
                self._by_place[target, run] = snapshot
                self._runs.setdefault(target, set()).add(run)

    def forget(self, block: int) -> None:
        """The block's content is no longer known."""
        for run in list(self._runs.get(block, ())):
            self._discard((block, run))

    def check_integrity(self, num_tokens: Mapping[int, int], block_size: int) -> None:
        """Assert that every snapshot is within a known block, given how many tokens each has."""
        places = {(block, run) for block, runs in self._runs.items() for run in runs}
        assert places == self._by_place.keys(), "a snapshot is lost, or left behind"
        assert all(self._runs.values()) and len(self) <= self.most, "too many snapshots"
        assert len(set(map(id, self._by_place.values()))) == len(self), "one snapshot, two places"
        for (block, run), snapshot in self._by_place.items():
            assert 0 < run <= num_tokens.get(block, 0), "a snapshot without its block"
            num_before = snapshot.position - run
            assert num_before >= 0 == num_before % block_size, "a snapshot in another's place"

    def _is_filled(self, block: int, run: int) -> bool:
        return self._by_place[block, run].states is not None

    def _discard(self, place: tuple[int, int]) -> Snapshot:
        block, run = place
        self._runs[block].remove(run)
        if not self._runs[block]:
            del self._runs[block]
        return self._by_place.pop(place)

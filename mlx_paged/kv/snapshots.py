"""Snapshots of recurrent states: a bounded number, least recently used first. Knows no mlx."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_paged.arguments import integer


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """The states of a model's recurrent layers after the first `position` tokens of a text."""

    position: int
    is_spare: bool = False  # kept only while there is room, and dropped first
    states: object | None = None  # the runner's copy, never changed; None until it is computed


class Snapshots:
    """At most `max_snapshots` snapshots. The key of a snapshot is a known block and how many of the
    block's first tokens the states are after. A snapshot is dropped with its block, whose K/V it
    needs, or as the least recently used snapshot."""

    def __init__(self, max_snapshots: int) -> None:
        self.max_snapshots = integer("Snapshots", "max_snapshots", max_snapshots, 1)
        self._by_key: OrderedDict[tuple[int, int], Snapshot] = OrderedDict()  # oldest first
        self._runs: dict[int, set[int]] = {}  # by block

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._runs

    @property
    def is_full(self) -> bool:
        return len(self) >= self.max_snapshots

    def add(self, block: int, run: int, snapshot: Snapshot) -> bool:
        """Keep a snapshot after the first `run` tokens of `block`; returns whether it was kept."""
        key = (block, run)
        known = self._by_key.get(key)
        if known is not None and known.states is not None:
            self._by_key.move_to_end(key)
            return False
        if known is None and snapshot.is_spare and self.is_full:
            return False
        self._by_key[key] = snapshot
        self._by_key.move_to_end(key, last=not snapshot.is_spare)
        self._runs.setdefault(block, set()).add(run)
        while len(self) > self.max_snapshots:
            self._discard(next(iter(self._by_key)))
        return True

    def longest(self, block: int, run: int) -> int:
        """The largest n <= `run` with a filled snapshot after n tokens of `block`; 0: none."""
        runs = self._runs.get(block, ())
        filled = (r for r in runs if r <= run and self._by_key[block, r].states is not None)
        return max(filled, default=0)

    def use(self, block: int, run: int) -> Snapshot:
        """The snapshot after `run` tokens of `block`; it becomes the most recently used."""
        self._by_key.move_to_end((block, run))
        return self._by_key[block, run]

    def move(self, source: int, target: int) -> None:
        """Move the snapshots of `source` to `target`, which begins with the same tokens."""
        for run in sorted(self._runs.get(source, ())):
            snapshot = self._discard((source, run))
            if (target, run) not in self._by_key:
                self._by_key[target, run] = snapshot
                self._runs.setdefault(target, set()).add(run)

    def forget(self, block: int) -> None:
        for run in list(self._runs.get(block, ())):
            self._discard((block, run))

    def check_integrity(self, num_tokens: Mapping[int, int], block_size: int) -> None:
        """Assert that every snapshot is in a known block, one of those in `num_tokens`."""
        keys = {(block, run) for block, runs in self._runs.items() for run in runs}
        assert keys == self._by_key.keys(), "a snapshot is lost, or left behind"
        assert all(self._runs.values()) and len(self) <= self.max_snapshots, "too many snapshots"
        assert len(set(map(id, self._by_key.values()))) == len(self), "one snapshot, two keys"
        for (block, run), snapshot in self._by_key.items():
            assert 0 < run <= num_tokens.get(block, 0), "a snapshot without its block"
            num_before = snapshot.position - run
            assert num_before >= 0 == num_before % block_size, "a snapshot has another's key"

    def _discard(self, key: tuple[int, int]) -> Snapshot:
        block, run = key
        self._runs[block].remove(run)
        if not self._runs[block]:
            del self._runs[block]
        return self._by_key.pop(key)

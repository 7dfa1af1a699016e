"""Snapshots of recurrent states: a bounded number, the most valuable ones. Knows no mlx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mlx_paged.arguments import integer
from mlx_paged.kv.worth import TOKENS, TextWorth

SPARE = 8
"""A spare snapshot counts an eighth of the operations that it saves, until it is used."""

PARTS = 20
"""A prompt that departs from a known text computes at most a part in `PARTS` of what they have in
common again, where there is room for the snapshots that this takes."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Snapshot:
    """The states of a model's recurrent layers after the first `position` tokens of a text, which
    later texts may begin with."""

    position: int
    is_spare: bool = False  # on the way: nothing says that another text goes on from here
    state: int = 0  # id of the state
    before: Snapshot | None = None  # an earlier snapshot of the same text
    key: tuple[int, int] | None = None  # among the kept ones; None: it is not kept
    uses: int = 0  # how many sequences went on from here
    total: int = -1  # worth of all tokens up to the position; below 0: not counted yet
    floor: int = 0  # the value of the snapshot that was dropped last before the latest use

    @property
    def saved(self) -> int:
        """The operations, per byte of a snapshot, of the tokens after the snapshot `before`."""
        return self.total - (0 if self.before is None else self.before.total)

    @property
    def value(self) -> int:
        """What it is worth to keep, in :data:`~mlx_paged.kv.worth.UNIT`: ``floor + saved * (1 +
        uses)``. The product of a spare snapshot is divided by `SPARE`."""
        saved = self.saved
        if self.is_spare:
            return self.floor + min(saved // SPARE, SPARE * PARTS * saved // self.position)
        return self.floor + saved * (1 + self.uses)


class Snapshots:
    """At most `max_snapshots` snapshots. The key of a snapshot is a known block and how many of the
    block's first tokens the states are after. A snapshot is dropped with its block, whose K/V it
    needs, or as the one of the least value. What is dropped raises the value of all that is used
    later, so even valuable ones are not kept for ever (GreedyDual with frequencies: Cherkasova,
    HP Labs technical report 1998).

    Args:
        release: called with the state's id when a snapshot that was kept is dropped.
        worth: of the parts of a text.
    """

    def __init__(
        self,
        max_snapshots: int,
        release: Callable[[int], None] = lambda state_id: None,
        worth: TextWorth = TOKENS,
    ) -> None:
        self.max_snapshots = integer("Engine", "max_snapshots", max_snapshots, 1)
        self._by_key: dict[tuple[int, int], Snapshot] = {}  # the latest used last
        self._runs: dict[int, set[int]] = {}  # by block
        self._states = Counter[int]()  # how many snapshots have a state, by its id
        self._floor = 0
        self._release = release
        self._worth = worth

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._runs

    def make_room(self, snapshot: Snapshot, num_planned: int = 0) -> bool:
        """Drop snapshots until there is room for `snapshot` beside `num_planned` others that will
        be added before it. Returns False if its value is less than that of one that would have to
        go, or the same if `snapshot` is spare."""
        self._count(snapshot)
        snapshot.floor = self._floor
        while self._by_key and len(self) + num_planned >= self.max_snapshots:
            least = self._least
            value = self._by_key[least].value
            if snapshot.value < value + snapshot.is_spare:
                return False
            self._floor = max(self._floor, value)
            if snapshot.before is self._by_key[least]:
                snapshot.before = snapshot.before.before
            self._discard(least)
        return num_planned < self.max_snapshots

    def add(self, block: int, run: int, snapshot: Snapshot) -> bool:
        """Keep a snapshot after the first `run` tokens of `block`. Returns whether it is kept. The
        state of a kept snapshot is released when the snapshot is dropped."""
        key = (block, run)
        known = self._by_key.get(key)
        if known is not None:
            self._count_use(known)
            return False
        while snapshot.before is not None and snapshot.before.key is None:
            snapshot.before = snapshot.before.before
        if not self.make_room(snapshot):
            self._floor = max(self._floor, snapshot.value)
            return False
        self._keep(key, snapshot)
        return True

    def runs(self, block: int, most: int) -> list[int]:
        """Each n <= `most` with a snapshot after n tokens of `block`."""
        return [run for run in self._runs.get(block, ()) if run <= most]

    def state_ids(self) -> Iterator[int]:
        """The ids of the states of all snapshots."""
        return (snapshot.state for snapshot in self._by_key.values())

    def has_state(self, state_id: int) -> bool:
        """Whether a snapshot has the state with this id."""
        return state_id in self._states

    def get(self, block: int, run: int) -> Snapshot:
        """The snapshot after `run` tokens of `block`. The call does not count as a use."""
        return self._by_key[block, run]

    def use(self, snapshot: Snapshot) -> None:
        """A sequence goes on from a kept snapshot, which becomes the most recently used. Earlier
        ones of its text are as recent, but spare from here on unless several texts used them."""
        before = snapshot.before
        while before is not None:
            before.floor = self._floor
            before.is_spare = before.is_spare or before.uses <= 1
            before = before.before
        self._count_use(snapshot)

    def move(self, source: int, target: int) -> None:
        """Move the snapshots of `source` to `target`, which begins with the same tokens."""
        for run in sorted(self._runs.get(source, ())):
            if (target, run) in self._by_key:
                self._discard((source, run))
            else:
                self._keep((target, run), self._pop((source, run)))

    def forget(self, block: int) -> None:
        for run in list(self._runs.get(block, ())):
            self._discard((block, run))

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Block i is block ``numbers[i]`` from here on."""
        kept, self._by_key, self._runs = self._by_key, {}, {}
        self._states.clear()
        for (block, run), snapshot in kept.items():
            self._keep((numbers[block], run), snapshot)

    def clear(self) -> None:
        """Drop all snapshots."""
        for key in list(self._by_key):
            self._discard(key)

    def check_integrity(self, num_tokens: Mapping[int, int], block_size: int) -> None:
        """Assert that every snapshot is in a known block. `num_tokens` has the known blocks, and
        how many tokens each of them holds."""
        keys = {(block, run) for block, runs in self._runs.items() for run in runs}
        assert keys == self._by_key.keys(), "a snapshot is lost, or left behind"
        assert all(self._runs.values()) and len(self) <= self.max_snapshots, "too many snapshots"
        assert len(set(map(id, self._by_key.values()))) == len(self), "one snapshot, two keys"
        assert self._states == Counter(self.state_ids()), "a state is not that of a snapshot"
        for (block, run), snapshot in self._by_key.items():
            assert 0 < run <= num_tokens.get(block, 0), "a snapshot without its block"
            num_before = snapshot.position - run
            assert num_before >= 0 == num_before % block_size, "a snapshot has another's key"
            before = snapshot.before
            assert snapshot.key == (block, run), "a snapshot was moved"
            assert before is None or before.key is not None, "a snapshot was dropped"
            assert before is None or before.position < snapshot.position, "a snapshot comes later"

    @property
    def _least(self) -> tuple[int, int]:
        """The key of the snapshot of the least value; of several, the one unused longest."""
        return min(self._by_key, key=lambda key: self._by_key[key].value)

    def _count(self, snapshot: Snapshot) -> None:
        """Count what a snapshot saves."""
        for each in (snapshot, snapshot.before):
            if each is not None and each.total < 0:
                each.total = self._worth.of_states(each.position)

    def _count_use(self, snapshot: Snapshot) -> None:
        assert snapshot.key is not None, "the snapshot was dropped"
        self._by_key[snapshot.key] = self._by_key.pop(snapshot.key)
        snapshot.is_spare, snapshot.floor = False, self._floor
        snapshot.uses += 1

    def _keep(self, key: tuple[int, int], snapshot: Snapshot) -> None:
        self._by_key[key], snapshot.key = snapshot, key
        self._states[snapshot.state] += 1
        self._runs.setdefault(key[0], set()).add(key[1])

    def _pop(self, key: tuple[int, int]) -> Snapshot:
        block, run = key
        self._runs[block].remove(run)
        if not self._runs[block]:
            del self._runs[block]
        snapshot = self._by_key.pop(key)
        self._states[snapshot.state] -= 1
        if not self._states[snapshot.state]:
            del self._states[snapshot.state]
        return snapshot

    def _discard(self, key: tuple[int, int]) -> None:
        snapshot = self._pop(key)
        snapshot.key = None
        self._release(snapshot.state)
        for later in self._by_key.values():
            if later.before is snapshot:
                later.before = snapshot.before

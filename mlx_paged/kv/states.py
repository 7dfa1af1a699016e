"""Which recurrent states sequences and the prefix cache hold, by id. Knows no mlx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

from mlx_paged.kv.snapshots import Snapshot, Snapshots


class State(NamedTuple):
    """The states of a model's recurrent layers after the first `position` tokens of a text.

    A step computes the arrays of a state, and nothing changes them later. The runner has the
    arrays by id. Id 0 stands for the states before the first token, which have no arrays.
    """

    id: int
    position: int


EMPTY = State(0, 0)


class Move(NamedTuple):
    """What a span does to its sequence's states: it begins with one state, and leaves others."""

    reads: State
    leaves: tuple[State, ...] = ()  # ordered by position; the last one is after the span


ReadAndLeft = tuple[State, tuple[State, ...]]
"""The fields of a :class:`Move`, without the time to make one for each decode."""


@dataclass(slots=True)
class SequenceStates:
    """The states that one sequence holds.

    Attributes:
        newest: the state after all tokens that steps compute, drafts included.
        sure: the state before the drafts; None if no drafts are in `newest`.
        planned: snapshots for the prefix cache, which has to know their blocks first.
        offered: snapshots that were offered to the prefix cache once.
        without_state: tokens of a known prefix that lacks its state at the end.
    """

    newest: State = EMPTY
    sure: State | None = None
    planned: list[Snapshot] = field(default_factory=list)
    offered: list[Snapshot] = field(default_factory=list)
    without_state: int = 0
    last_snapshot: ReferenceType[Snapshot] | None = None

    @property
    def resumes(self) -> State:
        """The state from which the sequence goes on if its drafts are wrong."""
        return self.newest if self.sure is None else self.sure

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest snapshot of its text, unless the snapshot has been dropped."""
        return None if self.last_snapshot is None else self.last_snapshot()

    @property
    def cached(self) -> Snapshot | None:
        """The latest snapshot of its text, if the prefix cache has it."""
        snapshot = self.snapshot
        return None if snapshot is None or snapshot.key is None else snapshot


class StateIds:
    """Gives each recurrent state an id when a step is planned, and counts who holds the state.

    A sequence holds its newest state, a snapshot of the prefix cache holds one. A state that nobody
    holds is released: the runner forgets its arrays after the step that is planned next.

    Args:
        max_snapshots: snapshots of the prefix cache at most; 0: there are none. None: the model has
            no recurrent layers, so that no state is ever held.

    Attributes:
        exist: whether the model has recurrent layers.
    """

    def __init__(self, max_snapshots: int | None = None) -> None:
        self.exist = max_snapshots is not None
        self.snapshots: Snapshots | None = None
        if max_snapshots:
            self.snapshots = Snapshots(max_snapshots, self.release)
        self._holders: dict[int, int] = {}
        self._num_given = 0
        self._released: list[int] = []

    def new(self, position: int) -> State:
        """A state that no step has left yet, held once."""
        self._num_given += 1
        self._holders[self._num_given] = 1
        return State(self._num_given, position)

    def hold(self, state_id: int) -> None:
        """Count one more holder."""
        if state_id:
            self._holders[state_id] += 1

    def release(self, state_id: int) -> None:
        """Count one holder less."""
        if not state_id:
            return
        count = self._holders[state_id] - 1
        if count:
            self._holders[state_id] = count
        else:
            del self._holders[state_id]
            self._released.append(state_id)

    def take_released(self) -> list[int]:
        """The ids that were released since the call before."""
        released, self._released = self._released, []
        return released

    # Of sequences

    def begin(self, found: Snapshot | None, without_state: int = 0) -> SequenceStates:
        """The states of a new sequence, which goes on from a snapshot or from its first token."""
        if found is None:
            return SequenceStates(without_state=without_state)
        self.hold(found.state)
        newest = State(found.state, found.position)
        return SequenceStates(newest, without_state=without_state, last_snapshot=ref(found))

    def fork(self, parent: SequenceStates) -> SequenceStates:
        """The states of a sequence that goes on where its parent is."""
        self.hold(parent.newest.id)
        if parent.sure is not None:
            self.hold(parent.sure.id)
        return SequenceStates(parent.newest, parent.sure, last_snapshot=parent.last_snapshot)

    def end(self, states: SequenceStates) -> None:
        """The sequence has ended."""
        self.release(states.newest.id)
        if states.sure is not None:
            self.release(states.sure.id)
        self._drop(states.planned)
        self._drop(states.offered)

    def first_needed(self, states: SequenceStates, position: int) -> int:
        """The first token that a sequence may have to compute when its next one is at `position`:
        it may have to go on from an earlier state."""
        return min(position, states.resumes.position) if self.exist else position

    def num_behind(self, states: SequenceStates, num_computed: int) -> int:
        """Computed tokens of a sequence whose states have to be computed again."""
        return num_computed - states.newest.position if self.exist else 0

    def advance(
        self,
        states: SequenceStates,
        start: int,
        stop: int,
        is_sure: bool = True,  # whether no drafts are among the tokens up to `stop`
        snapshots: Sequence[Snapshot] = (),  # to take on the way, ordered by position
    ) -> Move:
        """Plan a span that computes the K/V of ``[start, stop)``."""
        if not self.exist:
            return Move(State(0, start))
        before = states.newest
        leaves = list[State]()
        if snapshots:
            self._drop(states.planned)
            leaves = [self.new(snapshot.position) for snapshot in snapshots]
            for snapshot, state in zip(snapshots, leaves, strict=True):
                snapshot.state = state.id
            states.planned = list(snapshots)
            states.last_snapshot = ref(snapshots[-1])
        if leaves and leaves[-1].position == stop:
            self.hold(leaves[-1].id)
        else:
            leaves.append(self.new(stop))
        states.newest = leaves[-1]
        if is_sure:
            self.release(before.id)
            self._forget_sure(states)
        elif states.sure is None:
            states.sure = before
        else:
            self.release(before.id)
        return Move(before, tuple(leaves))

    def advance_each(
        self, sequences: Sequence[SequenceStates], positions: Sequence[int]
    ) -> list[ReadAndLeft]:
        """Call :meth:`advance` for the token at one position of each sequence."""
        moves = list[ReadAndLeft]()
        holders, given = self._holders, self._num_given
        for states, position in zip(sequences, positions, strict=True):
            given += 1
            before, newest = states.newest, State(given, position + 1)
            holders[given] = 1
            states.newest = newest
            if holders.get(before.id) == 1:
                del holders[before.id]
                self._released.append(before.id)
            else:
                self.release(before.id)
            if states.sure is not None:
                self._forget_sure(states)
            moves.append((before, (newest,)))
        self._num_given = given
        return moves

    def settle(self, states: SequenceStates, num_tokens: int) -> None:
        """The sequence's first `num_tokens` tokens are right, and it has no others."""
        if states.newest.position > num_tokens:
            assert states.sure is not None, "no state is kept from before the wrong tokens"
            assert states.sure.position <= num_tokens, "the state that is kept has wrong tokens"
            self.release(states.newest.id)
            states.newest, states.sure = states.sure, None
        else:
            self._forget_sure(states)

    def offer(self, states: SequenceStates, keep: Callable[[Snapshot], bool]) -> None:
        """Offer snapshots to the prefix cache by `keep`: those that are planned, and for the second
        time those that were offered before. The second offer of a kept snapshot is a use, because
        the sequence has gone on from the snapshot; others have another chance."""
        before, states.offered, states.planned = states.offered, states.planned, []
        for snapshot in [*states.offered, *before]:
            if keep(snapshot):
                self.hold(snapshot.state)
        self._drop(before)

    def _drop(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            self.release(snapshot.state)
        snapshots.clear()

    def _forget_sure(self, states: SequenceStates) -> None:
        if states.sure is not None:
            self.release(states.sure.id)
            states.sure = None

    def check_integrity(self, sequences: Iterable[SequenceStates]) -> None:
        """Assert that every holder is counted."""
        held = Counter[int]()
        for states in sequences:
            held[states.newest.id] += 1
            held.update([states.sure.id] if states.sure is not None else ())
            held.update([each.state for each in (*states.planned, *states.offered)])
        if self.snapshots is not None:
            held.update(self.snapshots.state_ids())
        del held[0]
        assert dict(held) == self._holders, "a state is lost, or held by nobody"
        assert not self._holders.keys() & self._released, "a state that is held was released"

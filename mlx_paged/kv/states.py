"""Which recurrent states sequences and the prefix cache hold, by id. Knows no mlx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from mlx_paged.arguments import integer
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.prefix_cache import PrefixCache
from mlx_paged.kv.prefix_ends import AnyEnd, PrefixEnds
from mlx_paged.kv.prefix_match import PrefixMatch
from mlx_paged.kv.snapshot_plan import chunk_stop, snapshots_on_the_way
from mlx_paged.kv.snapshots import Snapshot, Snapshots
from mlx_paged.kv.state_ends import StateEnds
from mlx_paged.kv.state_kind import EMPTY, Keep, Move, ReadAndLeft, State, Text
from mlx_paged.kv.worth import TOKENS, TextWorth


@dataclass(slots=True)
class SequenceStates:
    """The states that one sequence holds.

    Attributes:
        newest: the state after all tokens that steps compute, those that may be wrong included.
        sure: the state before the tokens that may be wrong; None if `newest` has none of them.
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
        """The state from which the sequence goes on if tokens of `newest` are wrong."""
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
    """The kind of recurrent layers: gives each of their states an id when a step is planned, and
    counts who holds the state.

    A sequence holds its newest state, a snapshot of the prefix cache holds one. A state that nobody
    holds is released: the runner forgets its arrays after the step that is planned next.

    Args:
        max_snapshots: snapshots of the prefix cache at most; 0: there are none, and no prefix is
            reused.
        state_bytes: of the arrays of one state.
        kept_bytes: of a state that only a snapshot holds, where such a state is stored otherwise.
        layout: how it is stored then; empty: as it was computed.
        worth: of the parts of a text.
    """

    exist = True

    def __init__(
        self,
        max_snapshots: int = 0,
        state_bytes: int = 0,
        kept_bytes: int | None = None,
        layout: str = "",
        worth: TextWorth = TOKENS,
    ) -> None:
        self.snapshots: Snapshots | None = None
        if integer("Engine", "max_snapshots", max_snapshots, 0):
            self.snapshots = Snapshots(max_snapshots, self.release, worth)
        self.released: list[int] = []
        self.rested: list[int] = []
        self.layout = layout
        self._state_bytes = state_bytes
        self._kept_bytes = state_bytes if kept_bytes is None else kept_bytes
        self._at_rest = set[int]()  # ids of states that are stored otherwise
        self._block_size = 0
        self._holders: dict[int, int] = {}
        self._num_given = 0

    @property
    def can_share(self) -> bool:
        return self.snapshots is not None

    @property
    def promised_bytes(self) -> int:
        """Bytes of the snapshots that have not been taken yet, all of which may be kept."""
        snapshots = self.snapshots
        if snapshots is None:
            return 0
        return self._kept_bytes * (snapshots.max_snapshots - len(snapshots))

    def prefix_ends(self, caches: Sequence[PrefixCache]) -> PrefixEnds:
        self._block_size = caches[0].block_size
        if self.snapshots is None:
            return AnyEnd(caches)
        return StateEnds(caches, self.snapshots, self.new, self.release, self._rest)

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
            if count == 1:
                self._rest(state_id)
        else:
            del self._holders[state_id]
            self._at_rest.discard(state_id)
            self.released.append(state_id)

    def _rest(self, state_id: int) -> None:
        """Let a state be stored otherwise if only a snapshot holds the state."""
        if not self.layout or state_id in self._at_rest:
            return
        if self.snapshots is not None and self.snapshots.has_state(state_id):
            self._at_rest.add(state_id)
            self.rested.append(state_id)

    # Of sequences

    def begin(self, match: PrefixMatch) -> SequenceStates:
        without_state, found = match.longer, match.checkpoint
        if found is None:
            return SequenceStates(without_state=without_state)
        assert self.snapshots is not None, "a snapshot is found where none is kept"
        self.snapshots.use(found)
        self.hold(found.state)
        newest = State(found.state, found.position)
        return SequenceStates(newest, without_state=without_state, last_snapshot=ref(found))

    def fork(self, parent: SequenceStates) -> SequenceStates:
        self.hold(parent.newest.id)
        if parent.sure is not None:
            self.hold(parent.sure.id)
        return SequenceStates(parent.newest, parent.sure, last_snapshot=parent.last_snapshot)

    def end(self, states: SequenceStates) -> None:
        self.release(states.newest.id)
        if states.sure is not None:
            self.release(states.sure.id)
        self._drop(states.planned)
        self._drop(states.offered)

    def resumes(self, states: SequenceStates) -> State:
        return states.resumes

    def begins_at(self, states: SequenceStates, num_computed: int) -> int:
        return states.newest.position

    def first_needed(self, states: SequenceStates, position: int) -> int:
        return min(position, states.resumes.position)

    def can_go_back(self, states: SequenceStates, position: int) -> bool:
        return states.newest.position <= position

    def chunk_stop(self, start: int, stop: int, num_tokens: int) -> int:
        return chunk_stop(start, stop, num_tokens, self._block_size)

    def advance(
        self,
        states: SequenceStates,
        start: int,
        stop: int,
        is_sure: bool = True,
        text: Text | None = None,
        snapshots: Sequence[Snapshot] = (),  # to take on the way, beside those that `text` gets
    ) -> Move:
        if text is not None and self.snapshots is not None:
            snapshots = snapshots_on_the_way(
                text,
                start,
                stop,
                self.snapshots,
                self._block_size,
                before=states.snapshot,
                without_state=states.without_state,
            )
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

    def advance_together(
        self, of_sequences: Iterable[SequenceStates], positions: Sequence[int]
    ) -> list[ReadAndLeft]:
        moves = list[ReadAndLeft]()
        holders, given = self._holders, self._num_given
        for states, position in zip(of_sequences, positions, strict=True):
            given += 1
            before, newest = states.newest, State(given, position + 1)
            holders[given] = 1
            states.newest = newest
            if holders.get(before.id) == 1:
                del holders[before.id]
                self._at_rest.discard(before.id)
                self.released.append(before.id)
            else:
                self.release(before.id)
            if states.sure is not None:
                self._forget_sure(states)
            moves.append((before, (newest,)))
        self._num_given = given
        return moves

    def settle(self, states: SequenceStates, num_tokens: int) -> None:
        if states.newest.position > num_tokens:
            assert states.sure is not None, "no state is kept from before the wrong tokens"
            assert states.sure.position <= num_tokens, "the state that is kept has wrong tokens"
            self.release(states.newest.id)
            states.newest, states.sure = states.sure, None
        else:
            self._forget_sure(states)

    def offer(self, states: SequenceStates, keep: Keep) -> None:
        """Offer the planned snapshots to the prefix cache, and for the second time the snapshots of
        the offer before. The second offer of a kept snapshot counts as a use, because the sequence
        has gone on from there. A snapshot that was not kept gets another chance."""
        if not states.planned and not states.offered:
            return
        before, states.offered, states.planned = states.offered, states.planned, []
        for snapshot in [*states.offered, *(each for each in before if not each.is_spare)]:
            if keep(snapshot):
                self.hold(snapshot.state)
        self._drop(before)

    def leave(self, states: SequenceStates, keep: Keep) -> None:
        newest, before = states.newest, states.cached
        if newest == EMPTY or (before is not None and before.position == newest.position):
            return
        snapshot = Snapshot(newest.position, state=newest.id, before=before)
        if keep(snapshot):
            self.hold(snapshot.state)

    def _drop(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            self.release(snapshot.state)
        snapshots.clear()

    def _forget_sure(self, states: SequenceStates) -> None:
        if states.sure is not None:
            self.release(states.sure.id)
            states.sure = None

    def forget_kept(self) -> bool:
        if not self.snapshots:
            return False
        self.snapshots.clear()
        return True

    def holdings(self) -> list[Holding]:
        size, kept = self._kept_bytes, len(self.snapshots or ())
        if self.layout:
            kept = len(self._at_rest)
        limit = 0 if self.snapshots is None else self.snapshots.max_snapshots
        others = len(self._holders) - kept
        return [
            Holding("snapshots", size * kept, size * limit, CountedBy.MLX),
            Holding("states", self._state_bytes * others, counted_by=CountedBy.MLX),
        ]

    def check_integrity(self, of_sequences: Iterable[SequenceStates]) -> None:
        held = Counter[int]()
        for states in of_sequences:
            held[states.newest.id] += 1
            held.update([states.sure.id] if states.sure is not None else ())
            held.update([each.state for each in (*states.planned, *states.offered)])
        if self.snapshots is not None:
            held.update(self.snapshots.state_ids())
        del held[0]
        assert dict(held) == self._holders, "a state is lost, or held by nobody"
        assert not self._holders.keys() & self.released, "a state that is held was released"
        assert self._at_rest <= self._holders.keys(), "a state at rest is held by nobody"

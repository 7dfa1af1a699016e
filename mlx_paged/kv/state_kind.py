"""What the allocator asks of layers that keep states of a sequence beside its K/V. Knows no mlx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from mlx_paged.holdings import Holding
from mlx_paged.kv.prefix_cache import PrefixCache
from mlx_paged.kv.prefix_ends import AnyEnd, PrefixEnds
from mlx_paged.kv.prefix_match import PrefixMatch


class State(NamedTuple):
    """What a model's layers keep of the first `position` tokens of a text beside K/V.

    A step computes the arrays of a state, and nothing changes them later. The runner has the
    arrays by id. Id 0 stands for the state before the first token, which has no arrays.
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

Keep = Callable[[Any], bool]
"""Lets prefixes end at a checkpoint; returns whether the prefix cache keeps the checkpoint."""


class Text(Protocol):
    """What is known of a sequence that a prompt begins: a request."""

    @property
    def turn_ends(self) -> Sequence[int]:
        """Numbers of leading tokens with which later prompts may begin."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """All tokens, those under way included."""


class StateKind(Protocol):
    """What a sequence keeps of layers that do not store K/V token by token.

    Such layers can go on only from a position of which they keep a state. The states of one
    sequence are an object of the kind's own, `held` below, which nothing else looks into.

    Attributes:
        exist: whether the model has such layers.
        released: ids of states that nobody holds any more; the next step names them.
        rested: ids of states that are only kept for later prompts from now on, and may be stored in
            fewer bytes; the next step names them.
        layout: how states are kept that later prompts begin with, where they are rounded; empty:
            as they were computed.
    """

    exist: bool
    released: list[int]
    rested: list[int]
    layout: str

    @property
    def can_share(self) -> bool:
        """Whether a sequence can go on from another one's states."""

    @property
    def promised_bytes(self) -> int:
        """Bytes of the states that the prefix cache may keep and does not have yet."""

    def prefix_ends(self, caches: Sequence[PrefixCache]) -> PrefixEnds:
        """Where a known prefix may end; `caches` are those of each layer group. Called once."""

    def begin(self, match: PrefixMatch) -> Any:
        """The states of a new sequence, which goes on where the known prefix ends."""

    def fork(self, held: Any) -> Any:
        """The states of a sequence that goes on where another one is."""

    def end(self, held: Any) -> None:
        """The sequence has ended."""

    def resumes(self, held: Any) -> State:
        """The newest state of which all tokens are known to be the sequence's own."""

    def begins_at(self, held: Any, num_computed: int) -> int:
        """The position of the state with which the next span of a sequence begins, of which
        `num_computed` tokens are computed."""

    def first_needed(self, held: Any, position: int) -> int:
        """The first token that a sequence may have to compute when its next one is at `position`:
        it may have to go on from an earlier state."""

    def can_go_back(self, held: Any, position: int) -> bool:
        """Whether the sequence can be computed again from `position` on."""

    def chunk_stop(self, start: int, stop: int, num_tokens: int) -> int:
        """Where a chunk of at most ``[start, stop)`` ends, of a sequence of `num_tokens`."""

    def advance(self, held: Any, start: int, stop: int, is_sure: bool, text: Text | None) -> Move:
        """Plan a span that computes the K/V of ``[start, stop)``. If `is_sure`, all its tokens are
        the sequence's own. Later prompts may begin as `text`; None: no prefix is shared."""

    def advance_together(
        self, of_sequences: Iterable[Any], positions: Sequence[int]
    ) -> list[ReadAndLeft] | None:
        """Call :meth:`advance` for the token at one position of each sequence. None: the model has
        no states."""

    def settle(self, held: Any, num_tokens: int) -> None:
        """The sequence's first `num_tokens` tokens are right, and it has no others."""

    def offer(self, held: Any, keep: Keep) -> None:
        """Offer checkpoints to the prefix cache, whose blocks have been registered since."""

    def leave(self, held: Any, keep: Keep) -> None:
        """Offer the newest state of a sequence that ends to the prefix cache."""

    def forget_kept(self) -> bool:
        """Forget the checkpoints of the prefix cache; returns whether there were any."""

    def holdings(self) -> list[Holding]:
        """What memory the states take."""

    def check_integrity(self, of_sequences: Iterable[Any]) -> None:
        """Assert that every holder is counted."""


class NoStates:
    """The kind of states of a model all of whose layers store K/V: there are none."""

    exist = False
    can_share = True
    promised_bytes = 0
    layout = ""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.rested: list[int] = []

    def prefix_ends(self, caches: Sequence[PrefixCache]) -> PrefixEnds:
        return AnyEnd(caches)

    def begin(self, match: PrefixMatch) -> None:
        pass

    def fork(self, held: None) -> None:
        pass

    def end(self, held: None) -> None:
        pass

    def resumes(self, held: None) -> State:
        return EMPTY

    def begins_at(self, held: None, num_computed: int) -> int:
        return num_computed

    def first_needed(self, held: None, position: int) -> int:
        return position

    def can_go_back(self, held: None, position: int) -> bool:
        return True

    def chunk_stop(self, start: int, stop: int, num_tokens: int) -> int:
        return stop

    def advance(self, held: None, start: int, stop: int, is_sure: bool, text: Text | None) -> Move:
        return Move(State(0, start))

    def advance_together(self, of_sequences: Iterable[None], positions: Sequence[int]) -> None:
        pass

    def settle(self, held: None, num_tokens: int) -> None:
        pass

    def offer(self, held: None, keep: Keep) -> None:
        pass

    def leave(self, held: None, keep: Keep) -> None:
        pass

    def forget_kept(self) -> bool:
        return False

    def holdings(self) -> list[Holding]:
        return []

    def check_integrity(self, of_sequences: Iterable[None]) -> None:
        pass

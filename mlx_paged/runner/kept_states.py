"""Hidden states of the latest steps, kept until a head reads them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.runner.hidden_states import ForwardStates

MOST_ROWS = 4096
"""Rows of steps whose states are kept until a head reads them."""


class Piece(NamedTuple):
    """States of consecutive positions of a request: some rows of a forward."""

    kept: "_Kept"
    first: int  # row
    num_rows: int


@dataclass(eq=False)
class _Kept:
    """The states of a forward whose tokens are known.

    Attributes:
        states: of the forward.
        right: of requests with drafts, how many of these were right.
    """

    states: ForwardStates
    right: dict[int, int]

    @property
    def rows(self) -> list[mx.array]:
        """The states, ``[rows, ...]`` each."""
        return [array.flatten(0, 1) for array in self.states.arrays]

    @property
    def num_rows(self) -> int:
        batch, length, *_ = self.states.arrays[0].shape
        return batch * length

    @cached_property
    def _index(self) -> dict[int, int]:
        """The span of each request, by request id."""
        found = {span.request.id: i for i, span in enumerate(self.states.spans)}
        for i, span in enumerate(self.states.spans):
            found.update((fork.id, i) for fork in span.forks)
        return found

    def of(self, request_id: int) -> tuple[int, int, int] | None:
        """Positions ``[start, stop)`` of a request whose states are right, and the row of `start`;
        None: the forward computed none."""
        index = self._index.get(request_id)
        if index is None:
            return None
        span = self.states.spans[index]
        wrong = len(span.further) - self.right.get(request_id, 0) if span.further else 0
        return span.start, span.stop - wrong, int(self.states.first_rows[index])


class KeptStates:
    """The states of the latest steps, until a head reads them: of at most `most_rows` rows, or of
    one step that has more.

    Args:
        row_bytes: of the states of one token.
    """

    def __init__(self, row_bytes: int, most_rows: int = MOST_ROWS) -> None:
        self._most_rows, self._row_bytes = most_rows, row_bytes
        self._forwards = deque[_Kept]()
        self._num_rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return self._num_rows * self._row_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of `most_rows` rows."""
        return self._most_rows * self._row_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes that may be kept later, which no pool may take."""
        return max(0, self.most_bytes - self.nbytes)

    def add(self, states: ForwardStates, right: dict[int, int]) -> None:
        """Keep the states of a forward, of whose drafts so many were `right` by request id. The
        oldest ones go."""
        self._forwards.append(_Kept(states, right))
        self._num_rows += self._forwards[-1].num_rows
        while self._num_rows > self._most_rows and len(self._forwards) > 1:
            self._num_rows -= self._forwards.popleft().num_rows

    def pieces(self, request_id: int, start: int, stop: int) -> tuple[int, list[Piece]]:
        """The states of a request's positions ``[first, stop)``: `first`, as near to `start` as
        they are kept without a gap, and the pieces in order."""
        found: list[Piece] = []
        for kept in reversed(self._forwards):
            if stop <= start:
                break
            own = kept.of(request_id)
            if own is None or not own[0] < stop <= own[1]:
                continue
            first = max(own[0], start)
            found.append(Piece(kept, own[2] + first - own[0], stop - first))
            stop = first
        return stop, found[::-1]

    def clear(self) -> None:
        """Forget all states."""
        self._forwards.clear()
        self._num_rows = 0


def gathered(pieces: Sequence[Piece]) -> list[mx.array]:
    """The states of these pieces, one after the other, ``[rows, ...]`` each."""
    used = list(dict.fromkeys(piece.kept for piece in pieces))
    offsets = dict(zip(used, np.cumsum([0, *(each.num_rows for each in used)]), strict=False))
    rows = [each.rows for each in used]
    joined = rows[0]
    if len(rows) > 1:
        joined = [mx.concatenate([*each]) for each in zip(*rows, strict=True)]
    parts = [offsets[p.kept] + np.arange(p.first, p.first + p.num_rows) for p in pieces]
    index = np.concatenate(parts).astype(np.int32)
    if len(index) == len(joined[0]) and (index == np.arange(len(index))).all():
        return joined
    taken = mx.array(index)
    return [mx.take(array, taken, axis=0) for array in joined]

"""States of recurrent layers, kept per sequence and joined for a batch."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

LayerState = list[mx.array | None]
States = list[LayerState]
"""The states of one sequence, layer by layer."""
StateShapes = tuple[tuple[int, ...] | None, ...]
"""Shapes of all arrays of a sequence's states, without the axis along which sequences are joined.
"""


class RecurrentStates:
    """The states of the model's recurrent layers (ArraysCache), for each live sequence.

    A recurrent layer keeps a state of fixed size instead of K/V. Before a forward the states of the
    batch's sequences are joined along axis 0; after it they are split again.
    """

    def __init__(self, caches: Sequence[ArraysCache]) -> None:
        self._caches = list(caches)
        self._states: dict[int, States] = {}
        self._shapes: dict[int, StateShapes] = {}

    def alike(self, seq_ids: Iterable[int]) -> set[int]:
        """The largest group of sequences whose states have the same shapes, so that they can be
        joined. Some states grow with a sequence's first tokens up to a fixed length."""
        kinds: dict[StateShapes, set[int]] = {}
        for seq_id in seq_ids:
            kinds.setdefault(self._shapes.get(seq_id, ()), set()).add(seq_id)
        return max(kinds.values(), key=len, default=set())

    def load(self, seq_ids: Sequence[int]) -> None:
        """Put these sequences' states into the model's caches; an unknown sequence starts empty."""
        empty: States = [[None] * len(cache.cache) for cache in self._caches]
        states = [self._states.get(seq_id, empty) for seq_id in seq_ids]
        for layer, cache in enumerate(self._caches):
            columns = zip(*(state[layer] for state in states), strict=True)
            cache.cache = [_join(column) for column in columns]

    def store(self, seq_ids: Sequence[int]) -> None:
        """Keep the sequences' states, which a forward left in the model's caches."""
        shapes, is_alone = shapes_of(cache.cache for cache in self._caches), len(seq_ids) == 1
        for row, seq_id in enumerate(seq_ids):
            self._shapes[seq_id] = shapes
            self._states[seq_id] = [
                [a if a is None or is_alone else a[row : row + 1] for a in cache.cache]
                for cache in self._caches
            ]

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended or will be computed again."""
        self._states.pop(seq_id, None)
        self._shapes.pop(seq_id, None)

    def fork(self, parent: int, child: int) -> None:
        """Let `child` start with its parent's states; arrays are never changed in place."""
        if parent in self._states:
            self._states[child], self._shapes[child] = self._states[parent], self._shapes[parent]

    def copy(self, seq_id: int) -> States | None:
        """A copy of a sequence's states that may be kept for long; None if it has none.

        Live states are views of the arrays of a whole batch or chunk and keep these in memory. A
        copy has memory of its own, up to 16 KiB more than its bytes for each array.
        """
        states = self._states.get(seq_id)
        if states is None:
            return None
        return [[None if a is None else mx.contiguous(a) for a in layer] for layer in states]

    def restore(self, seq_id: int, states: States) -> None:
        """Let a sequence continue from a copy."""
        self._states[seq_id], self._shapes[seq_id] = states, shapes_of(states)

    def clear(self) -> None:
        """Forget every sequence and empty the model's caches."""
        self._states.clear()
        self._shapes.clear()
        for cache in self._caches:
            cache.cache = [None] * len(cache.cache)

    def arrays(self, seq_ids: Sequence[int]) -> list[mx.array]:
        """The sequences' states, which are evaluated with the step."""
        return [a for seq_id in seq_ids for a in arrays_of(self._states.get(seq_id, ()))]


def arrays_of(states: Iterable[LayerState]) -> list[mx.array]:
    """The arrays of a sequence's states."""
    return [array for layer in states for array in layer if array is not None]


def packed(states: States | Any) -> Any:
    """States as bytes. States that were never used since they were packed are bytes still."""
    if not isinstance(states, list):
        return states
    stream = BytesIO()
    named = {f"{i}.{j}": a for i, layer in enumerate(states) for j, a in enumerate(layer)}
    lengths = ",".join(str(len(layer)) for layer in states)
    arrays = {name: array for name, array in named.items() if array is not None}
    mx.save_safetensors(stream, arrays, {"lengths": lengths})
    return stream.getvalue()


def unpacked(content: Any) -> States:
    """The states of which :func:`packed` made these bytes."""
    loaded: Any = mx.load(BytesIO(content), format="safetensors", return_metadata=True)
    arrays, known = loaded
    lengths = map(int, known["lengths"].split(","))
    return [[arrays.get(f"{i}.{j}") for j in range(count)] for i, count in enumerate(lengths)]


def shapes_of(states: Iterable[LayerState]) -> StateShapes:
    """The shapes of a sequence's states: sequences can be joined if these are equal."""
    return tuple(None if a is None else a.shape[1:] for layer in states for a in layer)


def _join(arrays: Sequence[mx.array | None]) -> mx.array | None:
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "sequences with and without a state in one forward"
    return known[0] if len(known) == 1 else mx.concatenate(known)

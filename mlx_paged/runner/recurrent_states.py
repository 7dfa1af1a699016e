"""States of recurrent layers, kept per sequence and joined for a batch."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

LayerState = list[mx.array | None]
States = list[LayerState]
"""States layer by layer: of one sequence, or of several, joined along axis 0."""
Forms = tuple[tuple[tuple[int, ...], mx.Dtype] | None, ...]
"""Shapes and dtypes of all arrays of states, without the axis along which sequences are joined."""


class _Joined:
    """The states that a forward left, a row for each of its sequences and for its padding."""

    def __init__(self, states: States, forms: Forms | None = None) -> None:
        self.states = states
        self.forms = forms_of(states) if forms is None else forms


class RecurrentStates:
    """The states of the model's recurrent layers (ArraysCache), for each live sequence.

    A recurrent layer keeps a state of fixed size instead of K/V. A forward has those of its
    sequences joined along axis 0, and they stay joined after it: while the same sequences are
    computed in the same order, nothing is split or copied.

    Attributes:
        forms: of the states that the model's caches have.
    """

    def __init__(self, caches: Sequence[ArraysCache]) -> None:
        self._caches = list(caches)
        self._empty = _Joined([[None] * len(cache.cache) for cache in self._caches])
        self._rows: dict[int, tuple[_Joined, int]] = {}  # of each sequence
        self.forms: Forms = self._empty.forms

    @property
    def loaded(self) -> States:
        """The states that the model's caches have."""
        return [list(cache.cache) for cache in self._caches]

    @loaded.setter
    def loaded(self, states: States) -> None:
        for cache, own in zip(self._caches, states, strict=True):
            cache.cache = list(own)

    def alike(self, seq_ids: Iterable[int]) -> set[int]:
        """The largest group of sequences whose states have the same forms, so that they can be
        joined. Some states grow with a sequence's first tokens up to a fixed length."""
        together: dict[_Joined, set[int]] = {}
        for seq_id in seq_ids:
            together.setdefault(self._row_of(seq_id)[0], set()).add(seq_id)
        kinds: dict[Forms, set[int]] = {}
        for joined, own in together.items():
            kinds.setdefault(joined.forms, set()).update(own)
        return max(kinds.values(), key=len, default=set())

    def load(self, seq_ids: Sequence[int], padding: int = 0) -> None:
        """Put these sequences' states into the model's caches, with rows of padding behind them,
        whose values mean nothing. An unknown sequence starts empty."""
        runs: list[tuple[_Joined, int, int]] = []  # rows from the second number up to the third
        for joined, row in map(self._row_of, seq_ids):
            if runs and runs[-1][0] is joined and runs[-1][2] == row:
                runs[-1] = joined, runs[-1][1], row + 1
            else:
                runs.append((joined, row, row + 1))
        self.forms = runs[0][0].forms
        layers = zip(*(joined.states for joined, *_ in runs), strict=True)
        rows = [slice(first, stop) for _, first, stop in runs]
        self.loaded = [
            [_join(column, rows, padding) for column in zip(*layer, strict=True)]
            for layer in layers
        ]

    def load_zeros(self, forms: Forms, rows: int) -> None:
        """Put zeros into the model's caches, as states of these forms."""
        flat = iter([form and mx.zeros((rows, *form[0]), form[1]) for form in forms])
        self.loaded = [[next(flat) for _ in cache.cache] for cache in self._caches]

    def store(self, seq_ids: Sequence[int], forms: Forms | None = None) -> None:
        """Keep the sequences' states, which a forward left in the model's caches. The caller may
        know that these have `forms`."""
        joined = _Joined(self.loaded, forms)
        self._rows.update((seq_id, (joined, row)) for row, seq_id in enumerate(seq_ids))
        self.loaded = self._empty.states

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended or will be computed again."""
        self._rows.pop(seq_id, None)

    def fork(self, parent: int, child: int) -> None:
        """Let `child` start with its parent's states; arrays are never changed in place."""
        if parent in self._rows:
            self._rows[child] = self._rows[parent]

    def copy(self, seq_id: int) -> States | None:
        """A copy of a sequence's states that may be kept for long; None if it has none.

        Live states are rows of the arrays of a whole batch and keep these in memory. A copy has
        memory of its own, up to 16 KiB more than its bytes for each array.
        """
        if seq_id not in self._rows:
            return None
        joined, row = self._rows[seq_id]
        return [
            [None if a is None else mx.contiguous(a[row : row + 1]) for a in layer]
            for layer in joined.states
        ]

    def restore(self, seq_id: int, states: States) -> None:
        """Let a sequence continue from a copy."""
        self._rows[seq_id] = _Joined(states), 0

    def clear(self) -> None:
        """Forget every sequence and empty the model's caches."""
        self._rows.clear()
        self.loaded, self.forms = self._empty.states, self._empty.forms

    def arrays(self, seq_ids: Iterable[int]) -> list[mx.array]:
        """The sequences' states, joined as they are, which are evaluated with the step."""
        found = {id(joined): joined.states for joined, _ in map(self._row_of, seq_ids)}
        return [array for states in found.values() for array in arrays_of(states)]

    def _row_of(self, seq_id: int) -> tuple[_Joined, int]:
        return self._rows.get(seq_id, (self._empty, 0))


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


def forms_of(states: Iterable[LayerState]) -> Forms:
    """The forms of states: sequences can be joined if these are equal."""
    return tuple(None if a is None else (a.shape[1:], a.dtype) for layer in states for a in layer)


def _join(
    arrays: Sequence[mx.array | None], rows: Sequence[slice], padding: int
) -> mx.array | None:
    """These rows of the arrays in one, with so many rows of zeros or of anything behind them."""
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "sequences with and without a state in one forward"
    count = sum(own.stop - own.start for own in rows) + padding
    if len(known) == 1 and rows[0].start == 0 and len(known[0]) == count:
        return known[0]
    parts = [a[own] for a, own in zip(known, rows, strict=True)]
    if padding:
        parts.append(mx.zeros((padding, *known[0].shape[1:]), known[0].dtype))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)

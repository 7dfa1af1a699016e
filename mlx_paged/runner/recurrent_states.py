"""States of recurrent layers, kept per sequence and joined for a batch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_paged.runner.recurrent_rows import LayerState, RecurrentRows, Run, States
from mlx_paged.scheduler.step import Span

StateShapes = tuple[tuple[int, ...] | None, ...]
"""Shapes of all arrays of a sequence's states, without the axis along which sequences are joined.
"""


class _Held(NamedTuple):
    """The states of a sequence at one position, and their shapes."""

    states: States
    shapes: StateShapes


class RecurrentStates:
    """The states of the model's recurrent layers (ArraysCache), for each live sequence.

    A recurrent layer keeps a state of fixed size instead of K/V. Before a forward the states of the
    batch's sequences are joined along axis 0; after it they are split again. A sequence has the
    states after its newest span. If drafts are in it, and one of them is wrong, the next span
    begins where the states before them are: these are kept until then.
    """

    def __init__(self, caches: Sequence[ArraysCache], rows: RecurrentRows | None = None) -> None:
        """`rows` computes forwards of rows; None: the model cannot, except for one row each."""
        self.caches = list(caches)
        self.takes_rows = rows is not None
        self._rows = rows
        self._held: dict[int, dict[int, _Held]] = {}  # by sequence and position
        empty: States = [[None] * len(cache.cache) for cache in caches]
        self._empty = _Held(empty, ())

    def alike(self, spans: Iterable[Span]) -> set[int]:
        """The largest group of sequences whose states have the same shapes, so that they can be
        joined. Some states grow with a sequence's first tokens up to a fixed length."""
        kinds: dict[StateShapes, set[int]] = {}
        for span in spans:
            seq_id = span.request.id
            kinds.setdefault(self._at(seq_id, span.start).shapes, set()).add(seq_id)
        return max(kinds.values(), key=len, default=set())

    def load(self, seq_ids: Sequence[int], positions: Sequence[int]) -> None:
        """Put these sequences' states at these positions into the model's caches."""
        held = [self._at(*pair).states for pair in zip(seq_ids, positions, strict=True)]
        for layer, cache in enumerate(self.caches):
            columns = zip(*(states[layer] for states in held), strict=True)
            cache.cache = [_join(column) for column in columns]

    @contextmanager
    def computing(self, spans: Sequence[Span], are_rows: bool) -> Iterator[None]:
        """A forward of these spans within this context begins with their states. The states after
        it are then theirs."""
        if self._rows is not None and are_rows:
            runs = self.runs(spans)
            with self._rows.computing(runs, self.caches):
                yield
        else:
            runs = [self.run(spans)]
            yield
        self.store(runs, spans)

    def run(self, spans: Sequence[Span], first: int = 0) -> Run:
        """The spans as a run from row `first` on. Their states are in the model's caches."""
        self.load([span.request.id for span in spans], [span.start for span in spans])
        stops = [piece.stop - spans[0].start for piece in spans[0].pieces()]
        return Run(first, len(spans), stops, self.caches)

    def runs(self, spans: Sequence[Span]) -> list[Run]:
        """The spans of a forward of rows as runs with caches of their own. Spans with snapshots are
        runs of their own; others are joined if they have as many tokens and states of the same
        shapes."""
        found: list[Run] = []

        def kind(span: Span) -> tuple[int, StateShapes, int]:
            alone = span.request.id if span.snapshots else -1
            return len(span), self._at(span.request.id, span.start).shapes, alone

        for _, of_run in groupby(spans, kind):
            run = self.run([*of_run], found[-1].stop if found else 0)
            caches = [ArraysCache(len(cache.cache)) for cache in self.caches]
            for own, cache in zip(caches, self.caches, strict=True):
                own.cache, cache.cache = cache.cache, [None] * len(cache.cache)
            found.append(Run(run.first, run.count, run.stops, caches))
        return found

    def store(self, runs: Sequence[Run], spans: Sequence[Span]) -> None:
        """Keep the states after each of the spans that the runs computed."""
        of_runs = iter(spans)
        for run in runs:
            shapes, is_alone = [shapes_of(after) for after in run.after], run.count == 1
            for row, span in zip(range(run.count), of_runs, strict=False):
                before = self._held.get(span.request.id, {})
                held = {at: states for at, states in before.items() if at == span.keep}
                for stop, after, shape in zip(run.stops, run.after, shapes, strict=True):
                    states: States = [
                        [a if a is None or is_alone else a[row : row + 1] for a in layer]
                        for layer in after
                    ]
                    held[span.start + stop] = _Held(states, shape)
                self._held[span.request.id] = held

    def drop(self, seq_id: int) -> None:
        """Forget a sequence that has ended or will be computed again."""
        self._held.pop(seq_id, None)

    def fork(self, parent: int, child: int) -> None:
        """Let `child` start with its parent's states; arrays are never changed in place."""
        if parent in self._held:
            self._held[child] = dict(self._held[parent])

    def copy(self, seq_id: int, position: int) -> States | None:
        """A copy of a sequence's states at a position that may be kept for long; None if it has
        none there.

        Live states are views of the arrays of a whole batch or chunk and keep these in memory. A
        copy has memory of its own, up to 16 KiB more than its bytes for each array.
        """
        held = self._held.get(seq_id, {}).get(position)
        if held is None:
            return None
        return [[None if a is None else mx.contiguous(a) for a in layer] for layer in held.states]

    def restore(self, seq_id: int, position: int, states: States) -> None:
        """Let a sequence continue from a copy."""
        self._held[seq_id] = {position: _Held(states, shapes_of(states))}

    def clear(self) -> None:
        """Forget every sequence and empty the model's caches."""
        self._held.clear()
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)

    def arrays(self, seq_ids: Sequence[int]) -> list[mx.array]:
        """The sequences' states, which are evaluated with the step."""
        held = (each for seq_id in seq_ids for each in self._held.get(seq_id, {}).values())
        return [a for each in held for a in arrays_of(each.states)]

    def _at(self, seq_id: int, position: int) -> _Held:
        return self._held[seq_id][position] if position else self._empty


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

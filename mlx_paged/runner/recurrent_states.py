"""States of recurrent layers, kept per sequence and joined for a batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import groupby, islice
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlx_paged.runner.layer_states import Forms, LayerState, States
from mlx_paged.runner.recurrent_rows import RecurrentRows, Run, empty_like
from mlx_paged.runner.stored_states import StoredStates
from mlx_paged.scheduler.step import Span


class _Joined:
    """The states that a run left: a row for each of its sequences, then rows of nobody.

    Attributes:
        held: how many of the rows are states that the store has.
        is_of_chunk: whether the run had several tokens of a sequence. Then an array may be a view
            of what the run computed for all tokens.
    """

    def __init__(self, states: States, is_of_chunk: bool = False) -> None:
        self._states = states
        self.forms = forms_of(states)
        self.rows = max([len(array) for array in arrays_of(states)], default=1)
        self.held = 0
        self.is_of_chunk = is_of_chunk

    @property
    def states(self) -> States:
        return self._states

    @property
    def wastes_memory(self) -> bool:
        """Whether the arrays keep more in memory than the states that the store has."""
        return self.is_of_chunk or self.held < self.rows


class _Stored(_Joined):
    """The states of one sequence, which are stored in fewer bytes. Who reads them gets them as
    arrays like those of all others."""

    def __init__(self, stored: StoredStates) -> None:
        super().__init__(stored.states)
        self.stored, self._states = stored, []
        self.held = 1

    @property
    def states(self) -> States:
        return self.stored.states


class RecurrentStates:
    """The states of the model's recurrent layers (ArraysCache), by the ids that steps give them.

    A recurrent layer keeps a state of fixed size instead of K/V. A forward has those of its
    sequences joined along axis 0, and they stay joined after it: while the same sequences are
    computed in the same order, nothing is split or copied. A state that no span of a step reads or
    leaves gets arrays of its own, unless all rows beside it are states that are kept, too.
    """

    def __init__(
        self,
        caches: Sequence[ArraysCache],
        rows: RecurrentRows | None = None,
        in_8_bits: bool = False,
    ) -> None:
        """`rows` computes forwards of rows; None: the model cannot, except for one row each. With
        `in_8_bits` the states that are kept for later prompts are stored so."""
        self.caches = list(caches)
        self._in_8_bits = in_8_bits
        self._to_store = set[int]()  # ids of states that the next step stores
        self.exist = bool(self.caches)
        self.takes_rows = rows is not None
        self._rows = rows
        self._held: dict[int, tuple[_Joined, int]] = {}  # by id: a row of joined states
        self._mixed = set[int]()  # ids whose rows may be beside others
        self._empty = _Joined([[None] * len(cache.cache) for cache in caches])

    def __len__(self) -> int:
        return len(self._held)

    @property
    def loaded(self) -> States:
        """The states that the model's caches have."""
        return [list(cache.cache) for cache in self.caches]

    @loaded.setter
    def loaded(self, states: States) -> None:
        for cache, own in zip(self.caches, states, strict=True):
            cache.cache[:] = own

    @property
    def loaded_arrays(self) -> list[mx.array]:
        return arrays_of(self.loaded)

    @property
    def loaded_forms(self) -> Forms:
        return forms_of(self.loaded)

    def alike(self, spans: Iterable[Span]) -> set[int]:
        """The largest group of sequences whose states have the same shapes, so that they can be
        joined. Some states grow with a sequence's first tokens up to a fixed length."""
        together: dict[_Joined, set[int]] = {}
        for span in spans:
            together.setdefault(self._at(span.reads)[0], set()).add(span.request.id)
        kinds: dict[Forms, set[int]] = {}
        for joined, own in together.items():
            kinds.setdefault(joined.forms, set()).update(own)
        return max(kinds.values(), key=len, default=set())

    def have(self, spans: Iterable[Span], forms: Forms) -> bool:
        """Whether the states with which these spans begin have these forms."""
        joined = {self._at(span.reads)[0] for span in spans}
        return all([each.forms == forms for each in joined])

    def load(self, state_ids: Sequence[int], num_empty: int = 0) -> None:
        """Put these states into the model's caches, with `num_empty` rows behind them, whose
        values mean nothing."""
        rows_of = [*map(self._at, state_ids)]
        used: dict[_Joined, list[int]] = {}
        for joined, row in rows_of:
            used.setdefault(joined, []).append(row)
        parts, before, count = list[slice](), dict[_Joined, int](), 0
        for joined, rows in used.items():
            part = slice(min(rows), min(max(rows) + 1 + num_empty, joined.rows))
            before[joined] = count - part.start
            count += part.stop - part.start
            parts.append(part)
        order = [before[joined] + row for joined, row in rows_of]
        order += [min(row, count - 1) for row in range(len(order), len(order) + num_empty)]
        index = None if order == [*range(count)] else mx.array(order, mx.int32)
        for cache, *layer in zip(self.caches, *[joined.states for joined in used], strict=True):
            cache.cache = [_join(column, parts, index) for column in zip(*layer, strict=True)]

    def load_zeros(self, forms: Forms, rows: int) -> None:
        """Put zeros into the model's caches, as states of these forms."""
        flat = iter([form and mx.zeros((rows, *form[0]), form[1]) for form in forms])
        self.loaded = [[next(flat) for _ in cache.cache] for cache in self.caches]

    @contextmanager
    def computing(
        self, spans: Sequence[Span], are_rows: bool, num_empty: int = 0
    ) -> Iterator[None]:
        """A forward of these spans within this context begins with the states that they read, and
        with `num_empty` rows of nobody. The states after it are those that they leave."""
        if self._rows is not None and are_rows and not self._are_alike(spans):
            runs = self.runs(spans, num_empty)
            with self._rows.computing(runs, self.caches):
                yield
        else:
            runs = [self.run(spans, num_empty)]
            yield
        self.store(runs, spans)

    def run(self, spans: Sequence[Span], num_empty: int = 0, first: int = 0) -> Run:
        """The spans as a run from row `first` on. Their states are in the model's caches."""
        self.load([span.reads for span in spans], num_empty)
        stops = [state.position - spans[0].start for state in spans[0].leaves]
        return Run(first, len(spans) + num_empty, stops, self.caches)

    def runs(self, spans: Sequence[Span], num_empty: int = 0) -> list[Run]:
        """The spans of a forward of rows as runs with caches of their own. A span that leaves
        several states is a run of its own; others are joined if they have as many tokens and states
        of the same forms. Rows of nobody belong to the last run."""
        found: list[Run] = []

        def kind(span: Span) -> tuple[int, Forms, int]:
            alone = span.request.id if len(span.leaves) > 1 else -1
            return len(span), self._at(span.reads)[0].forms, alone

        for _, of_run in groupby(spans, kind):
            own_spans = [*of_run]
            more = num_empty if own_spans[-1] is spans[-1] else 0
            run = self.run(own_spans, more, found[-1].stop if found else 0)
            caches = [empty_like(cache) for cache in self.caches]
            for own, cache in zip(caches, self.caches, strict=True):
                own.cache, cache.cache = cache.cache, [None] * len(cache.cache)
            found.append(Run(run.first, run.count, run.stops, caches))
        return found

    def store(self, runs: Sequence[Run], spans: Sequence[Span]) -> None:
        """Keep the states that the spans leave, which the runs computed."""
        of_runs = iter(spans)
        for run in runs:
            left = [span.leaves for span in islice(of_runs, run.count)]
            for index, after in enumerate(run.after):
                ids = [states[index].id for states in left]
                joined = _Joined(after, run.stops[-1] > 1)
                joined.held = len(ids)
                self._held |= {state_id: (joined, row) for row, state_id in enumerate(ids)}
                self._mixed.update(ids)
        self._empty_caches()

    def release(self, state_ids: Iterable[int]) -> None:
        """Forget states. Ids that the store does not have, of a step that failed, are ignored."""
        for state_id in state_ids:
            if (place := self._held.pop(state_id, None)) is not None:
                place[0].held -= 1
        self._mixed.intersection_update(self._held)
        self._to_store.intersection_update(self._held)

    def rest(self, state_ids: Iterable[int]) -> None:
        """Store states in 8 bits with the next :meth:`separate`. Ids that the store does not have,
        of a step that failed, are ignored."""
        self._to_store.update(self._held.keys() & state_ids)

    def separate(self, spans: Sequence[Span] = ()) -> list[mx.array]:
        stored = self._stored_now()
        left = [span.leaves[-1].id for span in spans]
        apart = self._mixed.difference(left, [span.reads for span in spans])
        waiting = [each for each in apart if self._held[each][0].wastes_memory]
        for state_id in waiting:
            own = self.copy(state_id)
            self.release([state_id])
            self.put(state_id, own)
        return self.arrays(waiting) + stored

    def _stored_now(self) -> list[mx.array]:
        """Store the states that wait for it in 8 bits; returns the new arrays."""
        waiting, self._to_store = self._to_store, set[int]()
        arrays = list[mx.array]()
        for state_id in waiting:
            if not isinstance(self._held[state_id][0], _Stored):
                stored = self._as_stored(state_id)
                self.release([state_id])
                self._held[state_id] = _Stored(stored), 0
                arrays += stored.arrays
        return arrays

    def _as_stored(self, state_id: int) -> StoredStates:
        """A state in 8 bits."""
        joined, _ = self._held[state_id]
        return (
            joined.stored if isinstance(joined, _Stored) else StoredStates.of(self.copy(state_id))
        )

    def copied_out(self, state_id: int) -> tuple[list[mx.array], Callable[[], bytes]]:
        if self._in_8_bits:
            stored = self._as_stored(state_id)
            return stored.arrays, stored.packed
        copied = self.copy(state_id)
        return arrays_of(copied), partial(packed, copied)

    def put_back(self, state_id: int, content: bytes) -> list[mx.array]:
        if self._in_8_bits:
            stored = StoredStates.unpacked(content)
            self._held[state_id] = _Stored(stored), 0
            return stored.arrays
        states = unpacked(content)
        self.put(state_id, states)
        return arrays_of(states)

    def copy(self, state_id: int) -> States:
        """A copy of a state that may be kept for long.

        States are rows of the arrays of a whole run and keep these in memory. A copy has memory of
        its own, up to 16 KiB more than its bytes for each array.
        """
        joined, row = self._held[state_id]
        return [
            [None if a is None else mx.contiguous(a[row : row + 1]) for a in layer]
            for layer in joined.states
        ]

    def put(self, state_id: int, states: States) -> None:
        """Keep a copy under an id."""
        joined = _Joined(states)
        joined.held = 1
        self._held[state_id] = joined, 0

    def clear(self) -> None:
        """Forget every state and empty the model's caches."""
        self._held.clear()
        self._mixed.clear()
        self._to_store.clear()
        self._empty_caches()

    def left_by(self, spans: Iterable[Span], layers: Sequence[int] | None = None) -> list[mx.array]:
        return self.arrays(left_by(spans), layers)

    def layers_of(self, caches: Sequence[Any]) -> list[int]:
        return [i for i, cache in enumerate(self.caches) if any(cache is c for c in caches)]

    def arrays(
        self, state_ids: Iterable[int], layers: Sequence[int] | None = None
    ) -> list[mx.array]:
        """The arrays of these states, joined as they are, which are evaluated with the step; with
        `layers` those of some recurrent layers, in the order of the model."""
        held = dict(self._held[state_id] for state_id in state_ids)
        if layers is None:
            return [a for joined in held for a in arrays_of(joined.states)]
        return [a for joined in held for a in arrays_of([joined.states[i] for i in layers])]

    def _empty_caches(self) -> None:
        for cache in self.caches:
            cache.cache = [None] * len(cache.cache)

    def _are_alike(self, spans: Sequence[Span]) -> bool:
        """Whether these are a batch as in mlx-lm: one token each, and states of the same forms."""
        forms = self._at(spans[0].reads)[0].forms
        return all([s.stop - s.start == 1 for s in spans]) and self.have(spans, forms)

    def _at(self, state_id: int) -> tuple[_Joined, int]:
        return self._held[state_id] if state_id else (self._empty, 0)


def left_by(spans: Iterable[Span]) -> list[int]:
    """The ids of all states that the spans leave."""
    return [state.id for span in spans for state in span.leaves]


def arrays_of(states: Iterable[LayerState]) -> list[mx.array]:
    """The arrays of a sequence's states."""
    return [array for layer in states for array in layer if array is not None]


def packed(states: States) -> bytes:
    """States as bytes."""
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
    arrays = (array for layer in states for array in layer)
    return tuple(None if a is None else (a.shape[1:], a.dtype) for a in arrays)


def _join(
    arrays: Sequence[mx.array | None], rows: Sequence[slice], index: mx.array | None
) -> mx.array | None:
    """One array with `rows` of each of the arrays; with `index`, these rows of that array."""
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "sequences with and without a state in one forward"
    pairs = zip(known, rows, strict=True)
    parts = [a if own == slice(0, len(a)) else a[own] for a, own in pairs]
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return joined if index is None else mx.take(joined, index, axis=0)

"""Recurrent layers in a forward of rows: the tokens of each sequence go through its own states."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import local
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache

from mlx_paged.runner.layer_states import LayerState, States
from mlx_paged.runner.row_terms import only_rows
from mlx_paged.runner.skip_unsampled import attached_to, override


@dataclass(eq=False)
class Run:
    """Consecutive rows of a forward: the tokens of sequences that have as many tokens each.

    Attributes:
        first: its first row.
        count: its sequences.
        stops: numbers of tokens of a sequence after which its states are wanted. The last one is
            the number of its tokens.
        caches: that hold the sequences' states, one for each recurrent cache of the model.
        after: the states after each of `stops`, as far as the model was called.
    """

    first: int
    count: int
    stops: Sequence[int]
    caches: Sequence[ArraysCache]
    after: list[States] = field(init=False)

    def __post_init__(self) -> None:
        at_the_end = [cache.cache for cache in self.caches]
        before = [[list(layer) for layer in at_the_end] for _ in self.stops[1:]]
        self.after = [*before, at_the_end]

    @property
    def stop(self) -> int:
        """The row after the last row of the run."""
        return self.first + self.count * self.stops[-1]

    def rows_of(self, value: mx.array, start: int, stop: int) -> mx.array:
        """The sequences' columns ``[start, stop)`` of an array of rows ``[T, 1, ...]``. Of ``[T]``,
        a number for each row, that of each sequence's row `start`."""
        length = self.stops[-1]
        rows = value[self.first : self.stop]
        if rows.ndim == 1:
            return rows[start::length]
        return rows.reshape(self.count, length, *rows.shape[2:])[:, start:stop]

    def numbers_of(self, start: int, stop: int) -> mx.array:
        """The rows of the sequences' columns ``[start, stop)``, sequence by sequence."""
        rows = mx.arange(self.first, self.stop).reshape(self.count, -1)
        return rows[:, start:stop].flatten()


class _OfThread(local):
    """Each thread's runs, and the index of each recurrent cache, by the cache's id."""

    runs: Sequence[Run] = ()
    indices: Mapping[int, int] = {}


class RecurrentRows:
    """Makes a model's recurrent modules compute rows of many sequences.

    A recurrent module needs the consecutive tokens of a sequence, ``[B, L, D]``; all other layers
    take them as rows ``[T, 1, D]``. A module that was given to :meth:`divert` gets a subclass. In
    a context of :meth:`computing` the subclass calls the module once for each run of rows, with
    the caches of that run, and puts the results back in order. Parameters and the module tree do
    not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._of_thread = _OfThread()
        self._known = WeakValueDictionary[int, nn.Module]()  # by id

    @classmethod
    def of(cls, model: nn.Module) -> "RecurrentRows":
        """The model's own; engines on the same model share it."""
        return attached_to(model, "recurrent_rows", cls)

    def divert(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules compute rows, from now on."""
        for module in modules:
            if id(module) not in self._known:
                self._known[id(module)] = module
                override(module, "__call__", self._call)

    @contextmanager
    def computing(self, runs: Sequence[Run], caches: Sequence[ArraysCache]) -> Iterator[None]:
        """Within this context a diverted module that is given one of the model's `caches` uses the
        runs' caches instead. The runs cover all rows, in order."""
        own = self._of_thread
        indices = {id(cache): index for index, cache in enumerate(caches)}
        own.runs, own.indices = runs, indices
        try:
            yield
        finally:
            own.runs, own.indices = (), {}

    def _call(self, module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._of_thread
        runs, own.runs = own.runs, ()  # modules within this one take what it gives them
        try:
            if not runs:
                return module(*args, **kwargs)
            num_rows = runs[-1].stop
            found = [_computed(module, run, own.indices, num_rows, args, kwargs) for run in runs]
            return found[0] if len(found) == 1 else tree_map(_joined(0), *found)
        finally:
            own.runs = runs


def _computed(
    module: Callable[..., Any],
    run: Run,
    indices: Mapping[int, int],
    num_rows: int,
    args: Any,
    kwargs: Any,
) -> Any:
    """What the module computes of a run, as rows, piece by piece."""
    found, start, before = [], 0, dict[int, LayerState]()
    shapes = (num_rows,), (num_rows, 1)
    for after, stop in zip(run.after, run.stops, strict=True):

        def own(value: Any, start: int = start, stop: int = stop) -> Any:
            if id(value) in indices:
                index = indices[id(value)]
                before[index] = list(run.caches[index].cache)
                return run.caches[index]
            is_rows = isinstance(value, mx.array) and value.shape[:2] in shapes
            return run.rows_of(value, start, stop) if is_rows else value

        given, named = tree_map(own, (args, kwargs))
        with only_rows(partial(run.numbers_of, start, stop)):
            found.append(module(*given, **named))
        for index, old in before.items():  # modules may share a cache
            for i, state in enumerate(run.caches[index].cache):
                if state is not old[i]:
                    after[index][i] = state
        start = stop
    joined = found[0] if len(found) == 1 else tree_map(_joined(1), *found)
    return tree_map(lambda rows: rows.reshape(-1, 1, *rows.shape[2:]), joined)


def empty_like(states: ArraysCache) -> ArraysCache:
    """Empty states of the model's own class."""
    kind = states.kind if isinstance(states, WatchedStates) else type(states)
    return kind(len(states.cache))


def _joined(axis: int) -> Callable[..., mx.array]:
    return lambda *parts: mx.concatenate([*parts], axis)


class WatchedStates(ArraysCache):
    """Empty states that note which modules read or write them.

    Attributes:
        kind: the class of the model's own states.
        users: these modules, each once; None: what is within no module.
    """

    def __init__(self, like: ArraysCache) -> None:
        super().__init__(len(like.cache))
        self.kind = type(like)
        self.users: list[nn.Module | None] = []

    @staticmethod
    def of(like: ArraysCache) -> "WatchedStates":
        """With the further methods of the class of `like`."""
        kind: type[WatchedStates] = type("WatchedStates", (WatchedStates, type(like)), {})
        return kind(like)

    def __getitem__(self, index: int) -> Any:
        self._note_user()
        return super().__getitem__(index)

    def __setitem__(self, index: int, value: Any) -> None:
        self._note_user()
        super().__setitem__(index, value)

    def _note_user(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame and not isinstance(frame.f_locals.get("self"), nn.Module):
            frame = frame.f_back
        user = frame and frame.f_locals["self"]
        if not any(user is known for known in self.users):
            self.users.append(user)

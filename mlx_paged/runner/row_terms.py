"""What is added to the outputs of a model's layers for some rows of a forward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Protocol, Self

import mlx.core as mx

from mlx_paged.runner.batch import Batch
from mlx_paged.scheduler.step import Span


class RowTerms(Protocol):
    """The terms of one forward's rows. They are arguments of a graph beside the parameters."""

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of the terms."""

    @property
    def form(self) -> int:
        """A number that differs where equal shapes of `arrays` stand for different layers."""

    def with_arrays(self, arrays: list[mx.array]) -> Self:
        """The same terms, with these arrays in the place of `arrays`."""

    def only(self, rows: mx.array, are_sequences: bool = False) -> Self:
        """The terms of these rows. If they `are_sequences`, of equal lengths and one after
        another, a layer may compute one token of each at a time."""


class MakeTerms(Protocol):
    """Makes the terms of a step's forwards."""

    def bring(self, spans: Sequence[Span]) -> None:
        """Have what the rows of all these spans add in memory at once. Else what a later forward of
        a step adds could take the memory of what an earlier one adds, which has not begun."""

    def __call__(self, batch: Batch) -> RowTerms | None:
        """The terms of a batch's rows. What is not in memory is read."""


class _OfThread(local):
    """The terms of the rows that each thread's layers compute."""

    terms: RowTerms | None = None


_of_thread = _OfThread()


def current() -> RowTerms | None:
    """The terms of the rows that this thread computes; None: no row has any."""
    return _of_thread.terms


@contextmanager
def using(terms: RowTerms | None) -> Iterator[None]:
    """Within this context the layers add these terms in this thread."""
    before, _of_thread.terms = _of_thread.terms, terms
    try:
        yield
    finally:
        _of_thread.terms = before


@contextmanager
def only_rows(rows: Callable[[], mx.array]) -> Iterator[None]:
    """Within this context the layers of this thread compute these rows of the forward, which are
    sequences of equal lengths."""
    terms = _of_thread.terms
    with using(None if terms is None else terms.only(rows(), are_sequences=True)):
        yield


def narrow(rows: mx.array) -> None:
    """From now on to the end of :func:`using` the layers of this thread compute these rows."""
    if _of_thread.terms is not None:
        _of_thread.terms = _of_thread.terms.only(rows)

"""Which keys a query sees: all up to its own position, or the last ones of these, a window."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import mlx.core as mx


class Causal:
    """Which keys a query sees. There is one object for each window (:func:`causal`), so objects are
    compared by identity.

    Attributes:
        window: keys that a query sees at most, its own included; None: all up to its own.
        is_full: whether it sees all of these.
        options: as arguments of ``paged_attention``.
    """

    __slots__ = ("is_full", "options", "window")

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.is_full = window is None
        self.options: dict[str, Any] = {"window": window}

    def __repr__(self) -> str:
        return f"causal({self.window})"

    def narrowed(self, other: "Causal") -> "Causal":
        """The keys that a query sees by both."""
        if self.window is None or other.window is None:
            return other if self.window is None else self
        return self if self.window <= other.window else other

    def limited(self, window_size: int | None = None) -> "Causal":
        """The keys that a query sees by this and by a model's own window."""
        return self.narrowed(causal(window_size))

    def within(self, num_keys: int) -> "Causal":
        """What a query sees of the first `num_keys` keys: :data:`FULL` if a window hides none."""
        return FULL if self.window is not None and self.window >= num_keys else self

    def first_key(self, position: int) -> int:
        """Position of the first key that a query at a position sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def are_near(self, keys: mx.array, queries: mx.array) -> mx.array:
        """Which keys at these positions are not too far before queries at these positions."""
        assert self.window is not None, "all are"
        return keys > queries - self.window

    def or_long(self, window: int) -> list["Causal"]:
        """This object and, if it has a window, one with a window of `window` keys."""
        return [self] if self.is_full else [self, causal(window)]


@cache
def causal(window: int | None) -> Causal:
    """Which keys a query sees that sees at most `window` keys, its own included; None: all."""
    return Causal(window)


FULL = causal(None)


def limits(kinds: Iterable[Causal]) -> list[int | None]:
    """The window of each: how many keys a query sees at most; None: all."""
    return [kind.window for kind in kinds]


def widest(kinds: Iterable[Causal]) -> Causal:
    """The one of these by which a query sees the most keys."""
    windows = limits(kinds)
    return FULL if None in windows else causal(max(w for w in windows if w is not None))

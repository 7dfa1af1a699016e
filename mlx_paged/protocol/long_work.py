"""Tells who runs a thread that its work may take long."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_here = threading.local()


def watched_by(change: Callable[[int], None]) -> None:
    """From now on, call `change` with 1 when this thread begins long work, and with -1 when the
    long work ends."""
    _here.change = change


@contextmanager
def may_take_long() -> Iterator[None]:
    """What the thread does in this context may take long and is no failure."""
    change: Callable[[int], None] | None = getattr(_here, "change", None)
    if change is not None:
        change(1)
    try:
        yield
    finally:
        if change is not None:
            change(-1)

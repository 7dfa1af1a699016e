"""One thread at a time in an engine. Knows no mlx."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Occupancy:
    """Which thread is inside an object's :func:`exclusive` methods, or keeps them to itself; None:
    no thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: int | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the exclusive methods to this thread within the context. Raises RuntimeError if a
        thread has them already."""
        with self.lock:
            if self.thread is not None:
                raise RuntimeError(
                    "[EngineService] another thread or service uses the engine: expected one "
                    "service for an engine"
                )
            self.thread = threading.get_ident()
        try:
            yield
        finally:
            self.thread = None


def exclusive(method: _Method) -> _Method:
    """An :func:`exclusive_as` method whose error has the name of the method."""
    return exclusive_as(method.__name__)(method)


def exclusive_as(call: str) -> Callable[[_Method], _Method]:
    """A method that raises RuntimeError for a thread while another thread is inside any exclusive
    method of the same object, which has an :class:`Occupancy` as ``occupancy``. It does not wait.
    The thread that is inside may enter again. The error says that `call` is called."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            occupancy: Occupancy = self.occupancy
            allowed = None, threading.get_ident()
            if occupancy.thread not in allowed:
                raise _refusal(call)
            # Two threads that find it free at the same time enter one after the other. No
            # statement between the entry and `try` can be interrupted by Ctrl-C.
            with occupancy.lock:
                if occupancy.thread not in allowed:  # a service may have come meanwhile
                    raise _refusal(call)
                outer, occupancy.thread = occupancy.thread, threading.get_ident()
                try:
                    return method(self, *args, **kwargs)
                finally:
                    occupancy.thread = outer

        return cast(_Method, guarded)

    return decorate


def _refusal(call: str) -> RuntimeError:
    return RuntimeError(
        f"[Engine] {call} is called while another thread uses the engine: "
        "expected one thread at a time; an EngineService lets several threads share one"
    )

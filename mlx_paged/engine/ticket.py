"""Ticket: reads the outputs of one request, which an Inbox holds. Knows no mlx."""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar

from mlx_paged.outputs import Completion, TokenOutput

T = TypeVar("T")
Change = asyncio.Future[None]
"""A future that is set when an inbox changes."""


class Ticket:
    """The reader of one request: gives each of its tokens, and its completion.

    Iterate over it with ``for`` in a thread or ``async for`` in a task; a second loop continues
    where the first one stopped. ``await ticket`` is :meth:`result` for a task. A context manager:
    leaving it aborts the request. Cancelling a task that waits for it or dropping the last
    reference aborts it, too. Its methods may be called from any thread.
    """

    def __init__(self, request_id: int, inbox: "Inbox", abort: Callable[[int], object]) -> None:
        self.request_id = request_id
        self._inbox = inbox
        self._abort = abort

    @property
    def done(self) -> bool:
        """Whether the request has ended; outputs may still wait to be read."""
        return self._inbox.ended

    @property
    def num_unread(self) -> int:
        """Outputs that wait to be read."""
        return len(self._inbox.unread)

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end of the request; return its completion.

        Unread outputs can be read later. From now on there is no limit to their number.

        Args:
            timeout: seconds; None waits without a limit.

        Raises:
            TimeoutError: the request has not ended; it continues.
            Exception: what :meth:`Engine.step` raised, if that ended the service.
        """
        inbox = self._inbox
        with inbox.changed:
            inbox.max_unread = math.inf
            if not inbox.changed.wait_for(lambda: inbox.ended, timeout):
                raise TimeoutError(
                    f"[Ticket] request {self.request_id} has not ended within {timeout} seconds"
                )
        if inbox.error is not None:
            raise inbox.error
        assert inbox.completion is not None
        return inbox.completion

    def abort(self) -> None:
        """End the request after the step under way, with ``FinishReason.ABORT``; do not wait."""
        if not self.done:
            self._abort(self.request_id)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenOutput:
        inbox = self._inbox
        with inbox.changed:
            inbox.changed.wait_for(lambda: inbox.ready)
            return inbox.pop(StopIteration)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenOutput:
        inbox = self._inbox
        return await self._wait(lambda: inbox.ready, lambda: inbox.pop(StopAsyncIteration))

    def __await__(self) -> Generator[Any, None, Completion]:
        with self._inbox.changed:
            self._inbox.max_unread = math.inf
        return self._wait(lambda: self._inbox.ended, self.result).__await__()

    async def _wait(self, is_ready: Callable[[], bool], take: Callable[[], T]) -> T:
        """What `take` returns as soon as `is_ready`. A cancelled task aborts the request."""
        inbox = self._inbox
        while True:
            with inbox.changed:
                if is_ready():
                    return take()
                change = inbox.next_change()
            try:
                await change
            except asyncio.CancelledError:
                self.abort()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()


class Inbox:
    """The unread outputs of one request, and how it ended. The engine's thread puts outputs and
    readers take them; `changed` guards every field."""

    def __init__(self, max_unread: float) -> None:
        self.changed = threading.Condition()
        self.max_unread = max_unread
        self.unread: deque[TokenOutput] = deque()
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self._waiting: list[Change] = []  # of asyncio readers

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether a reader can go on without waiting."""
        return bool(self.unread) or self.ended

    def put(self, output: TokenOutput, waiting: "list[Change]") -> bool:
        """Add an output; return False if more than `max_unread` are unread now. The futures of its
        asyncio readers are added to `waiting`, for :func:`wake`."""
        with self.changed:
            self.unread.append(output)
            self.completion = output.completion
            self.changed.notify_all()
            waiting += self._waiting
            self._waiting.clear()
            return len(self.unread) <= self.max_unread

    def end(self, outcome: Completion | BaseException) -> None:
        """End without another output."""
        with self.changed:
            if isinstance(outcome, BaseException):
                self.error = outcome
            else:
                self.completion = outcome
            self.changed.notify_all()
            wake(self._waiting)
            self._waiting.clear()

    def pop(self, stop: type[Exception]) -> TokenOutput:
        """The next output; after the last one, raise `stop` or the error that ended the service."""
        if self.unread:
            return self.unread.popleft()
        raise self.error or stop

    def next_change(self) -> Change:
        """A future of the running loop that is set at the next change."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        return change


def wake(waiting: Iterable[Change]) -> None:
    """Set all futures, from any thread. Each event loop is called once: every call lets another
    thread take the interpreter, which gives it back some milliseconds later."""
    by_loop = dict[asyncio.AbstractEventLoop, list[Change]]()
    for change in waiting:
        by_loop.setdefault(change.get_loop(), []).append(change)
    for loop, changes in by_loop.items():
        with suppress(RuntimeError):  # it was closed
            loop.call_soon_threadsafe(_set_all, changes)


def _set_all(changes: Iterable[Change]) -> None:
    for change in changes:
        if not change.done():
            change.set_result(None)

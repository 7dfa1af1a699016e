"""Ticket: what the submitter of a request holds, and the inbox that its outputs come through."""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from mlx_paged.outputs import Completion, TokenOutput


class Ticket:
    """What the submitter of a request holds: its tokens as they come, and its end.

    Iterate over it, with ``for`` in a thread or ``async for`` in a task; a loop that was left may
    be taken up again. Leaving it as a context manager, cancelling a task that waits for it, or
    dropping the last reference aborts the request. Methods may be called from any thread.
    """

    def __init__(self, request_id: int, inbox: "Inbox", abort: Callable[[int], object]) -> None:
        self.request_id = request_id
        self._inbox = inbox
        self._abort = abort

    @property
    def done(self) -> bool:
        """Whether the request has ended; outputs may still wait to be read."""
        return self._inbox.ended

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the end; outputs that were not read stay to be read, from now on any number.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: the request goes on.
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
        """End the request after the step under way, with ``FinishReason.ABORT``; never waits."""
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
        while True:
            with inbox.changed:
                if inbox.ready:
                    return inbox.pop(StopAsyncIteration)
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
    """Outputs of one request that wait for their reader, and how it ended.

    The engine's thread puts, readers take; every field is guarded by `changed`.
    """

    def __init__(self, max_unread: float) -> None:
        self.changed = threading.Condition()
        self.max_unread = max_unread
        self.unread: deque[TokenOutput] = deque()
        self.completion: Completion | None = None
        self.error: BaseException | None = None
        self._tasks: list[asyncio.Future[None]] = []  # of asyncio readers, set at the next change

    @property
    def ended(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def ready(self) -> bool:
        """Whether a reader need not wait."""
        return bool(self.unread) or self.ended

    def put(self, output: TokenOutput) -> bool:
        """Add an output; False if more than `max_unread` wait now."""
        with self.changed:
            self.unread.append(output)
            self.completion = output.completion
            self._notify()
            return len(self.unread) <= self.max_unread

    def end(self, outcome: Completion | BaseException) -> None:
        """No output follows."""
        with self.changed:
            if isinstance(outcome, BaseException):
                self.error = outcome
            else:
                self.completion = outcome
            self._notify()

    def pop(self, stop: type[Exception]) -> TokenOutput:
        """The next output; after the last one `stop` is raised, or what ended the service."""
        if self.unread:
            return self.unread.popleft()
        raise self.error or stop

    def next_change(self) -> asyncio.Future[None]:
        """A future of the running loop, set as soon as anything changes."""
        change = asyncio.get_running_loop().create_future()
        self._tasks.append(change)
        return change

    def _notify(self) -> None:
        self.changed.notify_all()
        for task in self._tasks:
            with suppress(RuntimeError):  # its loop was closed
                task.get_loop().call_soon_threadsafe(_wake, task)
        self._tasks.clear()


def _wake(task: asyncio.Future[None]) -> None:
    if not task.done():
        task.set_result(None)

"""The completions of one request on their way: some are in the engine, the others wait here."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress

from mlx_paged.engine.ticket import Ticket
from mlx_paged.outputs import TokenOutput
from mlx_paged.protocol.request_body import Refusal

MAX_UNREAD = 1 << 16  # outputs of all requests: some 180 MB with 20 log-probabilities each

Submit = Callable[[int, int], Awaitable[list[Ticket]]]
"""Adds the prompts from a first one up to another one; returns the tickets of all their samples."""


class Tickets:
    """Submits the prompts of a request in their order, and no more at a time than have places. So
    requests of others come between them.

    Args:
        submit: see there.
        num_prompts: of the request.
        num_samples: of each prompt.
        places: completions that may be in the engine at a time, at least `num_samples`.
    """

    def __init__(self, submit: Submit, num_prompts: int, num_samples: int, places: int) -> None:
        self._submit = submit
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self._free = places
        self._next = 0  # the first prompt that is not submitted
        self._open: dict[int, Ticket] = {}  # by the index of the completion
        self._readers: dict[int, AsyncGenerator[TokenOutput]] = {}

    async def begin(self) -> None:
        """Submit the first prompts. Raises what `submit` raises."""
        await self._fill()

    def abort(self, index: int) -> None:
        """End a completion. Its last output still comes."""
        self._open[index].abort()

    def close(self) -> None:
        """End all completions."""
        for ticket in self._open.values():
            ticket.abort()

    @property
    def num_unread(self) -> int:
        """Outputs of the engine that nobody has read."""
        return sum(ticket.num_unread for ticket in self._open.values())

    async def outputs(self) -> AsyncGenerator[tuple[int, TokenOutput]]:
        """The outputs of all completions as they come, each with the completion's index."""
        if self._next == self._num_prompts and len(self._readers) == 1:
            async for output in self._readers[0]:
                yield 0, output
            return
        waiting: dict[asyncio.Future[TokenOutput], int] = {}
        try:
            while True:
                for index in self._readers.keys() - set(waiting.values()):
                    waiting[asyncio.ensure_future(anext(self._readers[index]))] = index
                if not waiting:
                    return
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    with suppress(StopAsyncIteration):
                        yield index, task.result()
                        continue
                    del self._open[index], self._readers[index]
                    self._free += 1
                await self._fill()
        finally:
            for task in waiting:
                task.cancel()

    async def _fill(self) -> None:
        """Submit as many prompts as have places."""
        first = self._next
        last = min(first + self._free // self._num_samples, self._num_prompts)
        if first == last:
            return
        tickets = await self._submit(first, last)
        self._next = last
        self._free -= len(tickets)
        for index, ticket in enumerate(tickets, first * self._num_samples):
            self._open[index] = ticket
            self._readers[index] = _to_the_end(ticket)


def end_unread(requests: Collection[Tickets]) -> None:
    """End the request with most unread outputs if all have too many together: its client reads too
    slowly. The server calls this every second."""
    unread = {request: request.num_unread for request in requests}
    if sum(unread.values()) > MAX_UNREAD:
        max(unread, key=unread.__getitem__).close()


async def _to_the_end(ticket: Ticket) -> AsyncGenerator[TokenOutput]:
    """A ticket's outputs. The last one has the completion, also after an abort."""
    completion = None
    try:
        async for output in ticket:
            completion = output.completion
            yield output
        if completion is None:
            yield TokenOutput.last(ticket.result())
    except Exception as error:  # the error that ended the service
        status = 503 if isinstance(error, ConnectionError) else 500  # another rank has gone
        raise Refusal(status, f"the engine failed: {error}") from error

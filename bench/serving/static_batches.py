"""Any engine without top-up: a batch runs to its end before the next one begins."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from bench.serving.servers import Counters, Level, Server, Token
from bench.serving.trace import Job


class StaticBatches:
    """Requests wait in the harness until all of the last batch have ended.

    Args:
        batch_size: sequences in a batch at most; a job's samples stay together.
    """

    def __init__(self, server: Server, batch_size: int) -> None:
        self._server = server
        self._batch_size = batch_size
        self._queue: deque[tuple[Job, Sequence[int]]] = deque()

    @property
    def pool_bytes(self) -> int | None:
        return self._server.pool_bytes

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._server.has_work

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        self._queue.append((job, streams))

    def step(self) -> list[Token]:
        if not self._server.has_work:
            self._begin_batch()
        return self._server.step()

    def level(self) -> Level:
        level = self._server.level()
        queued = sum(len(streams) for _, streams in self._queue)
        return replace(level, waiting=level.waiting + queued)

    def counters(self) -> Counters:
        return self._server.counters()

    def causes(self, step: int) -> tuple[str, ...]:
        return self._server.causes(step)

    def _begin_batch(self) -> None:
        room = self._batch_size
        while self._queue and (len(self._queue[0][1]) <= room or room == self._batch_size):
            job, streams = self._queue.popleft()
            self._server.submit(job, streams)
            room -= len(streams)

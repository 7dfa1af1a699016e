"""Who sends the next request: a schedule, or the end of another one."""

from collections import deque
from typing import Protocol

from bench.serving.trace import Job, Trace


class Source(Protocol):
    """Hands out the jobs of a trace."""

    @property
    def is_empty(self) -> bool: ...

    def due(self, now_s: float) -> list[tuple[float, Job]]:
        """Jobs to submit now, each with the time from which its latencies count."""

    def next_s(self) -> float:
        """When the next job is due, if nothing else happens."""

    def completed(self) -> None:
        """A job has ended."""


class OpenLoop:
    """Jobs are due at their times, whether or not the engine keeps up.

    Latencies count from the scheduled time: an engine that is busy when a request is due does not
    get the delay for free (no coordinated omission).
    """

    def __init__(self, trace: Trace) -> None:
        self._jobs = deque(trace)

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    def due(self, now_s: float) -> list[tuple[float, Job]]:
        jobs = []
        while self._jobs and self._jobs[0].arrival_s <= now_s:
            job = self._jobs.popleft()
            jobs.append((job.arrival_s, job))
        return jobs

    def next_s(self) -> float:
        return self._jobs[0].arrival_s

    def completed(self) -> None:
        pass


class ClosedLoop:
    """So many clients, each of which sends its next job when its last one has ended."""

    def __init__(self, trace: Trace, clients: int) -> None:
        self._jobs = deque(trace)
        self._idle = clients

    @property
    def is_empty(self) -> bool:
        return not self._jobs

    def due(self, now_s: float) -> list[tuple[float, Job]]:
        count = min(self._idle, len(self._jobs))
        self._idle -= count
        return [(now_s, self._jobs.popleft()) for _ in range(count)]

    def next_s(self) -> float:
        return 0.0

    def completed(self) -> None:
        self._idle += 1

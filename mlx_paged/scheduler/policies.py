"""Who is admitted next: waiting requests in the order of a policy. Knows no mlx."""

import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Never

from mlx_paged.request import Request


class Policy(StrEnum):
    """In which order waiting requests are admitted."""

    FCFS = "fcfs"  # first come, first served
    PRIORITY = "priority"  # lower numbers first, then as they came
    SHORTEST = "shortest"  # shorter prompts first, less what they gained by waiting

    @classmethod
    def _missing_(cls, value: object) -> Never:
        expected = ", ".join(cls)
        raise ValueError(f"[WaitingQueue] policy is {value!r}: expected one of {expected}")


class _Entry(NamedTuple):
    key: tuple[float, ...]  # least first
    serial: int  # of the push; tells a live entry from one that was removed
    request: Request


class WaitingQueue:
    """Waiting requests, next one first.

    Preempted requests come before those of their class that never ran, oldest first: before all
    others, under `Policy.PRIORITY` before others of the same priority. They hold a promise, and
    tokens that somebody may already have read.

    Under `Policy.SHORTEST` a prompt gets shorter by `ageing` tokens for every second it waits, so
    one of n tokens is overtaken only by requests that come less than n / ageing seconds after it.
    All waiting requests age at the same rate: the order of ``num_tokens - ageing * waited`` is at
    any time that of ``num_tokens + ageing * arrival_time``, which never changes, so a heap will do.

    A request's place is settled when it is pushed; to change its priority, remove it and push it
    again. Removal leaves the heap's entry behind until it comes up or until such entries are the
    majority. Peeking is O(1), the rest O(log n) amortised.

    Args:
        policy: which comes first.
        ageing: tokens per second, >= 0, for `Policy.SHORTEST`. At 0 a long prompt may wait forever.

    Raises:
        ValueError: unknown policy or bad ageing.
    """

    def __init__(self, policy: Policy = Policy.FCFS, ageing: float = 1000.0) -> None:
        if not 0 <= ageing < math.inf:
            raise ValueError(f"[WaitingQueue] ageing is {ageing}: expected a finite number >= 0")
        self.policy = Policy(policy)
        self.ageing = ageing
        self._heap: list[_Entry] = []  # its first entry is live
        self._live: dict[int, int] = {}  # request id -> serial of its entry
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._live

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in the order of admission. Sorts: not for every step."""
        return (entry.request for entry in sorted(filter(self._is_live, self._heap)))

    def push(self, request: Request) -> None:
        """Queue a request: a new one or one that was preempted.

        Raises:
            ValueError: it waits already.
        """
        if request in self:
            raise ValueError(
                f"[WaitingQueue] request is {request.id}, which waits already: "
                "expected one that does not"
            )
        self._num_pushed += 1
        self._live[request.id] = self._num_pushed
        heappush(self._heap, _Entry(self._key(request), self._num_pushed, request))

    def peek(self) -> Request:
        """The request to admit next.

        Raises:
            IndexError: nobody waits.
        """
        return self._heap[0].request

    def pop(self) -> Request:
        """Take out the request to admit next.

        Raises:
            IndexError: nobody waits.
        """
        request = heappop(self._heap).request
        del self._live[request.id]
        self._drop_removed()
        return request

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands.

        Raises:
            ValueError: it does not wait.
        """
        if self._live.pop(request.id, None) is None:
            raise ValueError(
                f"[WaitingQueue] request is {request.id}, which does not wait: "
                "expected one that does"
            )
        self._drop_removed()

    def _key(self, request: Request) -> tuple[float, ...]:
        ran = -(request.num_preempted > 0)
        if self.policy is Policy.PRIORITY:
            return (request.priority, ran, request.id)
        if self.policy is Policy.SHORTEST and not ran:
            aged = request.num_tokens + self.ageing * request.arrival_time
            return (ran, aged, request.id)
        return (ran, 0, request.id)

    def _is_live(self, entry: _Entry) -> bool:
        return self._live.get(entry.request.id) == entry.serial

    def _drop_removed(self) -> None:
        """Rid the heap of removed entries on top, and of all of them once most are."""
        if len(self._heap) > 2 * len(self._live):
            self._heap = list(filter(self._is_live, self._heap))
            heapify(self._heap)
        while self._heap and not self._is_live(self._heap[0]):
            heappop(self._heap)


class PreemptionPolicy(StrEnum):
    """Which running request is preempted; it is computed again later, with the same outcome."""

    NEWEST = "newest"  # the last to arrive: the fewest steps are repeated, nobody starves
    LONGEST = "longest"  # the most tokens in the pool: the fewest preemptions
    FEWEST_GENERATED = "fewest-generated"  # the least visible progress is held up


_RANK: dict[PreemptionPolicy, Callable[[Request], int]] = {
    PreemptionPolicy.NEWEST: lambda request: 0,
    PreemptionPolicy.LONGEST: lambda request: request.num_computed,
    PreemptionPolicy.FEWEST_GENERATED: lambda request: -request.num_generated,
}


def choose_preempted(candidates: list[Request], policy: PreemptionPolicy) -> Request:
    """The one to preempt: lowest priority first, then by policy, then the newest."""
    rank = _RANK[policy]
    return max(candidates, key=lambda request: (request.priority, rank(request), request.id))

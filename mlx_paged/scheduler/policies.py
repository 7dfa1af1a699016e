"""Which waiting request is admitted next, and which running one is preempted. Knows no mlx."""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import Request

AGEING = 1000.0
"""Tokens per second, for `Policy.SHORTEST`. Without it a long prompt might wait forever."""


class _Entry(NamedTuple):
    key: tuple[float, ...]  # smallest first
    serial: int  # number of the push; a removed entry has an old one
    request: Request


class WaitingQueue:
    """Waiting requests in the order of a policy.

    Preempted requests come first, oldest first; under `Policy.PRIORITY` they come first among those
    of the same priority. The caller may already have read some of their tokens.

    Under `Policy.SHORTEST` a prompt's length counts as `AGEING` tokens less for each second that it
    waits. Only requests that arrive less than n / AGEING seconds later can overtake a prompt of n
    tokens. All waiting requests age at the same rate, so ``num_tokens + AGEING * arrival_time``,
    which never changes, gives the same order as ``num_tokens - AGEING * waited``.

    The order is fixed when a request is pushed; to change its priority, remove it and push it
    again. A removed entry stays in a heap until it is on top, or until most entries are removed
    ones. `peek` and `shortest` are O(1), the other methods O(log n) amortised.
    """

    def __init__(self, policy: Policy = Policy.FCFS) -> None:
        self.policy = Policy(policy)
        self._heap: list[_Entry] = []  # its first entry is live
        self._by_length: list[_Entry] = []  # so is the first one of this heap
        self.serials: dict[int, int] = {}  # of the waiting requests' entries, by request id
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self.serials)

    def __contains__(self, request: Request) -> bool:
        return request.id in self.serials

    def __iter__(self) -> Iterator[Request]:
        """Waiting requests in the order of admission. Sorts them: too slow for each step."""
        return (entry.request for entry in sorted(filter(self._is_live, self._heap)))

    def push(self, request: Request) -> None:
        """Add a new or preempted request, which does not wait yet."""
        assert request not in self, f"request {request.id} waits already"
        self._num_pushed += 1
        self.serials[request.id] = self._num_pushed
        heappush(self._heap, _Entry(self._key(request), self._num_pushed, request))
        priority = request.priority if self.policy is Policy.PRIORITY else 0
        key = (priority, request.num_pending, request.id)
        heappush(self._by_length, _Entry(key, self._num_pushed, request))

    def peek(self) -> Request:
        """The request to admit next; IndexError if none waits."""
        return self._heap[0].request

    def shortest(self) -> Request:
        """The one with the fewest tokens to compute of those that :meth:`peek` may choose from: a
        preempted request, a higher priority and the order of `Policy.SHORTEST` still come first."""
        head = self.peek()
        is_next = head.num_preempted or self.policy is Policy.SHORTEST
        return head if is_next else self._by_length[0].request

    def remove(self, request: Request) -> None:
        assert request in self, f"request {request.id} does not wait"
        del self.serials[request.id]
        self._drop_removed()

    def _key(self, request: Request) -> tuple[float, ...]:
        ran = -(request.num_preempted > 0)
        if self.policy is Policy.PRIORITY:
            return (request.priority, ran, request.id)
        if self.policy is Policy.SHORTEST and not ran:
            aged = request.num_tokens + AGEING * request.arrival_time
            return (ran, aged, request.id)
        return (ran, 0, request.id)

    def _is_live(self, entry: _Entry) -> bool:
        return self.serials.get(entry.request.id) == entry.serial

    def _drop_removed(self) -> None:
        """Drop removed entries on top of the heaps, and all of them once they are the majority."""
        for heap in (self._heap, self._by_length):
            if len(heap) > 2 * len(self.serials):
                heap[:] = filter(self._is_live, heap)
                heapify(heap)
            while heap and not self._is_live(heap[0]):
                heappop(heap)


_PREFERENCE: dict[PreemptionPolicy, Callable[[Request], int]] = {
    PreemptionPolicy.NEWEST: lambda request: 0,
    PreemptionPolicy.LONGEST: lambda request: request.num_computed,
    PreemptionPolicy.FEWEST_GENERATED: lambda request: -request.num_generated,
}


def choose_preempted(
    candidates: Iterable[Request],
    policy: PreemptionPolicy,
    held: Callable[[Request], int] = lambda request: 0,
) -> Request:
    """The request to preempt: of the background first, then the largest priority number, the most
    tokens that its client holds, the policy, and the newest. `held` is what clients hold."""
    preference = _PREFERENCE[policy]

    def order(request: Request) -> tuple[bool, float, int, int, int]:
        of_client = held(request)
        return request.is_background, request.priority, of_client, preference(request), request.id

    return max(candidates, key=order)

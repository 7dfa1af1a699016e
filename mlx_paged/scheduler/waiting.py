"""Who waits, and whose place a waiting request may take. Knows no mlx."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import Request
from mlx_paged.scheduler.policies import WaitingQueue, choose_preempted
from mlx_paged.scheduler.shares import FairQueue, client_of
from mlx_paged.scheduler.step import Span

BACKGROUND_SECONDS = 10.0
"""If no request of the background was computed for so long, the oldest one of them counts as if it
were not of the background, until it ends or is preempted."""

Order = tuple[int, int]
"""Where a prompt comes among those that run, smallest first: FIRST, OTHERS or LAST, then how many
requests of its client wait."""

FIRST, OTHERS, LAST = range(3)
"""The only running prompt of a client beside other clients; other prompts; background prompts."""


class Waiting:
    """The waiting requests in the order of a policy, those of the background after all others.

    A request of the background runs when nothing else waits: it gives its place and its blocks to
    any other that waits, and its prompt is computed with what the others leave of a step. One of
    them at a time is promoted, see :data:`BACKGROUND_SECONDS`: it comes before all that wait.

    Under `Policy.FAIR` a client that runs nothing may take the place and the blocks of a client of
    which several run, and its first prompt is computed before the others.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self.policy = Policy(policy)
        self.ids: set[int] = set()
        self._fair = FairQueue() if self.policy is Policy.FAIR else None
        self._others = WaitingQueue(self.policy) if self._fair is None else self._fair
        self._background = WaitingQueue()
        self._num_background = 0  # requests of it that run
        self._promoted: Request | None = None
        self._clock = clock
        self._computed_at = 0.0  # when one of the background was computed, or began to wait

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, request: Request) -> bool:
        return request.id in self.ids

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests. Too slow to be called in each step."""
        yield from self._others
        yield from self._background

    def push(self, request: Request) -> None:
        """Add a new or preempted request, which does not wait yet."""
        if request.is_background and not (self._background or self._num_background):
            self._computed_at = self._clock()
        self._queue_of(request).push(request)
        self.ids.add(request.id)

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        self._queue_of(request).remove(request)
        self.ids.remove(request.id)

    def peek(self) -> Request:
        """The request to admit next; IndexError if none waits."""
        promoted = self._promoted
        if promoted is not None and promoted in self._background:
            return promoted
        return (self._others or self._background).peek()

    def shortest(self) -> Request:
        """Of the requests that :meth:`peek` may choose from, the one with the fewest tokens to
        compute."""
        first = self.peek()
        return first if first is self._promoted else self._queue_of(first).shortest()

    def started(self, request: Request) -> None:
        """A request runs from now on."""
        self._num_background += request.is_background
        if self._fair is not None and not request.is_background:
            self._fair.started(request)

    def stopped(self, request: Request) -> None:
        """A request does not run any more."""
        if request.is_background:
            self._num_background -= 1
            self._computed_at = self._clock()
            if request is self._promoted:
                self._promoted = None
        elif self._fair is not None:
            self._fair.stopped(request)

    def ended(self, request: Request) -> None:
        """A request has ended."""
        if request is self._promoted:
            self._promoted = None

    # The step

    def charge(self, running: Iterable[Request]) -> None:
        """Count the tokens of running requests for their clients, before :meth:`peek` is asked."""
        if self._fair is not None and self._fair.has_several:
            self._fair.charge(each for each in running if not each.is_background)

    def promote(self, planned: Iterable[Span], prompts: Sequence[Request]) -> None:
        """Promote the oldest request of the background if none was computed for long. `planned` is
        what the step computes, `prompts` are those that run."""
        if not (self._background or self._num_background):
            return
        now = self._clock()
        if any(span.request.is_background for span in planned):
            self._computed_at = now
        if self._promoted is None and now - self._computed_at >= BACKGROUND_SECONDS:
            running = [request for request in prompts if request.is_background]
            self._promoted = running[0] if running else self._background.peek()

    def in_order(self, prompts: list[Request]) -> list[Request]:
        """The prompts of running requests in the order in which the step computes them."""
        if self._num_background or (self._fair is not None and self._fair.has_several):
            return sorted(prompts, key=self.order_of)
        return prompts

    def order_of(self, request: Request) -> Order:
        """The place of a prompt among those that run."""
        if self.is_last(request):
            return LAST, 0
        if self._fair is None or request.is_background or not self._fair.has_several:
            return OTHERS, 0
        has_others, num_waiting = self._fair.demand(request)
        return (OTHERS, 0) if has_others else (FIRST, num_waiting)

    def is_first(self, request: Request) -> bool:
        """Whether it is computed before the prompts of other clients."""
        return self.order_of(request)[0] == FIRST

    def is_last(self, request: Request) -> bool:
        """Whether it is computed after all that wait."""
        return request.is_background and request is not self._promoted

    def claimant(self) -> Request | None:
        """A waiting request that may take the place of some that run; see :meth:`victim_of`."""
        newcomer = None if self._fair is None else self._fair.newcomer()
        if newcomer is None and self._num_background and self._others:
            return self._others.peek()
        return newcomer

    def yielding(self, request: Request, running: Collection[Request]) -> list[Request]:
        """The running requests whose places and blocks `request`, a claimant, may take."""
        found: list[Request] = []
        if self._num_background:
            found += [r for r in running if r.is_background and r is not self._promoted]
        if self._fair is not None and self._fair.is_crowded and request is self._fair.newcomer():
            found += _beside_the_oldest(running)
        return found

    def choose_preempted(
        self, candidates: Collection[Request], running: Collection[Request], by: PreemptionPolicy
    ) -> Request:
        """Which of the `candidates` among the running requests is preempted. Under `Policy.FAIR` no
        client loses its last running request while another client has several."""
        if self._fair is None:
            return choose_preempted(candidates, by)
        others = {request.id for request in _beside_the_oldest(running)}
        some = [r for r in candidates if r.id in others or r.is_background]
        held = Counter[str]()
        for request in running:
            held[client_of(request)] += request.num_computed
        return choose_preempted(some or candidates, by, lambda r: held[client_of(r)])

    def _queue_of(self, request: Request) -> WaitingQueue | FairQueue:
        return self._background if request.is_background else self._others


def _beside_the_oldest(running: Iterable[Request]) -> list[Request]:
    """The running requests of each client without its oldest one; none of the background."""
    by_client: dict[str, list[Request]] = {}
    for request in running:
        if not request.is_background:
            by_client.setdefault(client_of(request), []).append(request)
    return [each for own in by_client.values() for each in sorted(own, key=lambda r: r.id)[1:]]

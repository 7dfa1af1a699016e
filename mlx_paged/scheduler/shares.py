"""Turns of several clients: whose waiting request comes next. Knows no mlx."""

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from mlx_paged.options import Policy
from mlx_paged.request import Request
from mlx_paged.scheduler.policies import WaitingQueue


class _Part:
    """A client with waiting requests, or a part of one. It exists while requests of it wait.

    Attributes:
        served: tokens computed for it since it began to wait, more than `clock` of its whole then.
        clock: tokens that each waiting part would have got so far in equal turns. A new part
            begins here: it owes nothing, and is owed nothing.
    """

    __slots__ = ("clock", "name", "num_waiting", "parts", "queue", "served", "turns")

    def __init__(self, name: str, served: float) -> None:
        self.name = name
        self.served, self.clock = served, 0.0
        self.num_waiting = 0
        self.parts: dict[str, _Part] = {}
        self.turns = _Turns()  # of the parts
        self.queue = WaitingQueue()  # of a part without parts

    def next(self) -> WaitingQueue:
        """The queue whose turn it is: that of the part with the fewest tokens."""
        part: _Part | None = self
        while part is not None:
            if part.queue:
                return part.queue
            part = part.turns.first(part.parts)
        raise IndexError("no request waits")


class _Turns:
    """Parts by their tokens, fewest first. Tokens only grow, so an entry is corrected when it is on
    top: O(log n) amortised."""

    __slots__ = ("_heap", "_num_pushed")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Part]] = []
        self._num_pushed = 0

    def push(self, part: _Part, alive: dict[str, _Part]) -> None:
        """Add one of the parts that are `alive`. Other entries go once they are the majority."""
        self._num_pushed += 1
        heappush(self._heap, (part.served, self._num_pushed, part))
        if len(self._heap) > 2 * len(alive) + 8:
            last = {part: serial for _, serial, part in sorted(self._heap)}
            self._heap = [(each.served, last[each], each) for each in alive.values()]
            heapify(self._heap)

    def first(self, alive: dict[str, _Part]) -> _Part | None:
        """The part of those `alive` that has the fewest tokens."""
        heap = self._heap
        while heap:
            tokens, serial, part = heap[0]
            if alive.get(part.name) is not part:
                heappop(heap)
            elif tokens < part.served:
                heapreplace(heap, (part.served, serial, part))
            else:
                return part
        return None


class FairQueue:
    """Waiting requests of several clients, in turns by tokens computed.

    A request's `share` names its client, then parts of this client: parts take turns within their
    whole. The one with the fewest tokens comes next, requests of one part in the order of arrival
    (virtual token counters; Sheng et al. 2024, arXiv:2401.00588, section 4, here of a tree). A
    client that runs nothing comes before all that run something. Preempted requests come before
    new ones, oldest first. All methods are O(log n) amortised.
    """

    policy = Policy.FAIR

    def __init__(self) -> None:
        self._whole = _Part("", 0.0)
        self._returning = WaitingQueue()  # preempted requests
        self._idle = _Turns()  # clients that wait and run nothing
        self._idle_clients: dict[str, _Part] = {}
        self._num_running = Counter[str]()  # by client; preempted requests count
        self._num_crowded = 0  # clients of which several run

    def __len__(self) -> int:
        return self._whole.num_waiting + len(self._returning)

    def __contains__(self, request: Request) -> bool:
        return request in self._returning or any(
            request in part.queue for part in self._path(request)[-1:]
        )

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, those of each part together. Too slow to be called in each step."""
        yield from self._returning
        parts = [self._whole]
        while parts:
            part = parts.pop()
            yield from part.queue
            parts += part.parts.values()

    @property
    def is_crowded(self) -> bool:
        """Whether several requests of a client run."""
        return self._num_crowded > 0

    @property
    def has_several(self) -> bool:
        """Whether requests of more than one client wait or run."""
        running, waiting = self._num_running, self._whole.parts
        return len(running) + sum(name not in running for name in islice(waiting, 2)) > 1

    def push(self, request: Request) -> None:
        assert request not in self, f"request {request.id} waits already"
        client = client_of(request)
        if request.num_preempted:
            self._returning.push(request)
            self._count(client, 1)
            return
        part = self._whole
        part.num_waiting += 1
        for name in _names(request):
            known = part.parts.get(name)
            if known is None:
                known = part.parts[name] = _Part(name, part.clock)
                part.turns.push(known, part.parts)
                if part is self._whole and not self._num_running[client]:
                    self._set_idle(known)
            part = known
            part.num_waiting += 1
        part.queue.push(request)

    def remove(self, request: Request) -> None:
        if request in self._returning:
            self._returning.remove(request)
            self._count(client_of(request), -1)
            return
        whole, *path = self._whole, *self._path(request)
        assert path and request in path[-1].queue, f"request {request.id} does not wait"
        path[-1].queue.remove(request)
        whole.num_waiting -= 1
        for part in path:
            part.num_waiting -= 1
            if not part.num_waiting:
                del whole.parts[part.name]
                break
            whole = part
        if not path[0].num_waiting:
            self._idle_clients.pop(path[0].name, None)

    def peek(self) -> Request:
        return self._next().peek()

    def shortest(self) -> Request:
        """The one with the fewest tokens to compute of the part whose turn it is."""
        return self._next().shortest()

    def newcomer(self) -> Request | None:
        """The next request of clients that run nothing, if there is another client."""
        if not self._idle_clients or not self.has_several:
            return None
        part = self._idle.first(self._idle_clients)
        return None if part is None else part.next().peek()

    def started(self, request: Request) -> None:
        """A request runs from now on."""
        self._count(client_of(request), 1)
        self.charge([request])

    def stopped(self, request: Request) -> None:
        """A request does not run any more."""
        self.charge([request])
        self._count(client_of(request), -1)

    def charge(self, requests: Iterable[Request]) -> None:
        """Count the tokens of running requests that were not counted yet: those of a prompt when it
        starts, unless they were cached, and then each token that was chosen."""
        for request in requests:
            tokens = request.num_tokens - request.num_cached - request.num_charged
            if tokens <= 0:
                continue
            request.num_charged += tokens
            part: _Part | None = self._whole
            for name in _names(request):
                if part is None or not part.parts:
                    break
                part.clock += tokens / len(part.parts)
                part = part.parts.get(name)
                if part is not None:
                    part.served += tokens

    def demand(self, request: Request) -> tuple[bool, int]:
        """Whether several requests of the prompt's client run; if not, how many of the client wait,
        else 0. A prompt with a smaller result comes first."""
        client = client_of(request)
        if self._num_running[client] > 1:
            return True, 0
        part = self._whole.parts.get(client)
        return False, part.num_waiting if part else 0

    def _next(self) -> WaitingQueue:
        if self._returning:
            return self._returning
        part = self._idle.first(self._idle_clients) if self._idle_clients else None
        return (part or self._whole).next()

    def _path(self, request: Request) -> list[_Part]:
        """The parts of a request, as far as they exist."""
        part, path = self._whole, []
        for name in _names(request):
            found = part.parts.get(name)
            if found is None:
                return []
            path.append(found)
            part = found
        return path

    def _count(self, client: str, change: int) -> None:
        before = self._num_running[client]
        after = before + change
        self._num_crowded += (after > 1) - (before > 1)
        self._num_running[client] = after
        part = self._whole.parts.get(client)
        if after and part is not None:
            self._idle_clients.pop(client, None)
        elif not after:
            del self._num_running[client]
            if part is not None:
                self._set_idle(part)

    def _set_idle(self, part: _Part) -> None:
        self._idle_clients[part.name] = part
        self._idle.push(part, self._idle_clients)


def _names(request: Request) -> tuple[str, ...]:
    """The names of the parts that a request belongs to, from its client on. The last part has the
    name "" and no parts."""
    return *request.share, ""


def client_of(request: Request) -> str:
    """The name of the client that a request belongs to."""
    return request.share[0] if request.share else ""

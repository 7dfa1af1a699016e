"""Which prompts overtake a long one, and how they share a step. Knows no mlx."""

from mlx_paged.options import Policy
from mlx_paged.request import Request
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.waiting import Waiting

PATIENCE = 32
"""A long prompt is overdue when its `num_overtaken` has reached this number."""

SHARE = 64
"""The most tokens of a step that a long prompt computes beside prompts that overtake it, unless the
long prompt is overdue."""

KEPT = 16
"""For the first prompt of a client under `Policy.FAIR`: a step in which others overtake it adds
KEPT to its `num_overtaken`, any other step takes 1 away, and nobody overtakes it above KEPT. So
others overtake it in up to two steps, and then in one of KEPT."""


def is_overtaken(request: Request, room: int) -> bool:
    """Whether others may be computed before the prompt of `request`, of which a step could compute
    `room` tokens: only if the prompt takes several steps. Nobody overtakes a preempted request,
    whose caller may have read some of its tokens."""
    return 0 < room < request.num_pending and not request.num_preempted


class Turn:
    """Divides the prompt tokens of a step between a long prompt and prompts that overtake it.

    The long prompt is `first`. Another prompt overtakes `first` if less than half as many of its
    tokens are left. The prompt with the fewest tokens left comes first. Prompts that overtake may
    take all of the room. Until these prompts have their first tokens, `first` gets at most `SHARE`
    tokens of a step, so that the steps stay short. This costs `first` little time, because `first`
    goes on right after these prompts. If `first` is overtaken too often, `first` is overdue and
    gets at least half of every step; the first prompt of a client gets all of it, see KEPT.
    """

    def __init__(
        self,
        # The step, which has its decodes, and the prompts before `first` that the step completes.
        planning: Planning,
        first: Request,  # the oldest prompt that runs, or else the first one that waits
        room: int,  # prompt tokens of `first` that the step can compute
        waiting: Waiting,
        before: list[Request],  # those that overtook in the step before
    ) -> None:
        self.overtaking: list[Request] = []  # those that :meth:`next` returned
        self._is_kept = waiting.is_first(first)
        self._is_overdue = first.num_overtaken >= PATIENCE and not self._is_kept
        self._planned = planning.work.chunk_tokens  # before any prompt overtakes
        # The most prompt tokens of the step before those of `first` are added.
        self.limit = self._planned + (room // 2 if self._is_overdue else room)
        self._planning = planning
        self._first = first
        self._room = room
        self._waiting = waiting
        self._by_priority = waiting.policy is Policy.PRIORITY
        self._is_awaited = any(r.num_in_flight and len(r.tokens) == r.num_prompt for r in before)
        planned = planning.requests
        left = [r for r in planning.prompts if r.id not in planned and self._overtakes(r)]
        self._running = sorted(left, key=lambda request: -request.num_pending)

    def next(self) -> Request | None:
        """The shortest prompt that overtakes `first`; None: no other one does. If the prompt waits,
        the caller admits it before the next call."""
        found = self._waiting.shortest() if self._waiting else self._first
        if self._running and self._running[-1].num_pending <= found.num_pending:
            found = self._running.pop()
        elif not self._overtakes(found):
            return None
        self.overtaking.append(found)
        return found

    def limit_after(self) -> int:
        """The most prompt tokens of the step, once all prompts that overtake `first` were added.
        Counts in `num_overtaken` whether there were any, so it is called once."""
        first, taken = self._first, self._planning.work.chunk_tokens
        if taken == self._planned and not self._is_awaited:
            first.num_overtaken = max(0, first.num_overtaken - 1)
        elif not self._is_overdue:
            first.num_overtaken += KEPT if self._is_kept else 1
            return min(self._planned + self._room, taken + SHARE)
        return self._planned + self._room

    def _overtakes(self, request: Request) -> bool:
        """Whether a prompt may be computed before `first`."""
        if self._by_priority and request.priority > self._first.priority:
            return False
        if self._waiting.is_last(request) and not self._waiting.is_last(self._first):
            return False
        if self._is_kept and self._first.num_overtaken > KEPT:
            return False
        return 2 * request.num_pending < self._first.num_pending

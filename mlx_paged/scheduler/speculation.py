"""Which requests get drafts, how many, and which of these are right. Knows no mlx."""

from typing import Protocol

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.cost_model import TOKENS_GROWTH
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span, StepReport, StepWork

MIN_GAIN = 1.03  # tokens per second that drafts must promise, relative to a step without drafts
TRIAL = 8  # every 8th step with drafts takes half of them, which shows what a draft costs
PATIENCE = 16  # steps without drafts in a row, before drafts are considered in some steps only
REST = 3  # steps in which drafts are then not considered, before each step in which they are
MOST_BEHIND = 16  # a request whose states are further behind gets no drafts
SUREST = 1 - 1e-9  # highest likelihood: the first of two drafts of a request always counts more


class Drafter(Protocol):
    """Guesses the next tokens of requests."""

    num_tokens: int  # drafts of a request in a step at most
    seconds: float  # that the latest proposals took
    seconds_per_draft: float  # that each further draft of a batch takes

    def likelihood(self, request: Request) -> tuple[float, ...]:
        """How likely the next guess is right, then the one after it if the first is, and so on, as
        far as known. The last number holds for all guesses after it, too. None: no guess."""

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        """For each request at most `depth` next tokens."""

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """The model chose the first `accepted` of the `drafted` tokens itself."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """A step failed: forget what was computed, because it may be wrong."""


class Speculation:
    """Speculative decoding within the batch (Leviathan et al. 2023, arXiv:2211.17192).

    A step computes a request's newest token together with drafts of the tokens after it. Each
    position chooses its token as it would alone, with its own number of the request's random
    stream. So a draft is right if and only if it is the token that the model chooses there, and the
    output is the output without drafts.

    The K/V of a wrong draft is written again. A recurrent state that a wrong draft went into is
    given up: the state before the span is kept, and the request's next step computes the states of
    its accepted tokens again.

    Attributes:
        exist: True, see :class:`Proposals`.
        reads_first: whether the next step will have drafts. Then the step under way must be read
            before the next step is scheduled.
        num_computed: drafts that were computed.
        num_right: drafts that were right.
        by_depth: for each depth the drafts that were computed, and those that were right.
    """

    exist = True

    def __init__(
        self,
        drafter: Drafter,
        allocator: BlockAllocator,
        budget: ChunkBudget,
    ) -> None:
        self.drafter = drafter
        self.reads_first = False
        self.num_computed = self.num_right = self._num_plans = 0
        self.by_depth = [[0, 0] for _ in range(drafter.num_tokens)]
        self._num_vain = self._rest = 0  # plans without drafts in a row; steps that are not planned
        self._allocator = allocator
        self._budget = budget

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Add spans with drafts for some of the requests that compute one token; return the others.
        Drafts take no block that a decode needs."""
        self._budget.pauses = self._rest > 0
        if self._rest:
            self._rest -= 1
            return decodes
        depths = self._depths({request: self._likelihood(request) for request in decodes})
        self.reads_first = bool(depths)
        self._num_vain = 0 if depths else self._num_vain + bool(decodes)
        self._rest = REST if self._num_vain >= PATIENCE else 0
        if not depths or any(request.num_in_flight for request in decodes):
            return decodes
        proposed = self.drafter.propose([*depths], [*depths.values()])
        planning.proposal_seconds = self.drafter.seconds
        reserved = self._allocator.blocks_to_append(len(decodes))
        for request, drafts in zip(depths, proposed, strict=True):
            start = request.num_computed
            stop = start + 1 + len(drafts)
            more = self._allocator.blocks_needed(stop) - self._allocator.blocks_needed(start)
            needed = reserved + self._allocator.blocks_to_append(more)
            if not drafts or needed > self._allocator.num_available:
                continue
            try:
                planning.copies += self._allocator.make_writable(request.id, start, stop)
            except OutOfBlocksError:
                continue
            move = self._allocator.advance(request.id, start, stop, is_sure=False)
            planning.add(Span.of(request, start, stop, True, move, drafts=tuple(drafts)))
        return [request for request in decodes if request.id not in planning.requests]

    def learn(self, report: StepReport) -> None:
        """Count the drafts of a step that has been settled, and let the drafter learn from them."""
        for request, drafted, accepted in report.verified:
            self.num_computed += drafted
            self.num_right += accepted
            for depth, counts in enumerate(self.by_depth[:drafted]):
                counts[0] += 1
                counts[1] += depth < accepted
            self.drafter.verified(request, drafted, accepted)

    def drop(self, request: Request) -> None:
        self.drafter.drop(request)

    def recover(self) -> None:
        self.drafter.recover()

    def _likelihood(self, request: Request) -> tuple[float, ...]:
        if not request.params.speculates or request.samples:
            return ()
        if self._behind(request) > MOST_BEHIND:
            return ()
        return self.drafter.likelihood(request)

    def _behind(self, request: Request) -> int:
        """Computed tokens of a request whose recurrent states have to be computed again."""
        return request.num_computed - self._allocator.begins_at(request.id, request.num_computed)

    def _depths(self, likely: dict[Request, tuple[float, ...]]) -> dict[Request, int]:
        """How many drafts each request gets: those that raise the tokens per second."""
        count, cost = len(likely), self._budget.cost
        late = sum(map(self._behind, likely))
        plain = StepWork(count + late, sum(request.num_computed for request in likely))
        seconds = cost.predict(plain)
        hopeful = [request for request, shares in likely.items() if shares and shares[0] > 0]
        if not seconds or not hopeful:
            return {}
        of_draft = cost.predict(plain + StepWork(1, plain.decode_context // count)) - seconds
        # With drafts the rate is at most the larger one of `count / seconds` and the best draft's.
        best_first = max(likely[request][0] for request in hopeful)
        if min(best_first, SUREST) * seconds <= MIN_GAIN * count * of_draft:
            return {}
        longest = np.inf if self._budget.max_stall is None else self._budget.max_stall / cost.margin
        room = max(len(hopeful), TOKENS_GROWTH * cost.most_rows - count - late)
        most = self.drafter.num_tokens
        # [requests, most]: the j-th draft gives as many tokens as it is likely that j are right.
        shares = [likely[request][:most] for request in hopeful]
        right = np.array([[*each, *[each[-1]] * (most - len(each))] for each in shares])
        right = np.clip(right, 1 - SUREST, SUREST)
        gives = np.cumprod(right, axis=1)
        for given, request in zip(gives, hopeful, strict=True):
            given[max(request.params.max_tokens - request.num_generated - 1, 0) :] = 0
        rows = np.ones(gives.shape)
        if self._allocator.states.exist:
            # If the j-th is the first wrong draft, j more tokens have to be computed again.
            behind = np.array([[self._behind(request)] for request in hopeful])
            rows = rows + gives * (1 / right - 1) * (behind + np.arange(1, most + 1))
        best, best_rate = np.zeros(len(hopeful), int), MIN_GAIN * count / seconds
        while most:
            gives = gives[:, :most]
            order = np.argsort(-gives, axis=None, kind="stable")
            times = seconds + of_draft * np.cumsum(rows[:, :most].ravel()[order])
            times += most * self.drafter.seconds_per_draft
            rates = (count + np.cumsum(gives.ravel()[order])) / times
            rates[room:] = 0
            rates[times > longest] = 0
            last = int(rates.argmax())
            if rates[last] > best_rate:
                best = np.bincount(order[: last + 1] // most, minlength=len(hopeful))
                best_rate = rates[last]
            most = most - 1 if self.drafter.seconds_per_draft else 0
        self._num_plans += 1
        if self._num_plans % TRIAL == 0:
            best = best // 2
        return {r: depth for r, depth in zip(hopeful, best.tolist(), strict=True) if depth}

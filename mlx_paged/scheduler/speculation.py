"""Which requests get drafts, how many, and which of these are right. Knows no mlx."""

import math
from itertools import groupby
from typing import Protocol

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.cost_model import TOKENS_GROWTH, StepWork
from mlx_paged.scheduler.runner_protocol import SampledToken
from mlx_paged.scheduler.step import Span, Step

MIN_GAIN = 1.03
"""Drafts must promise so many times the tokens per second of a step without them."""

TRIAL = 8
"""Each such step takes half of the drafts, which shows what drafts cost."""

DETERMINED = 1e-9
"""A likelihood of 1 is lowered by this, so that it has a logarithm below 0."""


class Drafter(Protocol):
    """Guesses the next tokens of requests.

    Attributes:
        num_tokens: drafts of a request in a step at most.
        seconds: that the latest proposals took.
        seconds_per_draft: that each further draft of a batch takes.
    """

    num_tokens: int
    seconds: float
    seconds_per_draft: float

    def likelihood(self, request: Request) -> float:
        """How likely each next guess is right, as far as known; 0 if there is no guess."""

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        """For each request at most `depth` next tokens."""

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """The model chose the first `accepted` of the `drafted` tokens itself."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """A step failed: forget what was computed, because it may be wrong. Tokens never are."""


class Speculation:
    """Speculative decoding within the batch (Leviathan et al. 2023, arXiv:2211.17192).

    A step computes a request's newest token together with drafts of the tokens after it. Each
    position chooses its token as it would alone, with its own number of the request's random
    stream. So a draft is right if and only if it is the token that the model chooses there, and the
    output is the output without drafts.

    Attributes:
        reads_first: whether the step under way must be read before the next one is scheduled,
            because that one shall have drafts.
        num_drafted: drafts that were computed.
        num_accepted: drafts that were right.
    """

    def __init__(self, drafter: Drafter, allocator: BlockAllocator, budget: ChunkBudget) -> None:
        self.drafter = drafter
        self.reads_first = False
        self.num_drafted = self.num_accepted = self._num_plans = 0
        self._allocator = allocator
        self._budget = budget
        budget.learns = True

    def schedule(self, step: Step, decodes: list[Request]) -> list[Request]:
        """Add spans with drafts for some of the requests that compute one token; return the others.

        Drafts take no block that a decode needs.
        """
        depths = self._depths({request: self._likelihood(request) for request in decodes})
        self.reads_first = bool(depths)
        if not depths or any(request.num_in_flight for request in depths):
            return decodes
        proposed = self.drafter.propose([*depths], [*depths.values()])
        step.draft_seconds = self.drafter.seconds
        reserved = self._allocator.blocks_to_append(len(decodes))
        for request, drafts in zip(depths, proposed, strict=True):
            start = request.num_computed
            stop = start + 1 + len(drafts)
            more = self._allocator.blocks_needed(stop) - self._allocator.blocks_needed(start)
            needed = reserved + self._allocator.blocks_to_append(more)
            if not drafts or needed > self._allocator.num_available:
                continue
            try:
                step.copies += self._allocator.make_writable(request.id, start, stop)
            except OutOfBlocksError:
                continue
            request.num_computed = stop
            step.add(Span(request, start, stop, True, drafts=tuple(drafts)))
        return [request for request in decodes if request.id not in step.requests]

    def accept(self, step: Step, choices: list[SampledToken]) -> list[SampledToken]:
        """The choices up to the first wrong draft of each request; the K/V of wrong drafts is
        given up."""
        spans = {span.request.id: span for span in step.spans if span.drafts}
        if not spans:
            return choices
        kept = list[SampledToken]()
        for request_id, rows in groupby(choices, lambda choice: choice.request.id):
            of_request, drafts = [*rows], spans[request_id].drafts if request_id in spans else ()
            pairs = enumerate(zip(of_request, drafts, strict=False))
            right = next((i for i, (row, draft) in pairs if row.token != draft), len(drafts))
            kept += of_request[: right + 1]
            if drafts:
                self._settle(spans[request_id], right)
        return kept

    def _settle(self, span: Span, accepted: int) -> None:
        """The span's first `accepted` drafts are tokens of its request, the others are not."""
        request, drafted = span.request, len(span.drafts)
        request.num_computed = span.start + 1 + accepted
        self._allocator.truncate(request.id, request.num_computed)
        request.num_drafted += drafted
        request.num_accepted += accepted
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.drafter.verified(request, drafted, accepted)

    def _likelihood(self, request: Request) -> float:
        if request.synchronous or not request.params.speculates or request.samples:
            return 0.0
        return min(self.drafter.likelihood(request), 1 - DETERMINED)

    def _depths(self, likely: dict[Request, float]) -> dict[Request, int]:
        """How many drafts each request gets: those that raise the tokens per second."""
        count, cost = len(likely), self._budget.cost
        plain = StepWork(count, sum(request.num_computed for request in likely))
        seconds = cost.predict(plain)
        hopeful = {request: p for request, p in likely.items() if p > 0}
        if not seconds or not hopeful:
            return {}
        of_draft = cost.predict(plain + StepWork(1, plain.decode_context // count)) - seconds
        best, best_rate = dict[Request, int](), MIN_GAIN * count / seconds
        room = max(1, (TOKENS_GROWTH * cost.most_rows - count) // len(hopeful))
        most, bound = min(self.drafter.num_tokens, room), self._budget.max_stall
        while most:
            depths, rate = dict[Request, int](), count / seconds
            for _ in range(2):  # the rate rises with the drafts, and fewer of them pay then
                worth = of_draft * rate
                depths = {r: d for r, p in hopeful.items() if (d := _depth(p, worth, most, r))}
                tokens = count + sum(_expected(hopeful[r], depth) for r, depth in depths.items())
                longer = seconds + sum(depths.values()) * of_draft
                longer += max(depths.values(), default=0) * self.drafter.seconds_per_draft
                rate = tokens / longer
            fits = bound is None or longer * cost.margin <= bound
            if fits and rate > best_rate:
                best, best_rate = depths, rate
            most = 0 if fits and not self.drafter.seconds_per_draft else most // 2
        self._num_plans += 1
        if self._num_plans % TRIAL == 0:
            best = {request: depth // 2 for request, depth in best.items() if depth > 1}
        return best


def _depth(likelihood: float, worth: float, most: int, request: Request) -> int:
    """How many drafts pay: the j-th one gives ``likelihood ** j`` tokens and must give `worth`,
    the tokens that the step's other rows give in the time that it takes."""
    most = min(most, request.params.max_tokens - request.num_generated - 1)
    if worth >= 1:
        return 0
    if worth > 0:
        most = min(most, int(math.log(worth) / math.log(likelihood)))
    return max(most, 0)


def _expected(likelihood: float, depth: int) -> float:
    """Mean number of right drafts: the sum of ``likelihood ** j`` for j from 1 to `depth`."""
    return likelihood * (1 - likelihood**depth) / (1 - likelihood)

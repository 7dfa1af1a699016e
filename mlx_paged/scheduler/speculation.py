"""Which requests get drafts, how many, and which of these are right. Knows no mlx."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.request import Request
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.cost_model import TOKENS_GROWTH
from mlx_paged.scheduler.pace import Pace
from mlx_paged.scheduler.progress import OneToken, Planning
from mlx_paged.scheduler.step import Span, StepReport, StepWork

MIN_GAIN = 1.03  # tokens per second that drafts must promise, relative to a step without drafts
TRIAL = 8  # every 8th step with drafts takes half of them, which shows what a draft costs
PATIENCE = 16  # steps without drafts in a row, before drafts are considered in some steps only
REST = 3  # steps in which drafts are then not considered, before each step in which they are
MOST_BEHIND = 16  # a request whose states are further behind gets no drafts
GROWTH = 2  # the largest ratio of requests with guesses that take time to those in the plan before
SPREAD = 64  # tokens of a request at most that share the time to read what is before them
SUREST = 1 - 1e-9  # highest likelihood: the first of two drafts of a request always counts more


_Plain = tuple[StepWork, float, float]
"""A step without drafts, its seconds, and those of one draft more."""


class Drafter(Protocol):
    """Guesses the next tokens of requests."""

    num_tokens: int  # drafts of a request in a step at most
    chunk: int  # tokens that it reads in a step at most
    takes_time: bool  # whether its guesses do
    seconds: float  # that the latest proposals took

    @property
    def pace(self) -> Pace:
        """The time that its guesses take, as far as it is known."""

    def likelihood(self, request: Request) -> tuple[float, ...]:
        """The probabilities that the next guesses are right, each if all guesses before it are. The
        last probability also holds for all later guesses. Empty: there is no guess."""

    def num_unread(self, request: Request) -> int:
        """How many tokens it reads before its first guess, at most."""

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        """For each request at most `depth` next tokens."""

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """The model chose the first `accepted` of the `drafted` tokens itself."""

    def rested(self) -> None:
        """A plan wanted none of its guesses: what is known of them is perhaps out of date."""

    def drop(self, request: Request) -> None:
        """Forget an ended request."""

    def recover(self) -> None:
        """Forget the computed guesses: a step failed, and they may be wrong."""


class Speculation:
    """Speculative decoding within the batch (Leviathan et al. 2023, arXiv:2211.17192).

    A step computes a request's newest token together with drafts of the tokens after it. Each
    position chooses its token as it would alone, with its own number of the request's random
    stream. So a draft is right if and only if it is the token that the model chooses there, and the
    output is the output without drafts.

    With several drafters each request gets, in each step, the guesses of the one that promises most
    tokens for the time of their rows and of the drafter itself.

    The K/V of a wrong draft is written again. A recurrent state that a wrong draft went into is
    given up: the state before the span is kept, and the request's next step computes the states of
    its accepted tokens again.

    Attributes:
        gives_several: True, see :class:`Decoding`.
        drafters: make the guesses.
        reads_first: whether the next step will have drafts. Then the step under way must be read
            before the next step is scheduled.
        num_drafted: drafts that were computed.
        num_right: drafts that were right.
        by_depth: for each depth the drafts that were computed, and those that were right.
    """

    gives_several = True

    def __init__(
        self,
        drafters: Sequence[Drafter],
        allocator: BlockAllocator,
        budget: ChunkBudget,
    ) -> None:
        self.drafters = [*drafters]
        self._drafter_of: dict[int, Drafter] = {}  # by request id, where there are several
        self.reads_first = False
        self.num_drafted = self.num_right = self._num_plans = 0
        most = max(each.num_tokens for each in drafters)
        self.by_depth = [[0, 0] for _ in range(most)]
        self._predicted: _Plain | None = None  # of this step, until its depths are known
        self._most_tried = 1  # requests with guesses that take time, in the next plan
        self._num_vain = self._rest = 0  # plans without drafts in a row; steps that are not planned
        self._allocator = allocator
        self._without = OneToken(allocator)  # of requests that get no drafts
        self._budget = budget

    @property
    def reported(self) -> dict[str, Any]:
        """The drafts of all requests so far."""
        return {
            "drafts": self.num_drafted,
            "accepted_drafts": self.num_right,
            "drafts_by_depth": self.by_depth,
        }

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Plan decodes, some with drafts. Drafts take no block that another decode needs."""
        return self._without.schedule(planning, self._schedule_drafts(planning, decodes))

    def _schedule_drafts(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Add spans with drafts for some requests; return the others."""
        self._budget.pauses = self._rest > 0
        if self._rest:
            self._rest -= 1
            return decodes
        self._predicted = None
        depths = self._depths(self._likelihoods(decodes))
        self.reads_first = bool(depths)
        self._num_vain = 0 if depths else self._num_vain + bool(decodes)
        self._rest = REST if self._num_vain >= PATIENCE else 0
        self._count_tried(depths)
        if not depths or any(request.num_in_flight for request in decodes):
            return decodes
        proposed = self._propose(planning, depths)
        reserved = self._allocator.blocks_to_append(len(decodes))
        for request, drafts in proposed.items():
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
            planning.add(Span.of(request, start, stop, True, move, further=tuple(drafts)))
        return [request for request in decodes if request.id not in planning.requests]

    def _count_tried(self, depths: dict[Request, int]) -> None:
        """Bound the requests of the next plan whose guesses take time. After a rest one request is
        tried first: others have tokens to be read, perhaps in vain."""
        used = [self._source(request) for request in depths]
        num_tried = sum(each.takes_time for each in used)
        if num_tried:
            self._most_tried = GROWTH * num_tried
        elif self._rest:
            self._most_tried = 1
        for each in self.drafters:
            if each not in used:
                each.rested()

    def learn(self, report: StepReport) -> None:
        """Count the drafts of a step that has been settled, and let the drafter learn from them."""
        for request, drafted, accepted in report.verified:
            self.num_drafted += drafted
            self.num_right += accepted
            for depth, counts in enumerate(self.by_depth[:drafted]):
                counts[0] += 1
                counts[1] += depth < accepted
            self._source(request).verified(request, drafted, accepted)

    def drop(self, request: Request) -> None:
        self._drafter_of.pop(request.id, None)
        for each in self.drafters:
            each.drop(request)

    def recover(self) -> None:
        for each in self.drafters:
            each.recover()

    def _source(self, request: Request) -> Drafter:
        """What the latest guesses of a request are of."""
        return self._drafter_of.get(request.id, self.drafters[0])

    def _propose(self, planning: Planning, depths: dict[Request, int]) -> dict[Request, list[int]]:
        """Guesses for each request, of its own drafter."""
        found: dict[Request, list[int]] = {}
        for drafter in self.drafters:
            own = [request for request in depths if self._source(request) is drafter]
            if own:
                found |= zip(own, drafter.propose(own, [depths[r] for r in own]), strict=True)
                planning.extra_seconds += drafter.seconds
        return found

    def _likelihoods(self, decodes: list[Request]) -> dict[Request, tuple[float, ...]]:
        """What is known of each request's next guesses."""
        able = {
            request
            for request in decodes
            if request.params.speculates
            and not request.samples
            and self._behind(request) <= MOST_BEHIND
        }
        first, *others = self.drafters
        likely = {r: first.likelihood(r) if r in able else () for r in decodes}
        if others and able:
            self._choose(likely, able)
        return likely

    def _choose(self, likely: dict[Request, tuple[float, ...]], able: set[Request]) -> None:
        """Replace a request's likelihood where another drafter's guesses are worth more."""
        self._predicted = self._plain(likely)
        _, seconds, of_draft = self._predicted
        rate = len(likely) / seconds if seconds else 0.0

        def worth(offer: tuple[Drafter, tuple[float, ...]]) -> float:
            each, shares = offer
            pace = paces[each]
            own_seconds = pace.of_pass / len(likely) + pace.of_guess
            found = _worth(shares, each.num_tokens, of_draft + own_seconds, rate)
            return found - rate * _reading(request, each, pace)

        paces = {each: each.pace for each in self.drafters}
        for request in able:
            offers = [(self.drafters[0], likely[request])]
            offers += [(each, each.likelihood(request)) for each in self.drafters[1:]]
            self._drafter_of[request.id], likely[request] = max(offers, key=worth)

    def _behind(self, request: Request) -> int:
        """Computed tokens of a request whose recurrent states have to be computed again."""
        return request.num_computed - self._allocator.begins_at(request.id, request.num_computed)

    def _depths(self, likely: dict[Request, tuple[float, ...]]) -> dict[Request, int]:
        """How many drafts each request gets: those that raise the tokens per second."""
        count, cost = len(likely), self._budget.cost
        plain, seconds, of_draft = self._predicted or self._plain(likely)
        self._predicted = None
        hopeful = [request for request, shares in likely.items() if shares and shares[0] > 0]
        if not seconds or not hopeful:
            return {}
        # With drafts the rate is at most the larger one of `count / seconds` and the best draft's.
        best_first = max(likely[request][0] for request in hopeful)
        if min(best_first, SUREST) * seconds <= MIN_GAIN * count * of_draft:
            return {}
        max_stall = self._budget.max_stall
        longest = np.inf if max_stall is None else max_stall / cost.margin
        room = max(len(hopeful), TOKENS_GROWTH * cost.most_rows - plain.decode_rows)
        sources = [self._source(request) for request in hopeful]
        most = max(each.num_tokens for each in sources)
        # [requests, most]: the j-th draft gives as many tokens as it is likely that j are right.
        right = np.array([_padded(likely[r], most) for r in hopeful])
        right = np.clip(right, 1 - SUREST, SUREST)
        gives = np.cumprod(right, axis=1)
        for given, request, source in zip(gives, hopeful, sources, strict=True):
            left = max(request.params.max_tokens - request.num_generated - 1, 0)
            given[min(left, source.num_tokens) :] = 0
        rows = np.ones(gives.shape)
        if self._allocator.states.exist:
            # If the j-th is the first wrong draft, j more tokens have to be computed again.
            behind = np.array([[self._behind(request)] for request in hopeful])
            rows = rows + gives * (1 / right - 1) * (behind + np.arange(1, most + 1))
        paces = {source: source.pace for source in sources}
        costs = of_draft * rows + np.array([[paces[source].of_guess] for source in sources])
        pairs = [*zip(hopeful, sources, strict=True)]
        costs[:, 0] += [_reading(r, source, paces[source]) for r, source in pairs]
        reading = _reading_now(pairs, paces)
        worth = np.cumsum(gives - costs * count / seconds, axis=1).max(axis=1)
        gives[worth <= 0] = 0
        best, best_rate = np.zeros(len(hopeful), int), MIN_GAIN * count / seconds
        # Each depth of drafters that take time is a pass of theirs, for all requests together.
        costly = np.array([source.takes_time for source in sources])
        per_depth = sum(pace.of_pass for pace in paces.values())
        deepest = max([s.num_tokens for s in sources if s.takes_time], default=0)
        for limit in range(deepest, -1, -1):
            gives[costly, limit:] = 0
            order = np.argsort(-gives, axis=None, kind="stable")
            times = seconds + np.cumsum(costs.ravel()[order]) + limit * per_depth
            rates = (count + np.cumsum(gives.ravel()[order])) / times
            rates[room:] = 0
            rates[times + (reading if limit else 0.0) > longest] = 0
            last = int(rates.argmax())
            if rates[last] > best_rate:
                best = np.bincount(order[: last + 1] // most, minlength=len(hopeful))
                best_rate = rates[last]
        tried = np.flatnonzero(costly & (best > 0))
        unread = [sources[i].num_unread(hopeful[i]) for i in tried]
        best[tried[np.argsort(unread, kind="stable")][self._most_tried :]] = 0
        self._num_plans += 1
        if self._num_plans % TRIAL == 0:
            best = best // 2
        return {r: depth for r, depth in zip(hopeful, best.tolist(), strict=True) if depth}

    def _plain(self, decodes: Collection[Request]) -> _Plain:
        """A step of these without drafts, its seconds, and those of one draft more."""
        late, cost = sum(map(self._behind, decodes)), self._budget.cost
        context = sum(request.num_computed for request in decodes)
        plain = StepWork(len(decodes) + late, context)
        seconds = cost.predict(plain)
        further = StepWork(1, context // max(len(decodes), 1))
        return plain, seconds, cost.predict(plain + further) - seconds


def _padded(shares: tuple[float, ...], count: int) -> tuple[float, ...]:
    """Shares at `count` depths."""
    return (shares + shares[-1:] * (count - len(shares)))[:count]


def _reading(request: Request, source: Drafter, pace: Pace) -> float:
    """Seconds in which a drafter reads what is before its first guess of a request, for each of the
    tokens that share them."""
    left = request.params.max_tokens - request.num_generated
    return pace.of_token * source.num_unread(request) / max(1, min(left, SPREAD))


def _reading_now(pairs: Sequence[tuple[Request, Drafter]], paces: Mapping[Drafter, Pace]) -> float:
    """Seconds of this in the next step at most, if all these requests get guesses."""
    unread = dict.fromkeys(paces, 0)
    for request, source in pairs:
        unread[source] += source.num_unread(request)
    return sum(paces[each].of_token * min(count, each.chunk) for each, count in unread.items())


def _worth(shares: tuple[float, ...], most: int, seconds: float, rate: float) -> float:
    """The gain in tokens of at most `most` drafts: the sum over depths of the probability that all
    drafts up to this depth are right, minus ``seconds * rate``. A draft takes `seconds`. Without
    drafts a second brings `rate` tokens."""
    found, right = 0.0, 1.0
    for share in _padded(shares, most) if shares else ():
        right *= share
        if right <= seconds * rate:
            break
        found += right - seconds * rate
    return found

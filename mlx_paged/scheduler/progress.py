"""What a step will compute while it is planned, and what of each sequence is computed, under way
and known. No other file writes the latter. Knows no mlx."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, ClassVar

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import BlockCopy, BlockTransfer, OutOfBlocksError
from mlx_paged.kv.prefix_match import PrefixMatch
from mlx_paged.kv.state_kind import ReadAndLeft
from mlx_paged.request import Request
from mlx_paged.scheduler.step import NO_WORK, SampledToken, Span, Step, StepReport, StepWork

ID = attrgetter("id")
NUM_COMPUTED = attrgetter("num_computed")
SAMPLES = attrgetter("samples")

TopLogprobs = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities, the likeliest ones first."""


@dataclass(slots=True)
class Planning:
    """What a step will compute, as far as it is planned. To plan a span changes no request."""

    spans: list[Span] = field(default_factory=list)
    loads: list[BlockTransfer] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    work: StepWork = NO_WORK  # of the spans
    prompt_tokens: int = 0
    is_plain: bool = True
    extra_seconds: float = 0.0
    scores: bool = False
    # Ids of all requests that are computed, forked or preempted in this step.
    requests: set[int] = field(default_factory=set)
    # Running requests with several tokens to compute, oldest first.
    prompts: list[Request] = field(default_factory=list)
    max_chunk_tokens: int | None = None  # limit of the chunks; None: the scheduler's budget

    def add(self, span: Span) -> None:
        """Compute a span."""
        self.spans.append(span)
        self.is_plain = False
        self.scores = self.scores or span.request.prompt_logprobs is not None
        self.requests.add(span.request.id)
        self.requests.update(fork.id for fork in span.forks)
        start = span.start + span.stored
        self.prompt_tokens += max(0, min(span.stop, span.request.num_prompt) - start)
        work = StepWork.chunk(span.start, len(span))
        if span.further or span.stop - start == 1:
            work = StepWork(work.chunk_tokens, work.chunk_context)
        self.work += work

    def add_decodes(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        moves: Sequence[ReadAndLeft] | None = None,
    ) -> None:
        """Compute the last token of each request and sample the next one. `moves` are those of the
        requests' recurrent states; None: the model has none."""
        rows, context = len(positions), 0
        for index, (request, position) in enumerate(zip(requests, positions, strict=True)):
            stop = position + 1
            context += stop
            self.requests.add(request.id)
            self.prompt_tokens += stop <= request.num_prompt
            if moves is None:
                self.spans.append(Span(request, position, stop, 1))
                continue
            reads, leaves = moves[index]
            stored = position - reads.position
            of_states = stored, reads.id, leaves
            self.spans.append(Span(request, reads.position, stop, 1, (), (), *of_states))
            if stored:
                _, _, more, of_more = StepWork.chunk(reads.position, stored)
                rows, context = rows + more, context + of_more
        before, context_before, *of_chunks = self.work
        self.work = StepWork(before + rows, context_before + context, *of_chunks)

    def step(
        self,
        stores: Sequence[BlockTransfer] = (),
        released: Sequence[int] = (),
        rested: Sequence[int] = (),
        is_read_first: bool = False,
        is_held_back: bool = False,
    ) -> Step:
        """The step that was planned. The arguments are fields of :class:`Step`."""
        return Step(
            spans=self.spans,
            stores=stores,
            loads=self.loads,
            copies=self.copies,
            released=released,
            rested=rested,
            work=self.work,
            prompt_tokens=self.prompt_tokens,
            is_plain=self.is_plain,
            extra_seconds=self.extra_seconds,
            is_read_first=is_read_first,
            scores=self.scores,
            is_held_back=is_held_back,
        )


class OneToken:
    """The :class:`~mlx_paged.scheduler.decoding.Decoding` that gives each request one token."""

    gives_several = reads_first = False
    reported: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        """Plan all decodes, or none if blocks are short or one of the requests forks."""
        if any(map(SAMPLES, decodes)):
            return decodes
        positions = list(map(NUM_COMPUTED, decodes))
        try:
            copies, moves = self._allocator.append_each(list(map(ID, decodes)), positions)
        except OutOfBlocksError:
            return decodes
        planning.copies += copies
        planning.add_decodes(decodes, positions, moves)
        return []

    def learn(self, report: StepReport) -> None:
        pass

    def drop(self, request: Request) -> None:
        pass

    def recover(self) -> None:
        pass


class Progress:
    """The progress of sequences whose blocks an allocator holds.

    A step is planned before the step before it has been read. So a sequence advances in two parts:
    :meth:`plan` counts the tokens of a planned step as computed, and :meth:`launch` those that the
    step chooses as under way. :meth:`settle` corrects both when the step has been read.

    Attributes:
        num_under_way: steps that have been launched and not read.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self.num_under_way = 0
        self._foreseen: list[Request] = []

    # The blocks of a sequence

    def admit(self, request: Request, tokens: Sequence[int] | None, spare: int = 0) -> PrefixMatch:
        """Take blocks for all tokens of a request, and share those that hold a prefix of `tokens`;
        None: share none. Raises OutOfBlocksError unless `spare` blocks are left."""
        match = self._allocator.admit(
            request.id,
            len(request.tokens),
            tokens=tokens,
            salt=request.root,
            spare=spare,
            gives_way=request.is_background,
        )
        request.num_computed = match.num_cached
        if request.num_preempted == 0:
            request.num_cached = match.num_cached
        return match

    def fork(self, parent: Request, child: Request, num_computed: int) -> None:
        """Let a child share its parent's blocks, of which `num_computed` tokens count."""
        self._allocator.fork(parent.id, child.id)
        child.num_computed = child.num_cached = num_computed

    def free(self, request: Request) -> None:
        """Free the blocks of a request, all of whose tokens have to be computed again."""
        self._allocator.free(request.id)
        request.num_computed = 0

    def correct(self, request: Request, num_computed: int) -> None:
        """Count the first `num_computed` tokens of a request as computed. Free the blocks of the
        tokens after them."""
        request.num_computed = num_computed
        self._allocator.truncate(request.id, num_computed)

    # Its steps

    def plan(self, step: Step) -> None:
        """Count the tokens of a planned step as computed."""
        for span in step.spans:
            span.request.num_computed = span.stop

    def launch(self, step: Step) -> None:
        """Count the tokens that a launched step chooses as under way."""
        self.num_under_way += 1
        if step.is_plain:
            for span in step.spans:
                span.request.num_in_flight += 1
            return
        for request in _choosing(step):
            request.num_in_flight += 1

    def foresee(self, request: Request) -> None:
        """The next token of a request is known: the step under way, if any, chooses it in vain."""
        if request.num_in_flight:
            request.num_in_flight -= 1
            self._foreseen.append(request)

    def settle(self, report: StepReport) -> None:
        """Correct the progress by the tokens that a step chose. In the report stay the choices that
        count: those of requests that go on, up to a request's first wrong draft."""
        step, foreseen = report.step, self._foreseen
        self.num_under_way -= 1
        if step.is_plain:
            for span in step.spans:
                span.request.num_in_flight -= 1
        else:
            for request in _choosing(step):
                request.num_in_flight -= 1
        kept = list[SampledToken]()
        for choice in report.choices:
            if not choice.request.finish_reason:
                kept.append(choice)
        report.choices = kept
        if foreseen:
            self._foreseen, ids = [], {request.id for request in foreseen}
            for request in foreseen:
                request.num_in_flight += 1
            report.choices = [each for each in report.choices if each.request.id not in ids]
        if step.is_plain:
            return
        drafted = {span.request.id: span for span in step.spans if span.further}
        if drafted:
            report.choices = self._verified(report, drafted)

    def lose(self, requests: Iterable[Request]) -> None:
        """The steps under way are given up, and these requests have no blocks any more."""
        self.num_under_way, self._foreseen = 0, []
        for request in requests:
            request.num_computed = request.num_in_flight = 0

    def _verified(self, report: StepReport, drafted: dict[int, Span]) -> list[SampledToken]:
        """The choices up to each request's first wrong draft; the K/V of wrong drafts is given up.
        `drafted` are the spans with drafts by request id."""
        kept = list[SampledToken]()
        for request_id, rows in groupby(report.choices, lambda choice: choice.request.id):
            of_request, span = [*rows], drafted.get(request_id)
            if span is None:
                kept += of_request
                continue
            request, count = span.request, len(span.further)
            pairs = enumerate(zip(of_request, span.further, strict=False))
            right = next((i for i, (row, draft) in pairs if row.token != draft), count)
            kept += of_request[: right + 1]
            self.correct(request, span.start + span.stored + 1 + right)
            request.reported["drafts"] = request.reported.get("drafts", 0) + count
            request.reported["accepted_drafts"] = request.reported.get("accepted_drafts", 0) + right
            report.verified.append((request, count, right))
        return kept


def _choosing(step: Step) -> Iterator[Request]:
    """The request of each token that a step chooses."""
    for span in step.spans:
        if span.samples:
            yield from repeat(span.request, span.samples)
            yield from span.forks


def append_token(choice: SampledToken) -> TopLogprobs:
    """Give a request its next token. Returns the likeliest tokens that it asked for, with their
    log-probabilities, but none that is forbidden. Raises ValueError if the request's options leave
    no token: all its logits are NaN or -inf."""
    request = choice.request
    if math.isnan(choice.logprob) and request.may_forbid_all:
        raise ValueError(
            "[SamplingParams] logits_processors or logit_bias leave no token: "
            "expected at least one finite logit, and no NaN"
        )
    request.tokens.append(choice.token)
    request.logprobs.append(choice.logprob)
    if not choice.top:
        return ()
    top = tuple(p for p in choice.top[: request.params.logprobs] if p[1] > -math.inf)
    if top:
        request.top_logprobs.append(top)
    return top

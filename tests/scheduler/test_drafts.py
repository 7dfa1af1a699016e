"""Which drafts a step gets, what becomes of them, and where n-grams find them."""

import random
from functools import partial
from itertools import pairwise

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.states import StateIds
from mlx_paged.options import MAX_DRAFTS
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.ngram import NgramDrafter
from mlx_paged.scheduler.pace import Pace
from mlx_paged.scheduler.progress import append_token
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import MOST_BEHIND, PATIENCE, REST, Speculation
from mlx_paged.scheduler.step import SampledToken, Step, StepReport, StepWork

RIGHT = 7
"""The token that every request would choose."""


class Always:
    """Drafts of one token."""

    num_tokens, chunk = MAX_DRAFTS, 0
    takes_time, seconds, pace = False, 0.0, Pace()

    def __init__(self, token: int = RIGHT, likelihood: float = 0.9) -> None:
        self.token = token
        self.chance = likelihood
        self.learnt: list[tuple[int, int, int]] = []
        self.dropped: list[int] = []
        self.num_rests = 0

    def likelihood(self, request: Request) -> tuple[float, ...]:
        return (self.chance,)

    def num_unread(self, request: Request) -> int:
        return 0

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        return [[self.token] * depth for depth in depths]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        self.learnt.append((request.id, drafted, accepted))

    def rested(self) -> None:
        self.num_rests += 1

    def drop(self, request: Request) -> None:
        self.dropped.append(request.id)


class Priced(Always):
    """Drafts of one token, each of which takes the drafter some seconds."""

    num_tokens = 3

    def __init__(self, token: int, likelihood: float, of_pass: float) -> None:
        super().__init__(token, likelihood)
        self.takes_time, self.pace = of_pass > 0, Pace(of_pass)

    def likelihood(self, request: Request) -> tuple[float, ...]:
        return (self.chance,) if self.chance else ()


def scheduler_with(
    *drafters: Always,
    num_blocks: int = 100,
    row_seconds: float = 0.0001,
    has_states: bool = False,
    **options: float,
) -> Scheduler:
    """A scheduler that knows its costs: a step takes 10 ms and as much more for each row."""
    allocator = BlockAllocator(num_blocks, 4, states=StateIds() if has_states else None)
    scheduler = Scheduler(allocator, 8, 64, make_decoding=partial(Speculation, drafters), **options)
    for rows in (1, 8, 64, 1, 8, 64):
        scheduler.budget.observe(StepWork(rows, 10 * rows), 0.010 + row_seconds * rows)
    return scheduler


def started(scheduler: Scheduler, *lengths: int, **params: object) -> list[Request]:
    """Requests whose prompts are computed and whose first token is known."""
    requests = []
    for length in lengths:
        options = SamplingParams(**({"max_tokens": 64} | params))
        first = 100 + 1000 * len(requests)
        request = Request(len(requests), list(range(first, first + length)), options, seed=0)
        scheduler.add(request)
        requests.append(request)
    finish(scheduler, scheduler.schedule())
    return requests


def finish(scheduler: Scheduler, step: Step) -> list[int]:
    """Let every position choose RIGHT, and give the requests what they accept."""
    rows = [SampledToken(s.request, RIGHT, 0.0) for s in step.spans for _ in range(rows_of(s))]
    report = StepReport(step, choices=rows)
    scheduler.begun(report)
    scheduler.settle(report)
    for choice in report.choices:
        append_token(choice)
    scheduler.allocator.check_integrity()
    return [choice.request.id for choice in report.choices]


def rows_of(span) -> int:
    return 1 + len(span.further)


def test_right_drafts_are_all_taken_and_one_token_more_comes_with_them():
    drafter = Always()
    scheduler = scheduler_with(drafter)
    (request,) = started(scheduler, 5)
    step = scheduler.schedule()
    (span,) = step.spans
    assert span.further == (RIGHT,) * len(span.further) and 3 < len(span.further) <= MAX_DRAFTS
    assert (span.start, span.stop) == (5, 6 + len(span.further)) and step.work.chunk_tokens == 0
    assert (span.samples, span.own_stop) == (1 + len(span.further), 6)
    assert finish(scheduler, step) == [0] * (1 + len(span.further))
    assert request.num_computed == len(request.tokens) - 1 == 6 + len(span.further)
    assert drafter.learnt == [(0, len(span.further), len(span.further))]


def test_wrong_drafts_leave_one_token_and_no_block():
    scheduler = scheduler_with(Always(token=8))
    (request,) = started(scheduler, 5)
    in_use = scheduler.allocator.store.blocks_in_use
    step = scheduler.schedule()
    assert scheduler.allocator.store.blocks_in_use > in_use
    assert finish(scheduler, step) == [0]
    assert scheduler.allocator.store.blocks_in_use == in_use == 2
    assert request.num_computed == 6 and scheduler.allocator.num_tokens(0) == 6
    assert (request.reported["accepted_drafts"], scheduler.decoding.num_right) == (0, 0)
    assert request.reported["drafts"] == scheduler.decoding.num_drafted > 3


def test_what_wrong_drafts_wrote_is_no_known_prefix():
    scheduler = scheduler_with(Always(token=8))
    (request,) = started(scheduler, 5)
    finish(scheduler, scheduler.schedule())
    scheduler.complete(request)
    wrong = [*range(100, 105), RIGHT, 8, 8, 8, 8, 8, 8]
    assert scheduler.allocator.cached_prefix(wrong) == 6


def test_nothing_is_drafted_ahead_of_a_token_that_is_not_known():
    scheduler = scheduler_with(Always())
    (request,) = started(scheduler, 5)
    request.num_in_flight = 1
    request.num_computed += 1
    scheduler.allocator.make_writable(0, 5, 6)
    step = scheduler.schedule()
    assert [len(span.further) for span in step.spans] == [0]
    assert scheduler.decoding.reads_first, "the next step may not be launched ahead"


def test_drafts_that_cost_more_than_they_give_are_not_computed():
    (scheduler, hopeless) = scheduler_with(Always(likelihood=0.3)), Always(likelihood=0.0)
    started(scheduler, 5)
    cheap = scheduler.schedule()
    assert 0 < len(cheap.spans[0].further) < 6
    dear = scheduler_with(Always(likelihood=0.3), row_seconds=0.005)
    started(dear, 5)
    assert not dear.schedule().spans[0].further and not dear.decoding.reads_first
    none = scheduler_with(hopeless)
    started(none, 5)
    assert not none.schedule().spans[0].further


@pytest.mark.parametrize("max_stall", [None, 1.0])
def test_after_many_plans_in_vain_few_steps_are_planned_and_learnt_from(max_stall):
    class Counted(Always):
        asked = 0

        def likelihood(self, request: Request) -> tuple[float, ...]:
            self.asked += 1
            return super().likelihood(request)

    drafter = Counted(likelihood=0.01)
    scheduler = scheduler_with(drafter, max_stall=max_stall, row_seconds=0.01)
    started(scheduler, 5, max_tokens=200)
    learnt = []
    scheduler.budget.cost.observe = lambda work, seconds: learnt.append(seconds)
    for _ in range(PATIENCE + 4 * (1 + REST)):
        scheduler.budget.observe(StepWork(1, 1), 0.02)
        finish(scheduler, scheduler.schedule())
    assert drafter.asked == PATIENCE + 4
    paused = 0 if max_stall else 4 * REST
    assert abs(len(learnt) + paused - PATIENCE - 4 * (1 + REST)) <= 1
    scheduler.budget.pauses = True
    scheduler.budget.observe(StepWork(1, 1, 4, 10), 0.07)  # with a chunk
    assert learnt[-1] == 0.07
    drafter.chance, drafted = 0.99, []
    for _ in range(1 + REST):
        step = scheduler.schedule()
        drafted += step.spans[0].further
        finish(scheduler, step)
    assert drafted


def test_drafts_take_no_block_that_a_decode_needs():
    scheduler = scheduler_with(Always(), num_blocks=4)
    requests = started(scheduler, 4, 4, max_tokens=5)
    step = scheduler.schedule()
    assert scheduler.num_preemptions == 0 and len(step.spans) == 2
    assert [span.own_stop for span in step.spans] == [5, 5]
    finish(scheduler, step)
    assert all(request.num_computed == len(request.tokens) - 1 for request in requests)


def test_drafts_end_before_the_last_token_and_at_the_bound_of_a_stall():
    scheduler = scheduler_with(Always(likelihood=1.0))
    started(scheduler, 5, max_tokens=4)
    assert len(scheduler.schedule().spans[0].further) == 2  # one token is there, one comes free
    bounded = scheduler_with(Always(), max_stall=0.0102)
    started(bounded, 5)
    assert not bounded.schedule().spans[0].further


def test_the_first_drafts_are_few_and_then_no_more_than_twice_as_many_rows():
    scheduler = Scheduler(
        BlockAllocator(100, 4),
        8,
        64,
        make_decoding=partial(Speculation, [Always(likelihood=0.99)]),
    )
    started(scheduler, 5, 5)
    rows = []
    for _ in range(6):
        step = scheduler.schedule()
        rows.append(step.work.decode_rows)
        scheduler.budget.observe(step.work, 0.01)
        finish(scheduler, step)
    assert rows[0] == 2, "nothing is known of the cost yet"
    assert rows[1] == 4 and all(b <= 2 * a for a, b in pairwise(rows))
    assert max(rows) > 16


def test_the_bound_of_a_stall_leaves_those_drafts_that_fit():
    scheduler = scheduler_with(Always(likelihood=0.99), row_seconds=0.001, max_stall=0.0195)
    started(scheduler, 5)
    (span,) = scheduler.schedule().spans
    margin = scheduler.budget.cost.margin
    assert 0 < len(span.further) < MAX_DRAFTS
    assert (0.010 + 0.001 * len(span)) * margin <= 0.0195 < (0.013 + 0.001 * len(span)) * margin


@pytest.mark.parametrize(("chunk", "count"), [(0, 3), (40, 3), (200, 0)])
def test_what_a_drafter_reads_first_is_within_the_bound_of_a_stall(chunk, count):
    """The step takes 10 ms, and a token that is read .1 ms."""

    class Reading(Priced):
        def num_unread(self, request: Request) -> int:
            return 100

    drafter = Reading(OWN, 0.99, 0.0001)
    drafter.pace, drafter.chunk = Pace(0.0001, 0.0, 0.0001), chunk
    scheduler = scheduler_with(drafter, max_stall=0.020)
    started(scheduler, 5)
    assert len(scheduler.schedule().spans[0].further) == count


def test_every_row_of_a_request_attends_to_its_context():
    scheduler = scheduler_with(Always())
    started(scheduler, 5)
    step = scheduler.schedule()
    rows = step.work.decode_rows
    assert rows > 2 and step.work.decode_context == sum(range(6, 6 + rows))


def speed_of_copying(drafter: NgramDrafter | None, of_row: float, constant: float) -> float:
    """Tokens per second of 16 requests that copy their prompts, an edit in 16 tokens, if a row
    takes `of_row` seconds; times vary by a seventh."""
    rng = random.Random(7)
    right: dict[int, list[int]] = {}
    source = None if drafter is None else partial(Speculation, [drafter])
    scheduler = Scheduler(BlockAllocator(2000, 16), 16, 512, make_decoding=source)
    for i in range(32):
        text = [rng.randrange(10**6) for _ in range(320)]
        edited = [t if rng.random() > 1 / 16 else rng.randrange(10**6) for t in text]
        request = Request(i, [*edited, *text[:4]], SamplingParams(max_tokens=200), seed=0)
        right[i] = text[4:]
        scheduler.add(request)
    seconds = tokens = 0.0
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        took = (constant + of_row * (step.work.decode_rows + step.work.chunk_tokens)) * rng.uniform(
            0.86, 1.16
        )
        rows = [
            SampledToken(s.request, right[s.request.id][s.request.num_generated + j], 0.0)
            for s in step.spans
            if s.samples
            for j in range(1 + len(s.further))
        ]
        report = StepReport(step, choices=rows)
        scheduler.begun(report)
        scheduler.settle(report)
        for choice in report.choices:
            append_token(choice)
            tokens += 1
        scheduler.budget.observe(step.work, took)
        seconds += took
        for span in step.spans:
            if span.request.num_generated >= span.request.params.max_tokens:
                scheduler.complete(span.request)
    return tokens / seconds


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("constant", "of_row", "least"),
    [(0.020, 0.00005, 3.0), (0.0075, 0.00047, 1.05), (0.005, 0.003, 0.96)],
    ids=["bandwidth bound", "CPU", "a row costs nearly a step"],
)
def test_drafts_gain_what_they_can_and_lose_nothing(constant, of_row, least):
    plain = speed_of_copying(None, of_row, constant)
    assert speed_of_copying(NgramDrafter(), of_row, constant) > least * plain


@pytest.mark.parametrize(
    "params",
    [
        {"speculate": False},
        {"sampler": lambda logprobs: logprobs.argmax(-1)},
        {"logits_processors": (lambda tokens, logits: logits,)},
    ],
    ids=["off", "sampler", "processor"],
)
def test_requests_that_may_keep_a_state_or_do_not_want_drafts_get_none(params):
    scheduler = scheduler_with(Always())
    started(scheduler, 5, **params)
    assert not scheduler.schedule().spans[0].further


# Models with recurrent layers


def test_after_wrong_drafts_the_states_are_computed_again_with_the_next_token():
    drafter = Always()
    scheduler = scheduler_with(drafter, has_states=True)
    allocator = scheduler.allocator

    def num_behind() -> int:
        return request.num_computed - allocator.begins_at(request.id, request.num_computed)

    (request,) = started(scheduler, 6)
    first = allocator.state(request.id)
    step = scheduler.schedule()
    (span,) = step.spans
    assert (span.start, span.stored, span.reads) == (6, 0, first.id) and span.further
    drafter.token = RIGHT + 1
    finish(scheduler, step)
    assert num_behind() == 0, "all were right"
    right = allocator.state(request.id)
    assert (right,) == span.leaves and right.position == request.num_computed
    at, step = request.num_computed, scheduler.schedule()
    assert step.released == [first.id], "the state before drafts that were right"
    (wrong,) = step.spans[0].leaves
    finish(scheduler, step)
    assert (request.num_computed, num_behind()) == (at + 1, 1)
    assert allocator.state(request.id) == right
    drafter.chance = 0.0
    step = scheduler.schedule()
    (span,) = step.spans
    assert (span.start, span.stop, span.stored, span.reads) == (at, at + 2, 1, right.id)
    assert step.released == [wrong.id, right.id], "the state with a wrong draft, and the one read"
    assert span.known == [RIGHT, RIGHT] and num_behind() == 0
    assert step.work.decode_rows == 2 and step.work.chunk_tokens == 0
    finish(scheduler, step)
    assert request.num_computed == at + 2
    allocator.check_integrity()


def test_tokens_to_compute_again_are_part_of_what_a_draft_costs():
    """A wrong draft costs the rows of the tokens that it leaves behind, so fewer are worth it."""
    depths = {}
    for rewinds in (True, False):
        drafter = Always(likelihood=0.6)
        scheduler = scheduler_with(drafter, row_seconds=0.0016, has_states=not rewinds)
        (request,) = started(scheduler, 6)
        depths[rewinds] = scheduler.decoding._depths({request: (0.6,)}).get(request, 0)
    assert 0 < depths[False] < depths[True]


def test_a_request_far_behind_catches_up_before_it_gets_drafts():
    scheduler = scheduler_with(Always(), has_states=True)
    (request,) = started(scheduler, 40)
    at = request.num_computed - MOST_BEHIND - 1
    scheduler.allocator.advance(request.id, 0, at)  # as if its states had stayed there
    (span,) = scheduler.schedule().spans
    assert span.stored == MOST_BEHIND + 1 and not span.further


def test_an_ended_request_is_forgotten():
    drafter = Always()
    scheduler = scheduler_with(drafter)
    (request,) = started(scheduler, 5)
    scheduler.complete(request)
    assert drafter.dropped == [0]


OWN, OTHER = 7, 8
"""Tokens of two drafters."""


@pytest.mark.parametrize(
    ("own", "seconds", "other", "expected"),
    [
        (0.6, 0.0, 0.9, OTHER),
        (0.9, 0.0, 0.6, OWN),
        (0.9, 0.009, 0.6, OTHER),  # two tokens more, in the time of three steps
        (0.9, 0.0005, 0.6, OWN),
        (0.0, 0.0, 0.6, OTHER),
        (0.6, 0.0, 0.0, OWN),
    ],
)
def test_a_request_gets_the_drafts_that_promise_more_tokens_for_their_time(
    own, seconds, other, expected
):
    drafters = Priced(OWN, own, seconds), Priced(OTHER, other, 0.0)
    scheduler = scheduler_with(*drafters)
    started(scheduler, 5)
    step = scheduler.schedule()
    (span,) = step.spans
    assert {*span.further} == {expected}
    finish(scheduler, step)
    learnt = {each.token: each.learnt for each in drafters}
    assert len(learnt.pop(expected)) == 1 and [*learnt.values()] == [[]]


@pytest.mark.parametrize("seconds", [0.0, 0.0001])
def test_requests_of_a_step_have_drafts_of_their_own_drafter(seconds):
    """No request gets more of them than its drafter makes."""

    class First(Priced):
        def likelihood(self, request):
            return (0.95,) if request.id == 0 else ()

    free = Always(OTHER, 0.7)
    scheduler = scheduler_with(First(OWN, 0.95, seconds), free, row_seconds=1e-5)
    started(scheduler, 5, 5)
    drafts = {span.request.id: span.further for span in scheduler.schedule().spans}
    assert drafts[0] == (OWN,) * 3
    assert {*drafts[1]} == {OTHER} and len(drafts[1]) > 3
    assert len(scheduler.decoding.by_depth) == MAX_DRAFTS


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 3), (0.001, 3), (0.004, 2), (0.012, 0)])
def test_the_time_of_a_drafter_bounds_its_drafts(seconds, count):
    """A step takes 10.1 ms and 0.1 ms for each draft, and has 1.8, 2.44 or 2.95 tokens."""
    scheduler = scheduler_with(Priced(OWN, 0.8, seconds))
    started(scheduler, 5)
    (span,) = scheduler.schedule().spans
    assert len(span.further) == count


def test_an_ended_request_is_forgotten_by_all_drafters():
    drafters = Always(), Priced(OTHER, 0.6, 0.0)
    scheduler = scheduler_with(*drafters)
    (request,) = started(scheduler, 5)
    finish(scheduler, scheduler.schedule())
    scheduler.complete(request)
    assert [each.dropped for each in drafters] == [[0], [0]]


def test_a_step_is_predicted_once_for_all_drafters():
    """And anew for each step, whose requests may be others."""
    scheduler = scheduler_with(Priced(OWN, 0.6, 0.0), Priced(OTHER, 0.9, 0.0))
    started(scheduler, 5, 9)
    predicted, plain = [], scheduler.decoding._plain
    scheduler.decoding._plain = lambda decodes: predicted.append(len(decodes)) or plain(decodes)
    for num_running in (2, 2, 1):
        step = scheduler.schedule()
        assert len(step.spans) == num_running and any(span.further for span in step.spans)
        finish(scheduler, step)
        if len(predicted) == 2:
            scheduler.complete(next(iter(scheduler.running.values())))
    assert predicted == [2, 2, 1]

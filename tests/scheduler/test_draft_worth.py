"""What drafts of a head gain or lose on machines whose costs are known: every second is counted."""

import random
from dataclasses import dataclass, field
from functools import partial

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.acceptance import Acceptance
from mlx_paged.scheduler.pace import Pace, PaceMeter
from mlx_paged.scheduler.progress import append_token
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import Speculation
from mlx_paged.scheduler.step import SampledToken, StepReport

RIGHT, WRONG = 7, 8


@dataclass
class Machine:
    """Seconds of a step of the model, and of a head.

    Attributes:
        gap: of a step whose tokens are read before the next one is planned.
    """

    step: float
    row: float
    head: Pace
    gap: float = 0.0
    noise: float = 0.08
    rng: random.Random = field(default_factory=random.Random)

    def spent(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)


class Head:
    """A head whose guesses are right as often as `shares` says by depth, on a clock of its own.

    Attributes:
        num_cold: proposals that still take a hundred times as long.
        reads: tokens that it read before it guessed, by proposal.
        guesses: that it made.
    """

    chunk, takes_time = 256, True

    def __init__(self, machine: Machine, shares: tuple[float, ...]) -> None:
        self.num_tokens, self.shares, self._machine = len(shares), shares, machine
        self.seconds, self.guesses, self.num_cold = 0.0, 0, 0
        self.reads: list[int] = []
        self._known: set[int] = set()
        self._meter, self._acceptance = PaceMeter(), Acceptance(len(shares))

    @property
    def pace(self) -> Pace:
        return self._meter.pace

    def likelihood(self, request: Request) -> tuple[float, ...]:
        return self._acceptance.likelihood(request.id)

    def num_unread(self, request: Request) -> int:
        return 0 if request.id in self._known else len(request.tokens)

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        read, guesses, passes = sum(map(self.num_unread, requests)), sum(depths), max(depths)
        self._known |= {request.id for request in requests}
        head = self._machine.head
        if self.num_cold > 0:
            self.num_cold -= 1
            head = Pace(*(100 * each for each in head))
        seconds = passes * head.of_pass + guesses * head.of_guess + read * head.of_token
        self.seconds = self._machine.spent(seconds)
        self._meter.observe(passes, guesses, read, self.seconds)
        self.reads.append(read)
        self.guesses += guesses
        return [self._drafts(depth) for depth in depths]

    def _drafts(self, depth: int) -> list[int]:
        rng = self._machine.rng
        return [RIGHT if rng.random() < share else WRONG for share in self.shares[:depth]]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        self._acceptance.add(request.id, drafted, accepted)

    def rested(self) -> None:
        self._meter.rested()
        self._acceptance.rested()

    def drop(self, request: Request) -> None:
        self._acceptance.drop(request.id)
        self._known.discard(request.id)

    def recover(self) -> None: ...


def speed(
    machine: Machine,
    head: Head | None,
    streams: int,
    prompt: int = 40,
    max_tokens: int = 160,
    rounds: int = 6,
) -> float:
    """Tokens per second of so many streams, each of which has some requests in turn."""
    rng, machine.rng = random.Random(3), random.Random(5)
    source = None if head is None else partial(Speculation, [head])
    allocator = BlockAllocator(4000, 16)
    scheduler = Scheduler(allocator, streams, 512, make_decoding=source, prefix_cache=False)
    for i in range(streams * rounds):
        tokens = [rng.randrange(100, 10**6) for _ in range(prompt)]
        length = rng.randint(max_tokens // 2, max_tokens)
        scheduler.add(Request(i, tokens, SamplingParams(max_tokens=length), seed=0))
    seconds = tokens = 0.0
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        work = step.work
        took = machine.step + machine.row * (work.decode_rows + work.chunk_tokens)
        took = machine.spent(took) + machine.gap * step.is_read_first
        rows = [
            SampledToken(span.request, RIGHT, 0.0)
            for span in step.spans
            for _ in range(span.samples)
        ]
        report = StepReport(step, choices=rows)
        scheduler.begun(report)
        scheduler.settle(report)
        for choice in report.choices:
            append_token(choice)
        scheduler.budget.observe(work, took)
        seconds += took + step.extra_seconds
        tokens += len(report.choices)
        for span in step.spans:
            if span.request.num_generated >= span.request.params.max_tokens:
                scheduler.complete(span.request)
    return tokens / seconds


SMALL = Pace(0.0008, 0.0002, 0.00008)
"""Of a head beside a model of 135M parameters in float32 on two cores."""

GOOD, FAIR, BAD = (0.6, 0.55, 0.5), (0.45, 0.42, 0.4), (0.1, 0.1, 0.1)


@pytest.mark.parametrize("gap", [0.0, 0.001])
@pytest.mark.parametrize("shares", [GOOD, FAIR, BAD])
@pytest.mark.parametrize(
    ("step", "row"),
    [(0.012, 0.0022), (0.004, 0.0022), (0.020, 0.0001)],
    ids=["f32", "4 bits", "wide"],
)
def test_at_16_streams_a_head_costs_less_than_a_hundredth(step, row, shares, gap):
    machine = Machine(step, row, SMALL, gap)
    plain = speed(machine, None, 16)
    assert speed(machine, Head(machine, shares), 16) > 0.99 * plain


@pytest.mark.parametrize(
    ("step", "row", "streams", "least"),
    [(0.012, 0.0022, 1, 1.15), (0.020, 0.0001, 1, 1.6), (0.020, 0.0001, 4, 1.4)],
)
def test_a_good_head_gains_what_its_rows_leave(step, row, streams, least):
    machine = Machine(step, row, SMALL)
    plain = speed(machine, None, streams)
    assert speed(machine, Head(machine, GOOD), streams) > least * plain


@pytest.mark.parametrize("streams", [1, 4])
def test_a_bad_head_is_given_up_soon(streams):
    machine = Machine(0.012, 0.0022, SMALL)
    plain, head = speed(machine, None, streams), Head(machine, BAD)
    assert speed(machine, head, streams) > 0.98 * plain
    assert head.guesses < 30


def test_a_head_that_was_slow_at_first_is_tried_again():
    """Its first passes compile something, say. It is worth 1.6 of the speed without."""
    machine = Machine(0.020, 0.0001, SMALL)
    plain, head = speed(machine, None, 1, rounds=12), Head(machine, GOOD)
    head.num_cold = 1
    assert speed(machine, head, 1, rounds=12) > 1.2 * plain


def test_prompts_are_not_read_for_few_tokens():
    """To read one takes the head as long as 8 steps of the model, which have 8 tokens."""
    machine = Machine(0.020, 0.0001, SMALL)
    plain, head = speed(machine, None, 1, prompt=2000, max_tokens=9, rounds=20), Head(machine, GOOD)
    assert speed(machine, head, 1, prompt=2000, max_tokens=9, rounds=20) > 0.9 * plain
    assert 2000 < sum(head.reads) < 5000, "the first one shows what it costs"


def test_a_trial_reads_the_prompt_of_one_request():
    machine = Machine(0.020, 0.0001, SMALL)
    head = Head(machine, GOOD)
    speed(machine, head, 16, prompt=100, rounds=1)
    assert 100 < head.reads[0] < 200 and max(head.reads) > 400


def test_a_pace_is_found_from_proposals_of_all_kinds():
    meter, rng = PaceMeter(), random.Random(0)
    assert meter.pace == Pace()
    for _ in range(60):
        passes, guesses, tokens = rng.randint(1, 3), rng.randint(1, 16), rng.choice((0, 5, 200))
        meter.observe(passes, guesses, tokens, 0.003 * passes + 0.001 * guesses + 0.0005 * tokens)
    assert meter.pace == pytest.approx((0.003, 0.001, 0.0005), rel=0.05)
    meter.rested()
    assert meter.pace.of_pass < 0.003


def test_the_first_proposal_that_reads_a_prompt_says_nothing_of_a_guess():
    meter = PaceMeter()
    meter.observe(2, 2, 500, 0.5)
    assert meter.pace.of_pass + meter.pace.of_guess < 0.05 < 500 * meter.pace.of_token


def test_what_is_known_of_all_requests_returns_to_the_first_guess():
    acceptance = Acceptance(2)
    first = acceptance.likelihood(0)
    for _ in range(200):
        acceptance.add(0, 2, 0)
    acceptance.drop(0)
    assert acceptance.likelihood(1)[0] < 0.1
    for _ in range(3000):
        acceptance.rested()
    assert acceptance.likelihood(2) == pytest.approx(first, rel=0.05)

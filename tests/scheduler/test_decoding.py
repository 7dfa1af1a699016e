"""A way to decode that is added without a change of the package."""

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import ChunkBudget
from mlx_paged.scheduler.progress import OneToken, Planning, append_token
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken, Span, StepReport

LAST = 40
"""The number of tokens of a whole answer."""


class Repeats(OneToken):
    """Guesses that a request's newest token comes once more."""

    gives_several = reads_first = True

    def __init__(self, allocator: BlockAllocator, budget: ChunkBudget) -> None:
        super().__init__(allocator)
        self.num_computed = self.num_right = self.recovered = 0
        self.dropped: list[int] = []

    def schedule(self, planning: Planning, decodes: list[Request]) -> list[Request]:
        for request in decodes:
            start = request.num_computed
            planning.copies += self._allocator.make_writable(request.id, start, start + 2)
            move = self._allocator.advance(request.id, start, start + 2, is_sure=False)
            guess = (request.tokens[-1],)
            planning.add(Span.of(request, start, start + 2, True, move, further=guess))
        return []

    def learn(self, report: StepReport) -> None:
        for _, count, right in report.verified:
            self.num_computed += count
            self.num_right += right

    @property
    def reported(self) -> dict[str, int]:
        return {"drafts": self.num_computed}

    def drop(self, request: Request) -> None:
        self.dropped.append(request.id)

    def recover(self) -> None:
        self.recovered += 1


def token_at(position: int) -> int:
    """The model's choice at a position: each token comes three times."""
    return position // 3


def answer(make_decoding: type[Repeats] | None) -> tuple[Request, Scheduler, int]:
    """A request that has ended, its scheduler, and the number of steps."""
    scheduler = Scheduler(BlockAllocator(100, 4), 8, 64, make_decoding=make_decoding)
    request = Request(0, [0, 0, 0, 1], SamplingParams(max_tokens=LAST), seed=0)
    scheduler.add(request)
    steps = 0
    while request.num_generated < LAST:
        step, steps = scheduler.schedule(), steps + 1
        report = StepReport(step)
        scheduler.begun(report)
        for span in step.spans:
            first = span.stop - len(span.further)
            positions = range(first, span.stop + 1)
            report.choices += [SampledToken(request, token_at(p), 0.0) for p in positions]
        scheduler.settle(report)
        for choice in report.choices[: LAST - request.num_generated]:
            append_token(choice)
    scheduler.complete(request)
    scheduler.allocator.check_integrity()
    return request, scheduler, steps


@pytest.mark.parametrize("make_decoding", [None, Repeats])
def test_a_way_to_decode_changes_no_token(make_decoding):
    request, _, _ = answer(make_decoding)
    assert request.tokens == [token_at(position) for position in range(4 + LAST)]


def test_a_way_to_decode_is_asked_told_and_counted():
    request, scheduler, steps = answer(Repeats)
    source = scheduler.decoding
    assert steps < LAST - 5 and source.dropped == [request.id]
    assert source.num_computed == request.reported["drafts"] > 20
    assert source.num_right == request.reported["accepted_drafts"] > 5
    assert scheduler.levels().reported == {"drafts": source.num_computed}
    scheduler.recover([])
    assert source.recovered == 1


def test_by_default_no_step_gives_several_tokens():
    _, scheduler, steps = answer(None)
    assert steps == LAST and not scheduler.gives_several
    assert scheduler.levels().reported == {}

"""Planned steps stay as they are, and sequences advance as planned, then as it turned out."""

from dataclasses import fields
from typing import Any

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken, Span, Step, StepReport
from tests.support.simulation.schedules import run_schedule


def content(step: Step) -> list[Any]:
    """What the fields of a step and of its spans hold."""
    return [
        list(value) if isinstance(value, list) else value
        for part in (step, *step.spans)
        for value in (getattr(part, each.name) for each in fields(part))
    ]


@pytest.mark.parametrize("index", range(3))
def test_a_planned_step_does_not_change(monkeypatch, index):
    planned = dict[int, tuple[Step, list[Any]]]()
    schedule, settle = Scheduler.schedule, Scheduler.settle
    num_settled = 0

    def noted(scheduler: Scheduler) -> Step:
        step = schedule(scheduler)
        planned[id(step)] = step, content(step)
        return step

    def compared(scheduler: Scheduler, report: StepReport) -> None:
        nonlocal num_settled
        settle(scheduler, report)
        step, before = planned.pop(id(report.step))
        assert content(step) == before
        num_settled += bool(step.spans)

    monkeypatch.setattr(Scheduler, "schedule", noted)
    monkeypatch.setattr(Scheduler, "settle", compared)
    assert run_schedule("fake", 10, index)[1] is None
    assert num_settled > 5


def request_of(num_prompt: int, **options: Any) -> Request:
    return Request(0, list(range(num_prompt)), SamplingParams(max_tokens=8), seed=0, **options)


def test_to_plan_a_span_changes_no_request():
    request = request_of(9)
    before = {each.name: getattr(request, each.name) for each in fields(request)}
    planning = Planning()
    planning.add(Span(request, 5, 8, samples=False))
    planning.add_decodes([request], [8])
    assert {each.name: getattr(request, each.name) for each in fields(request)} == before
    assert [(span.start, span.stop) for span in planning.spans] == [(5, 8), (8, 9)]


def test_a_step_that_is_planned_before_the_one_before_it_is_read():
    scheduler, request = Scheduler(BlockAllocator(20, 4), 4, 16), request_of(5)
    scheduler.add(request)
    reports = []
    for num_ahead in (1, 2):
        reports.append(StepReport(scheduler.schedule()))
        scheduler.begun(reports[-1])
        assert request.num_computed == 4 + num_ahead and request.num_in_flight == num_ahead
    reports[0].choices = [SampledToken(request, 7, 0.0)]
    scheduler.settle(reports[0])
    assert [choice.token for choice in reports[0].choices] == [7]
    assert (request.num_computed, request.num_in_flight) == (6, 1)


def test_a_choice_of_a_token_that_is_known_does_not_count():
    scheduler, request = Scheduler(BlockAllocator(20, 4), 4, 16), request_of(5)
    scheduler.add(request)
    report = StepReport(scheduler.schedule(), choices=[SampledToken(request, 7, 0.0)])
    scheduler.begun(report)
    scheduler.foresee(request)
    assert request.num_in_flight == 0
    scheduler.settle(report)
    assert (report.choices, request.num_in_flight) == ([], 0)


def test_after_a_failure_nothing_is_computed_or_under_way():
    scheduler, request = Scheduler(BlockAllocator(20, 4), 4, 16), request_of(5)
    scheduler.add(request)
    scheduler.begun(StepReport(scheduler.schedule()))
    scheduler.recover([request])
    assert (request.num_computed, request.num_in_flight) == (0, 0)
    step = scheduler.schedule()
    assert [(span.start, span.stop) for span in step.spans] == [(0, 5)]
    assert not step.is_held_back, "no step is under way"

"""The scheduler asks every tier the same, one that keeps nothing included."""

from inspect import signature

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv_disk.tier import KVDiskTier
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.tier import NoTier, Prefetch, Tier

VERBS = [
    name
    for kind in (Prefetch, Tier)
    for name, each in vars(kind).items()
    if callable(each) and not name.startswith("_")
]


@pytest.mark.parametrize("kind", [NoTier, KVDiskTier])
def test_a_tier_has_the_methods_that_the_scheduler_calls(kind):
    assert len(VERBS) > 8
    for name in VERBS:
        asked, given = signature(getattr(Tier, name)), signature(getattr(kind, name))
        assert given.parameters.keys() == asked.parameters.keys(), name


class Shelf(NoTier):
    """Lets each prompt wait until :meth:`arrived` has been called twice."""

    def __init__(self) -> None:
        self.loading: dict[int, Request] = {}
        self.closed = self.calls = 0

    def ask(self, request: Request) -> bool:
        self.loading[request.id] = request
        return True

    def arrived(self, waits: bool) -> list[Request]:
        self.calls += 1
        here = list(self.loading.values()) if self.calls > 1 else []
        self.loading = {} if here else self.loading
        return here

    def close(self) -> None:
        self.closed += 1


def scheduler_with(tier: Shelf | None) -> tuple[Scheduler, Request]:
    opened = None if tier is None else lambda predict: tier
    scheduler = Scheduler(BlockAllocator(16, 4), 4, 8, open_tier=opened)
    request = Request(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=2), seed=0)
    scheduler.add(request)
    return scheduler, request


def test_without_a_tier_a_prompt_runs_at_once():
    scheduler, request = scheduler_with(None)
    step = scheduler.schedule()
    assert [span.request for span in step.spans] == [request]
    assert not scheduler.has_tier and step.stores == [] and scheduler.tier.metrics() is None


def test_a_prompt_waits_for_any_tier_that_says_so():
    scheduler, request = scheduler_with(Shelf())
    assert scheduler.has_tier and scheduler.levels().waiting == 1
    assert scheduler.schedule().spans == []
    assert [span.request for span in scheduler.schedule().spans] == [request]


def test_a_prompt_that_waits_for_a_closed_tier_runs():
    tier = Shelf()
    scheduler, request = scheduler_with(tier)
    scheduler.leave_tier()
    scheduler.leave_tier()  # there is none any more
    assert tier.closed == 1 and not scheduler.has_tier and scheduler.levels().waiting == 1
    assert [span.request for span in scheduler.schedule().spans] == [request]

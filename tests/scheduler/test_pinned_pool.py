"""One tenant pins all that it may: what happens to another one that needs the whole pool."""

import pytest
from test_scheduler import compute

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.options import Policy
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler

BLOCKS, SIZE = 64, 4


def run(scheduler: Scheduler, number: int, num_prompt: int, salt: bytes, retain=None) -> Request:
    """A request until its end; it must run from its first step on, without a pause."""
    tokens = [10_000 * number + i for i in range(num_prompt)]
    params = SamplingParams(max_tokens=2, retain=retain)
    request = Request(number, tokens, params, 0, salt=salt)
    scheduler.add(request)
    for _ in range(-(-num_prompt // 64) + 1):
        step = scheduler.schedule()
        assert [span.request for span in step.spans] == [request], "it waited"
        compute(scheduler, step)
    assert request.num_generated == 2
    scheduler.allocator.check_integrity()
    return request


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("salts", [1, 9])
def test_pins_make_nobody_wait_fail_or_lose_its_place(policy, salts):
    """Pins of one salt, or of many that one tenant makes up: others get the whole pool."""
    scheduler = Scheduler(BlockAllocator(BLOCKS, SIZE), 4, 64, policy=policy)
    pinned = [run(scheduler, i, 30, bytes([65 + i % salts]), "pin").pinned for i in range(20)]
    store = scheduler.allocator.store
    assert store.idle.num_pinned == (BLOCKS // 4 if salts == 1 else BLOCKS // 2)
    assert {each.reason for each in pinned} == {None, "max_pinned" if salts == 1 else "pool"}
    run(scheduler, 100, 30, b"other")
    assert store.idle.num_pinned > 0, "there was room beside the pins"
    run(scheduler, 101, BLOCKS * SIZE - 4, b"other")
    assert scheduler.num_preemptions == 0 and store.idle.num_pinned <= 1

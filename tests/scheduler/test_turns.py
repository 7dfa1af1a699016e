"""Short prompts overtake long ones, which lose little and never starve."""

import numpy as np
import pytest
from test_scheduler import compute, make_request, summary, with_prompts
from test_stall_bound import make_engine

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.options import Policy
from mlx_paged.scheduler import turns
from mlx_paged.scheduler.scheduler import Scheduler


def step_of(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Compute a step; returns its spans."""
    step = scheduler.schedule()
    compute(scheduler, step)
    return summary(step)


@pytest.fixture
def share(monkeypatch) -> int:
    monkeypatch.setattr(turns, "SHARE", 8)
    return 8


def test_short_prompts_overtake_those_that_wait_and_the_one_that_runs(share):
    scheduler = with_prompts(300, 250, 20, 30, prefill_chunk=64, num_blocks=500)
    assert step_of(scheduler) == [(2, 0, 20), (3, 0, 30), (0, 0, share)]
    assert step_of(scheduler) == [(2, 20, 21), (3, 30, 31), (0, share, share + 64)]
    scheduler.add(make_request(4, 10))
    assert step_of(scheduler)[2:] == [(4, 0, 10), (0, 72, 72 + share)]
    assert set(scheduler.running) == {0, 2, 3, 4}, "nobody else holds a place"


def test_the_shortest_come_first_and_all_of_a_step_is_theirs():
    scheduler = with_prompts(300, 40, 20, 30, prefill_chunk=64, num_blocks=500)
    assert step_of(scheduler) == [(2, 0, 20), (3, 0, 30), (1, 0, 14)]
    assert step_of(scheduler)[2:] == [(1, 14, 40), (0, 0, 38)]


def test_a_step_stays_short_until_those_that_overtook_have_their_first_tokens(share):
    scheduler = with_prompts(300, 20, prefill_chunk=64, num_blocks=500)
    step = scheduler.schedule()
    assert summary(step) == [(1, 0, 20), (0, 0, share)]
    (short,) = (span.request for span in step.spans if span.samples)
    short.num_in_flight = 1
    assert summary(scheduler.schedule()) == [(1, 20, 21), (0, share, 2 * share)]
    short.tokens.append(7)
    assert summary(scheduler.schedule())[1:] == [(0, 2 * share, 2 * share + 64)]


def test_a_prompt_that_ends_in_this_step_is_not_overtaken():
    scheduler = with_prompts(60, 3, prefill_chunk=64)
    assert summary(scheduler.schedule()) == [(0, 0, 60), (1, 0, 3)]


def test_a_prompt_half_as_long_is_computed_after_the_other():
    scheduler = with_prompts(300, 150, prefill_chunk=64, num_blocks=500)
    assert summary(scheduler.schedule()) == [(0, 0, 64)]


@pytest.mark.parametrize("runs", [True, False])
def test_a_preempted_request_is_not_overtaken(runs):
    scheduler = with_prompts(300, prefill_chunk=64, num_blocks=500)
    scheduler.waiting.peek().num_preempted = 1
    start = step_of(scheduler)[0][2] if runs else 0
    scheduler.add(make_request(1, 20))
    assert summary(scheduler.schedule()) == [(0, start, start + 64)]


def test_of_those_that_overtook_the_one_with_the_least_left_goes_on_first():
    scheduler = with_prompts(600, prefill_chunk=64, num_blocks=500)
    step_of(scheduler)
    scheduler.add(make_request(1, 140))
    step_of(scheduler)
    scheduler.add(make_request(2, 30))
    scheduler.budget.prefill_chunk = 20
    assert step_of(scheduler) == [(2, 0, 20)]
    scheduler.add(make_request(3, 20))
    assert step_of(scheduler) == [(2, 20, 30), (3, 0, 10)]


def test_steps_without_others_give_patience_back(share):
    scheduler = with_prompts(3000, prefill_chunk=64, num_blocks=999, max_running=99)
    (long,) = scheduler.waiting
    for i in range(20):
        scheduler.add(make_request(1 + i, 20, max_tokens=1))
        step_of(scheduler)
    assert long.num_overtaken == 20
    for _ in range(25):
        step_of(scheduler)
    assert long.num_overtaken == 0


def test_a_prompt_that_waits_keeps_its_blocks_when_it_is_overtaken():
    scheduler = with_prompts(300, 20, prefill_chunk=64, num_blocks=79)  # 75 and 5 would be needed
    assert summary(scheduler.schedule()) == [(0, 0, 64)]


@pytest.mark.parametrize(("priority", "overtakes"), [(0, True), (1, True), (2, False)])
def test_priorities_are_kept(priority, overtakes):
    scheduler = Scheduler(BlockAllocator(500, 4), 8, 64, policy=Policy.PRIORITY)
    long, short = make_request(0, 300), make_request(1, 20)
    long.priority, short.priority = 1, priority
    scheduler.add(long)
    scheduler.schedule()
    scheduler.add(short)
    assert (summary(scheduler.schedule())[0] == (1, 0, 20)) is overtakes


def test_a_short_prompt_does_not_overtake_through_a_higher_priority():
    scheduler = Scheduler(BlockAllocator(999, 4), 8, 64, policy=Policy.PRIORITY)
    first, urgent, short = (make_request(i, n) for i, n in enumerate((300, 299, 20)))
    first.priority = short.priority = 1
    for request in (first, urgent, short):
        scheduler.add(request)
    assert summary(scheduler.schedule()) == [(1, 0, 64)]


def test_prompts_that_wait_for_their_turn_hold_no_place():
    """The prompt of 90 overtakes the first one, is overtaken by others, and waits."""
    scheduler = with_prompts(300, 90, prefill_chunk=64, num_blocks=500, max_running=3)
    assert summary(scheduler.schedule()) == [(1, 0, 64)]
    for request_id, length in ((2, 5), (3, 12)):
        scheduler.add(make_request(request_id, length, max_tokens=2))
    scheduler.budget.prefill_chunk = 17
    first = step_of(scheduler)
    assert first == [(2, 0, 5), (3, 0, 12)], "the step has room for no more"
    assert set(scheduler.running) == {1, 2, 3}
    second = step_of(scheduler)
    assert second == [(2, 5, 6), (3, 12, 13), (1, 64, 81)], "the third place"


def test_who_overtakes_leaves_a_place_to_the_first_one():
    scheduler = with_prompts(300, 20, prefill_chunk=64, num_blocks=500, max_running=2)
    step_of(scheduler)
    scheduler.add(make_request(2, 20))
    assert [step_of(scheduler)[0] for _ in range(2)] == [(1, 20, 21), (1, 21, 22)]
    assert len(scheduler.waiting) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_short", [1, 9])
def test_a_long_prompt_does_not_starve_behind_a_flood_of_short_ones(num_short, share):
    """After the steps of its patience it gets half of each step, and the others the other half."""
    scheduler = with_prompts(2000, prefill_chunk=64, num_blocks=5000, max_running=999)
    (long,) = scheduler.waiting
    steps, served = 0, 0
    while long.num_pending > 1:
        for i in range(num_short):
            scheduler.add(make_request(1 + steps * num_short + i, 20, max_tokens=1))
        served += sum(request_id != 0 for request_id, *_ in step_of(scheduler))
        steps += 1
        assert steps <= turns.PATIENCE + 2 * 2000 // 64 + 1
    assert steps >= turns.PATIENCE and served >= steps


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("num_tokens", [16, 64, 120])
def test_short_prompts_behind_long_ones_wait_twice_as_long_as_alone_at_most(num_tokens, lookahead):
    alone, _ = first_tokens(0, 4, num_tokens, lookahead)
    beside, long = first_tokens(4, 4, num_tokens, lookahead)
    _, long_alone = first_tokens(4, 0, num_tokens, lookahead)
    assert np.percentile(beside, 95) <= 2 * np.percentile(alone, 95)
    assert max(long) <= 1.1 * max(long_alone) and np.mean(long) <= 1.1 * np.mean(long_alone)


def first_tokens(
    num_long: int, num_short: int, num_tokens: int, lookahead: bool
) -> tuple[list[float], list[float]]:
    """Seconds to the first tokens of short and of long prompts that arrive together, long ones
    first, while eight streams run."""
    engine, clock = make_engine(None, lookahead)
    for _ in range(8):
        engine.add_request([1, 2, 3], max_tokens=4000)
    for _ in range(20):
        engine.step()
    arrival, times = clock.now, dict[int, float]()
    lengths = [4500] * num_long + [num_tokens] * num_short
    ids = [engine.add_request([i] * length, max_tokens=9) for i, length in enumerate(lengths)]
    while len(times) < len(ids):
        for output in engine.step():
            if output.request_id in ids:
                times.setdefault(output.request_id, clock.now - arrival)
    seconds = [times[request_id] for request_id in ids]
    return seconds[num_long:], seconds[:num_long]

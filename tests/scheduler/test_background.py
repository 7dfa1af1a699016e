"""Requests of the background run when nothing else waits, and give way first."""

import pytest
from test_scheduler import compute, summary

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.options import Policy
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler import turns
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step
from mlx_paged.scheduler.waiting import BACKGROUND_SECONDS
from tests.support.simulation.fake_model import FakeClock

ORDERS = [*Policy]


class Run:
    """A scheduler with 4 places and a pool, whose steps take a second each."""

    def __init__(self, policy: Policy, num_blocks: int = 200, max_running: int = 4) -> None:
        self.clock, self._num = FakeClock(), 0
        allocator = BlockAllocator(num_blocks, 4)
        self.scheduler = Scheduler(allocator, max_running, 16, policy=policy, clock=self.clock)

    def add(self, num_prompt: int, max_tokens: int = 4, background: bool = False) -> Request:
        tokens = [1000 * self._num + i for i in range(num_prompt)]
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(self._num, tokens, params, 0, is_background=background)
        request.arrival_time = self.clock()
        self._num += 1
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 1.0) -> Step:
        self.clock.now += seconds
        step = self.scheduler.schedule()
        compute(self.scheduler, step)
        self.scheduler.allocator.check_integrity()
        return step

    @property
    def running(self) -> set[int]:
        return set(self.scheduler.running)


@pytest.mark.parametrize("policy", ORDERS)
def test_others_start_first_whoever_came_first(policy):
    run = Run(policy, max_running=1)
    back, *others = [run.add(4, 1, background=number == 0) for number in range(4)]
    for request in (*others, back):
        assert summary(run.step()) == [(request.id, 0, 4)]


@pytest.mark.parametrize("policy", ORDERS)
def test_it_runs_beside_others_while_places_are_free(policy):
    run = Run(policy)
    back, other = run.add(4, 9, background=True), run.add(4, 9)
    run.step()
    assert run.running == {back.id, other.id} and not run.scheduler.num_preemptions


@pytest.mark.parametrize("policy", ORDERS)
def test_it_gives_its_place_to_one_that_waits_and_goes_on_later(policy):
    run = Run(policy)
    backs = [run.add(4, 30, background=True) for _ in range(4)]
    for _ in range(3):
        run.step()
    others = [run.add(4, 2) for _ in range(2)]
    assert run.step().prompt_tokens == 8, "both start at once"
    assert run.running == {*(r.id for r in others), *(r.id for r in backs[:2])}
    assert [r.num_preempted for r in backs] == [0, 0, 1, 1], "the newest ones"
    for _ in range(40):
        run.step()
    assert [r.num_generated for r in backs] == [30] * 4


@pytest.mark.parametrize("policy", ORDERS)
def test_it_gives_its_blocks_to_one_that_waits(policy):
    run = Run(policy, num_blocks=20)
    back = run.add(60, 9, background=True)
    for _ in range(5):
        run.step()
    other = run.add(40, 2)
    run.step()
    assert run.running == {other.id} and back.num_preempted == 1


def test_it_keeps_its_blocks_if_they_are_not_enough():
    run = Run(Policy.FCFS, num_blocks=20)
    holder, back = run.add(40, 20), run.add(12, 20, background=True)
    for _ in range(5):
        run.step()
    large = run.add(60, 2)
    run.step()
    assert run.running == {holder.id, back.id} and large in run.scheduler.waiting


@pytest.mark.parametrize("policy", ORDERS)
def test_it_is_preempted_first_when_memory_is_short(policy):
    run = Run(policy, num_blocks=12)
    back, other = run.add(8, 30, background=True), run.add(8, 30)
    while not run.scheduler.num_preemptions:
        run.step()
    assert (back.num_preempted, other.num_preempted) == (1, 0), "the other one is newer"


@pytest.mark.parametrize("of_background", ["older", "newer"])
def test_its_blocks_are_evicted_first(of_background):
    run = Run(Policy.FCFS, num_blocks=20)
    first, second = (run.add(16, 1, background=of_background == age) for age in ("older", "newer"))
    run.step(), run.step()
    assert len(run.scheduler.allocator.store.idle) == 8
    back, other = (first, second) if first.is_background else (second, first)
    run.add(60, 1)  # takes the 12 blocks that never had content, and 3 of the idle ones
    run.step(), run.step(), run.step(), run.step()
    known = [run.scheduler.allocator.cached_prefix([*r.tokens[:16], 0]) for r in (back, other)]
    assert known[1] == 16 > known[0]


@pytest.mark.parametrize("policy", ORDERS)
def test_its_prompt_gets_what_others_leave_of_a_step(policy):
    run = Run(policy)
    back = run.add(100, 1, background=True)
    assert summary(run.step()) == [(back.id, 0, 16)]
    run.add(20, 1), run.add(20, 1)
    spans = [summary(run.step()) for _ in range(3)]
    of_back = [sum(stop - start for i, start, stop in each if i == back.id) for each in spans]
    assert of_back == [0, 0, 8]


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("max_running", [1, 4])
@pytest.mark.parametrize("num_prompt", [4, 90])
def test_one_at_a_time_runs_after_some_seconds_though_others_wait(policy, max_running, num_prompt):
    """More prompts arrive than a step has room for."""
    run = Run(policy, max_running=max_running)
    first, second = (run.add(num_prompt, 3, background=True) for _ in range(2))
    start, ended = run.clock(), dict[int, float]()
    for _ in range(200):
        run.add(8, 1), run.add(9, 1), run.add(9, 1)
        run.step()
        for request in (first, second):
            if request.num_generated == 3:
                ended.setdefault(request.id, run.clock() - start)
        if run.scheduler.waiting.is_last(second):
            assert not second.num_computed or first.id in ended
        if len(ended) == 2:
            break
    most = BACKGROUND_SECONDS + turns.PATIENCE + 2 * (-(-num_prompt // 16) + 3)
    assert BACKGROUND_SECONDS < ended[first.id] <= most
    assert BACKGROUND_SECONDS < ended[second.id] - ended[first.id] <= most


def test_an_aborted_one_is_promoted_no_more():
    run = Run(Policy.FCFS, max_running=1)
    run.add(4, 200)
    first, second = (run.add(4, 3, background=True) for _ in range(2))
    for _ in range(12):
        run.step()
    run.add(4, 1)
    run.step()
    assert run.scheduler.waiting.peek() is first
    run.scheduler.complete(first)
    run.step()
    assert run.scheduler.waiting.peek() is second


@pytest.mark.parametrize("policy", ORDERS)
def test_one_that_is_promoted_keeps_its_place(policy):
    run = Run(policy, max_running=1)
    back = run.add(4, 60, background=True)
    first = run.add(4, 30)
    while back.id not in run.running:
        run.add(4, 30)
        run.step()
        assert run.clock() < 100
    for _ in range(20):
        run.step()
    assert run.running == {back.id} and not back.num_preempted
    assert first.num_generated == 30


def test_one_that_lost_its_place_is_promoted_no_more():
    """It is preempted for want of blocks, and waits for its turn as all others do."""
    run = Run(Policy.FCFS, num_blocks=16, max_running=2)
    holder, back = run.add(8, 50), run.add(4, 50, background=True)
    others = [run.add(4, 3) for _ in range(9)]
    while back.num_generated < 9:
        run.step()
    before = back.num_preempted
    while back.num_preempted == before:
        run.step()
        assert run.clock() < 100
    assert holder.num_generated < 50 and others[-1] in run.scheduler.waiting
    assert run.scheduler.waiting.peek() is not back


def test_none_is_promoted_while_one_of_them_is_computed():
    run = Run(Policy.FCFS, max_running=2)
    run.add(4, 200)
    first, second = (run.add(4, 200, background=True) for _ in range(2))
    for _ in range(30):
        run.step()
    assert first.num_generated > 20
    other = run.add(4, 5)
    assert run.scheduler.waiting.peek() is other
    run.step()
    assert other.id in run.running and second in run.scheduler.waiting


@pytest.mark.parametrize("seconds", [0, 300])
def test_the_seconds_count_from_its_arrival_or_its_last_token(seconds):
    """Before, nothing waits for so long that the scheduler need not look at the clock."""
    run = Run(Policy.FCFS, max_running=1)
    run.clock.now += 1000
    back = run.add(4, 600, background=True)
    for _ in range(seconds):
        run.step()
    others = [run.add(4, 3) for _ in range(3)]
    for _ in range(8):
        run.step()
    assert back.id not in run.running and others[1].num_generated == 3
    assert back.num_preempted == (seconds > 0)


@pytest.mark.parametrize("policy", ORDERS)
def test_its_prompt_comes_after_those_that_began_later(policy):
    run = Run(policy)
    back = run.add(100, 1, background=True)
    run.step()
    other = run.add(100, 1)
    for _ in range(6):
        assert summary(run.step())[0][0] == other.id
    assert back.num_computed == 16


@pytest.mark.parametrize("place", range(3))
def test_it_gives_way_before_a_client_of_which_several_run(place):
    run = Run(Policy.FAIR, num_blocks=14)
    requests = [run.add(8, 30, background=number == place) for number in range(3)]
    while not run.scheduler.num_preemptions:
        run.step()
    assert [r.is_background for r in requests if r.num_preempted] == [True]

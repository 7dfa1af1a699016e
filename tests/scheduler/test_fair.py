"""Clients take turns by tokens computed, and none waits long for its first token."""

import random
from collections import Counter

import pytest
from test_scheduler import compute
from test_stall_bound import FakeMachine

from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.shares import FairQueue
from tests.support.simulation.fake_model import FakeClock

CHUNK = 64


def make_engine(
    policy: Policy = Policy.FAIR,
    lookahead: bool = False,
    num_blocks: int = 4000,
    victims: PreemptionPolicy = PreemptionPolicy.NEWEST,
) -> EngineCore:
    """An engine of 8 places on a machine that samples token 7 always."""
    clock, allocator = FakeClock(), BlockAllocator(num_blocks, 16)
    scheduler = Scheduler(allocator, 8, CHUNK, policy=policy, victims=victims, clock=clock)
    stats = EngineStats(16, 1, num_blocks)
    return EngineCore(scheduler, FakeMachine(clock), stats, lookahead=lookahead)


def steps_to_first_token(engine: EngineCore, share: tuple[str, ...], num_prompt: int) -> int:
    request_id = engine.add_request([5] * num_prompt, max_tokens=1, share=share)
    for steps in range(1, 2000):
        if any(output.request_id == request_id for output in engine.step()):
            return steps
    raise AssertionError("no first token in 2,000 steps")


def flood(engine: EngineCore, rng: random.Random, count: int, longest: int) -> None:
    """Requests of one client, whose prompts have nothing in common."""
    for _ in range(count):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, longest))]
        engine.add_request(prompt, max_tokens=rng.choice((1, 20, 200)), share=("many",))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("longest", [20, 700])
@pytest.mark.parametrize("num_prompt", [1, CHUNK, 5 * CHUNK, 15 * CHUNK])
@pytest.mark.parametrize("seed", range(2))
def test_500_requests_delay_another_clients_first_token_by_two_steps(
    seed, num_prompt, longest, lookahead
):
    alone = steps_to_first_token(make_engine(lookahead=lookahead), ("few",), num_prompt)
    rng, engine = random.Random(seed), make_engine(lookahead=lookahead)
    flood(engine, rng, 500, longest)
    for _ in range(8):
        for _ in range(rng.randint(0, 9)):
            engine.step()
        steps = steps_to_first_token(engine, ("few",), num_prompt)
        assert steps <= alone + 2 + lookahead, "with lookahead, tokens are seen a step later"
        engine.scheduler.allocator.check_integrity()
    assert len(engine.scheduler.waiting) > 100, "the flood is over"


def test_first_come_first_served_would_delay_it_by_hundreds():
    engine = make_engine(Policy.FCFS)
    flood(engine, random.Random(0), 100, 20)
    assert steps_to_first_token(engine, ("few",), 1) > 200


@pytest.mark.parametrize("victims", PreemptionPolicy)
def test_blocks_are_taken_from_the_client_that_holds_most(victims):
    """The pool is full of other requests when one arrives that needs a quarter of it."""
    engine = make_engine(num_blocks=100, victims=victims)
    for share, count in (("most", 4), ("some", 2)):
        for _ in range(count):
            engine.add_request([1, 2, 3], max_tokens=600, share=(share,))
    while engine.scheduler.allocator.store.num_available > 8:
        engine.step()
    assert not engine.scheduler.num_preemptions
    assert steps_to_first_token(engine, ("new",), 25 * 16 - 20) <= 7 + 2
    preempted = {r.share: r.num_preempted for r in engine._requests.values() if r.num_preempted}
    assert preempted == {("most",): 1}


def test_one_request_each_is_kept():
    """Eight clients run a request each: the ninth waits for a place, and preempts nobody."""
    engine = make_engine()
    for client in range(9):
        for _ in range(3):
            engine.add_request([1, 2, 3], max_tokens=50, share=(f"client {client}",))
    for _ in range(30):
        engine.step()
    shares = Counter(request.share for request in engine.scheduler.running.values())
    assert len(shares) == 8 and set(shares.values()) == {1}
    before = engine.scheduler.num_preemptions
    for _ in range(15):
        engine.step()
    assert engine.scheduler.num_preemptions == before


def served(engine: EngineCore, steps: int) -> Counter[str]:
    """Tokens computed by client and by the first part of it in some steps."""
    tokens = Counter[str]()

    def count(launched) -> None:
        for span in launched.step.spans:
            for depth in {1, len(span.request.share)}:
                tokens[span.request.share[:depth]] += span.stop - span.start

    launch = engine.runner.launch

    def launched(*args):
        found = launch(*args)
        count(found)
        return found

    engine.runner.launch = launched
    for _ in range(steps):
        engine.step()
    return tokens


@pytest.mark.parametrize(("lengths", "answers"), [((60, 20), (2, 2)), ((20, 20), (40, 5))])
def test_clients_that_ask_for_more_than_there_is_get_the_same(lengths, answers):
    """Prompts of one client are longer, or its answers are."""
    engine, rng = make_engine(), random.Random(0)
    for share, length, answer in zip(("a", "b"), lengths, answers, strict=True):
        for _ in range(16000 // length):
            prompt = [rng.randrange(999) for _ in range(length)]
            engine.add_request(prompt, max_tokens=answer, share=(share,))
    tokens = served(engine, 300)
    assert tokens["a",] == pytest.approx(tokens["b",], rel=0.1)


def test_a_thousand_users_of_a_key_have_the_share_of_their_key():
    engine, rng = make_engine(), random.Random(0)
    for user in range(1000):
        prompt = [rng.randrange(999) for _ in range(100)]
        engine.add_request(prompt, max_tokens=10, share=("key a", f"user {user}"))
    for _ in range(400):
        prompt = [rng.randrange(999) for _ in range(100)]
        engine.add_request(prompt, max_tokens=10, share=("key b", "user"))
    tokens = served(engine, 250)
    assert tokens["key a",] == pytest.approx(tokens["key b",], rel=0.1)
    by_user = [n for (_, *user), n in tokens.items() if user and user != ["user"]]
    assert len(by_user) > 50 and max(by_user) <= 110


def test_parts_of_a_client_take_turns_within_it():
    engine, rng = make_engine(), random.Random(0)
    for share, count in ((("a", "x"), 90), (("a", "y"), 90), (("b",), 180)):
        for _ in range(count):
            prompt = [rng.randrange(999) for _ in range(100)]
            engine.add_request(prompt, max_tokens=10, share=share)
    tokens = served(engine, 300)
    assert tokens["a",] == pytest.approx(tokens["b",], rel=0.1)
    assert tokens["a", "x"] == pytest.approx(tokens["a", "y"], rel=0.1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_everybody_ends_whoever_else_arrives(seed):
    """New clients arrive for ever. Those that were there before end nevertheless."""
    rng, engine = random.Random(seed), make_engine(num_blocks=60)
    old = [
        engine.add_request([rng.randrange(99)] * 300, max_tokens=30, share=("old",))
        for _ in range(6)
    ]
    for step in range(4000):
        if rng.random() < 0.5:
            prompt = [rng.randrange(999)] * rng.randint(1, CHUNK)
            engine.add_request(prompt, max_tokens=rng.randint(1, 6), share=(f"client {step}",))
        engine.step()
        if step % 50 == 0:
            engine.scheduler.allocator.check_integrity()
        if not any(map(engine.is_open, old)):
            return
    raise AssertionError("some of them starve")


def test_a_single_client_is_served_as_first_come_first_served():
    steps = []
    for policy in (Policy.FCFS, Policy.FAIR):
        engine = make_engine(policy, num_blocks=200)
        flood(engine, random.Random(3), 60, 300)
        steps.append(spans_of(engine))
    assert steps[0] == steps[1]


def spans_of(engine: EngineCore) -> list[list[tuple[int, int, int]]]:
    found = []
    while engine.has_work:
        step = engine.scheduler.schedule()
        found.append([(s.request.id, s.start, s.stop) for s in step.spans])
        compute(engine.scheduler, step)
        engine._requests = {
            i: r for i, r in engine._requests.items() if r.num_generated < r.params.max_tokens
        }
    return found


# The queue alone


def make_request(request_id: int, share: tuple[str, ...], tokens: int = 1) -> Request:
    return Request(request_id, [1] * tokens, SamplingParams(), seed=0, share=share)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_the_queue_agrees_with_one_that_looks_at_everything(seed):
    rng, queue = random.Random(seed), FairQueue()
    waiting, running = dict[int, Request](), dict[int, Request]()
    for number in range(600):
        action = rng.choice(("push", "push", "start", "start", "stop", "preempt", "abort"))
        if action == "push":
            share = tuple(rng.choice("abc") for _ in range(rng.randint(0, 3)))
            waiting[number] = make_request(number, share, rng.randint(1, 50))
            queue.push(waiting[number])
        elif action == "start" and waiting:
            first = queue.peek()
            assert first is waiting[first.id]
            returning = [r for r in waiting.values() if r.num_preempted]
            idle = clients(waiting) - clients(running) - clients(returning_of(waiting))
            if returning:
                assert first is min(returning, key=lambda r: r.id)
            elif idle:
                assert clients([first]) <= idle
            same = [r for r in waiting.values() if (r.share, r.num_preempted) == (first.share, 0)]
            assert returning or first is min(same, key=lambda r: r.id)
            assert queue.shortest().share == first.share or returning
            queue.remove(first)
            running[first.id] = waiting.pop(first.id)
            queue.started(first)
        elif action in ("stop", "preempt") and running:
            request = running.pop(rng.choice([*running]))
            request.tokens += [1] * rng.randint(0, 9)
            queue.stopped(request)
            if action == "preempt":
                request.num_preempted += 1
                waiting[request.id] = request
                queue.push(request)
        elif action == "abort" and waiting:
            request = waiting.pop(rng.choice([*waiting]))
            assert request in queue
            queue.remove(request)
            assert request not in queue
        started = clients(running) | clients(returning_of(waiting))
        assert sorted(r.id for r in queue) == sorted(waiting)
        assert len(queue) == len(waiting)
        assert queue.has_several == (len(clients(running) | clients(waiting)) > 1)
        newcomer = queue.newcomer()
        fresh = clients(r for r in waiting.values() if not r.num_preempted)
        assert (newcomer is not None) == (queue.has_several and bool(fresh - started))
        assert newcomer is None or clients([newcomer]) <= fresh - started


def clients(requests) -> set[str]:
    found = requests.values() if isinstance(requests, dict) else requests
    return {"".join(request.share[:1]) for request in found}


def returning_of(waiting: dict[int, Request]) -> list[Request]:
    return [request for request in waiting.values() if request.num_preempted]


def test_what_ended_is_not_kept():
    queue = FairQueue()
    requests = [make_request(i, ("key", f"user {i}", "x")) for i in range(800)]
    for request in requests:
        queue.push(request)
    for request in requests[:-1]:
        queue.remove(request)
        queue.started(request)
        queue.stopped(request)
    whole = queue._whole
    assert len(whole.parts["key"].parts) == 1 and not queue._num_running
    for turns in (whole.turns, whole.parts["key"].turns, queue._idle):
        queue.push(make_request(5000, ("other",)))
        queue.remove(next(r for r in queue if r.id == 5000))
        assert len(turns._heap) <= 810
    queue.remove(requests[-1])
    assert not whole.parts and not queue


@pytest.mark.slow
def test_ten_thousand_requests_delay_another_client_by_two_steps():
    alone = steps_to_first_token(make_engine(), ("few",), 3 * CHUNK)
    engine = make_engine()
    flood(engine, random.Random(7), 10_000, 60)
    for _ in range(20):
        engine.step()
        assert steps_to_first_token(engine, ("few",), 3 * CHUNK) <= alone + 2
    assert len(engine.scheduler.waiting) > 9_000

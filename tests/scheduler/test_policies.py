"""Which request is admitted next, and which one is preempted."""

import random

import pytest

from mlx_paged.options import Policy, PreemptionPolicy
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.policies import AGEING, WaitingQueue, choose_preempted


def make_request(
    request_id: int, num_prompt: int = 1, priority: int = 0, preempted: int = 0, arrival: float = 0
) -> Request:
    request = Request(request_id, [1] * num_prompt, SamplingParams(), seed=0, priority=priority)
    request.num_preempted = preempted
    request.arrival_time = arrival
    return request


def ids(queue: WaitingQueue) -> list[int]:
    return [request.id for request in queue]


def in_order(requests: list[Request], policy: Policy, now: float) -> list[int]:
    """Request ids in the order that the policy defines at time `now`."""
    ordered = sorted(requests, key=lambda r: r.id)
    if policy is Policy.SHORTEST:
        ordered.sort(key=lambda r: r.num_tokens - AGEING * (now - r.arrival_time))
    preempted = sorted((r for r in ordered if r.num_preempted), key=lambda r: r.id)
    ordered = preempted + [r for r in ordered if not r.num_preempted]
    if policy is Policy.PRIORITY:
        ordered.sort(key=lambda r: r.priority)
    return [r.id for r in ordered]


def shortest_of(requests: list[Request], policy: Policy, first: int) -> int:
    """The id of the shortest, unless the order alone decides who comes first."""
    (head,) = [request for request in requests if request.id == first]
    if head.num_preempted or policy is Policy.SHORTEST:
        return first
    peers = [r for r in requests if policy is Policy.FCFS or r.priority == head.priority]
    return min(peers, key=lambda request: (request.num_tokens, request.id)).id


def pop(queue: WaitingQueue) -> Request:
    """Remove the first one."""
    request = queue.peek()
    queue.remove(request)
    return request


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", [policy for policy in Policy if policy is not Policy.FAIR])
def test_any_pushes_pops_and_removals_leave_the_order_of_the_policy(policy, seed):
    rng = random.Random(seed)
    queue, waiting, out = WaitingQueue(policy), [], []
    for now in range(400):
        action = rng.choice(["push", "push", "push back", "pop", "remove"])
        if action == "push":
            request = make_request(now, rng.randint(1, 900), rng.randint(-1, 1), arrival=now / 128)
            queue.push(request)
            waiting.append(request)
        elif action == "push back" and out:
            request = out.pop(rng.randrange(len(out)))
            request.num_preempted += rng.randint(0, 1)
            queue.push(request)
            waiting.append(request)
        elif action in ("pop", "remove") and waiting:
            request = queue.peek() if action == "pop" else rng.choice(waiting)
            queue.remove(request)
            waiting.remove(request)
            out.append(request)
            assert request not in queue
        expected = in_order(waiting, policy, now)
        assert ids(queue) == expected
        assert len(queue) == len(waiting) and bool(queue) == bool(waiting)
        assert all(request in queue for request in waiting)
        assert not waiting or queue.peek().id == expected[0]
        assert not waiting or queue.shortest().id == shortest_of(waiting, policy, expected[0])


@pytest.mark.parametrize(
    "policy, expected",
    [
        (Policy.FCFS, [2, 3, 0, 1, 4]),
        (Policy.PRIORITY, [3, 1, 2, 0, 4]),
        (Policy.SHORTEST, [2, 3, 4, 1, 0]),
    ],
)
def test_the_order_of_five_requests(policy, expected):
    queue = WaitingQueue(policy)
    queue.push(make_request(3, 50, priority=-1, preempted=1))
    queue.push(make_request(0, 30, priority=0))
    queue.push(make_request(1, 20, priority=-1))
    queue.push(make_request(2, 70, priority=0, preempted=2))
    queue.push(make_request(4, 10, priority=0))
    assert [pop(queue).id for _ in range(5)] == expected


@pytest.mark.parametrize("arrival, expected", [(0.098, [1, 0]), (0.102, [0, 1])])
def test_a_long_prompt_is_overtaken_only_until_it_has_waited_out_its_length(arrival, expected):
    queue = WaitingQueue(Policy.SHORTEST)
    queue.push(make_request(1, 1, arrival=arrival))
    queue.push(make_request(0, 101, arrival=0))
    assert ids(queue) == expected


def test_a_removed_request_takes_its_latest_place_when_it_comes_back():
    queue = WaitingQueue(Policy.PRIORITY)
    first, second = make_request(0, priority=1), make_request(1, priority=2)
    queue.push(first)
    queue.push(second)
    queue.remove(second)
    second.priority = 0
    queue.push(second)
    assert ids(queue) == [1, 0] and len(queue) == 2
    assert [pop(queue), pop(queue)] == [second, first]
    assert not queue


def test_removed_requests_are_not_kept():
    queue = WaitingQueue()
    requests = [make_request(i) for i in range(4096)]
    for request in requests:
        queue.push(request)
    for request in requests[1:]:
        queue.remove(request)
        assert max(len(queue._heap), len(queue._by_length)) <= 2 * len(queue)
    assert pop(queue) is requests[0]
    assert not queue._heap and not queue._by_length


def test_requests_may_be_removed_while_the_queue_is_walked():
    queue = WaitingQueue()
    for i in range(8):
        queue.push(make_request(i))
    for request in queue:
        queue.remove(request)
    assert not queue


def test_a_policy_may_be_given_by_name():
    assert WaitingQueue("shortest").policy is Policy.SHORTEST


def test_mistakes_are_named():
    queue, request = WaitingQueue(), make_request(7)
    with pytest.raises(AssertionError, match="request 7 does not wait"):
        queue.remove(request)
    queue.push(request)
    with pytest.raises(AssertionError, match="request 7 waits already"):
        queue.push(request)
    queue.remove(request)
    for look in (queue.peek, queue.shortest):
        with pytest.raises(IndexError):
            look()


def running(request_id: int, num_computed: int, num_generated: int, priority: int = 0) -> Request:
    request = make_request(request_id, 5, priority)
    request.tokens += [2] * num_generated
    request.num_computed = num_computed
    return request


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PreemptionPolicy.NEWEST, 4),
        (PreemptionPolicy.LONGEST, 2),
        (PreemptionPolicy.FEWEST_GENERATED, 3),
    ],
)
def test_each_policy_has_its_victim(policy, expected):
    candidates = [running(1, 9, 4), running(2, 30, 7), running(3, 5, 1), running(4, 12, 6)]
    assert choose_preempted(candidates, policy).id == expected


@pytest.mark.parametrize("policy", PreemptionPolicy)
def test_the_largest_priority_number_gives_way_first_and_of_equals_the_newest(policy):
    candidates = [running(1, 9, 4), running(2, 9, 4, priority=3), running(3, 9, 4, priority=3)]
    assert choose_preempted(candidates, policy).id == 3
    assert choose_preempted([*candidates[:1], running(5, 99, 0, priority=-1)], policy).id == 1

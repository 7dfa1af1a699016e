"""Who gives way when no block is left."""

import pytest

from mlx_paged import SamplingParams
from mlx_paged.request import Request
from mlx_paged.scheduler.policies import PreemptionPolicy, choose_preempted


def request(request_id: int, num_computed: int, num_generated: int, priority: int = 0) -> Request:
    made = Request(request_id, [1] * 5, SamplingParams(), seed=0, priority=priority)
    made.tokens += [2] * num_generated
    made.num_computed = num_computed
    return made


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (PreemptionPolicy.NEWEST, 4),
        (PreemptionPolicy.LONGEST, 2),
        (PreemptionPolicy.FEWEST_GENERATED, 3),
    ],
)
def test_each_policy_has_its_victim(policy, expected):
    candidates = [request(1, 9, 4), request(2, 30, 7), request(3, 5, 1), request(4, 12, 6)]
    assert choose_preempted(candidates, policy).id == expected


@pytest.mark.parametrize("policy", PreemptionPolicy)
def test_the_largest_priority_number_gives_way_first_and_of_equals_the_newest(policy):
    candidates = [request(1, 9, 4), request(2, 9, 4, priority=3), request(3, 9, 4, priority=3)]
    assert choose_preempted(candidates, policy).id == 3
    assert choose_preempted([*candidates[:1], request(5, 99, 0, priority=-1)], policy).id == 1

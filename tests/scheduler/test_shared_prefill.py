"""Which requests wait for K/V that another request computes."""

import pytest

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import is_under_way
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span

BLOCK = 8
LEADER = list(range(100, 140))


def request(tokens: list[int]) -> Request:
    return Request(1, tokens, SamplingParams(), seed=0)


def computing(start: int, stop: int) -> Planning:
    planning = Planning()
    planning.add(Span(Request(0, LEADER, SamplingParams(), seed=0), start, stop, False))
    return planning


@pytest.mark.parametrize(
    ("tokens", "start", "stop", "budget", "waits"),
    [
        (LEADER, 0, 40, 99, True),
        (LEADER, 16, 32, 99, True),
        ([1, *LEADER[1:]], 16, 32, 99, False),  # the same tokens after others
        (LEADER[:16], 16, 40, 99, False),  # all that it needs is there
        (LEADER[:16] + [0] * 16, 0, 40, 99, True),  # a half
        (LEADER[:16] + [0] * 17, 0, 40, 99, False),
        (LEADER[:16] + [0] * 17, 0, 40, 32, True),  # a half of what the step takes
        (LEADER, 0, 7, 99, False),  # no block gets full
        (LEADER[:17], 0, 15, 2, True),
        (LEADER[:16], 8, 16, 99, True),  # all but its last token, by copying a block
    ],
)
def test_a_request_waits_if_half_of_its_work_is_being_done(tokens, start, stop, budget, waits):
    assert is_under_way(request(tokens), computing(start, stop), budget, BLOCK) is waits


def test_a_decode_is_nothing_to_wait_for():
    assert not is_under_way(request(LEADER), computing(39, 40), 99, BLOCK)

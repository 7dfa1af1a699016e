"""What a step's numbers count."""

import pytest

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span, Step


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 3)], 3),
        ([(2, 5)], 3),
        ([(5, 6)], 0),
        ([(3, 8)], 2),  # a preempted request computes its generated tokens again
        ([(0, 3), (4, 5), (7, 8)], 4),
    ],
    ids=["head", "tail", "decode", "recomputed", "several"],
)
def test_prompt_tokens_are_those_before_the_first_generated_one(spans, expected):
    step = Step()
    for i, (start, stop) in enumerate(spans):
        step.add(Span(request_of(i), start, stop, samples=stop == 8))
    assert step.prompt_tokens == expected


def request_of(index: int) -> Request:
    """Five tokens of a prompt, three generated ones."""
    request = Request(id=index, tokens=[1] * 5, params=SamplingParams(), seed=0)
    request.tokens += [2] * 3
    return request


def test_a_decode_may_compute_the_last_token_of_a_prompt():
    step = Step()
    step.add_decodes([request_of(i) for i in range(4)], [4, 5, 7, 4])
    assert step.prompt_tokens == 2

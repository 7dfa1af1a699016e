"""The beam search with which the simulation compares an engine's."""

from collections.abc import Sequence

import numpy as np
import pytest

from mlx_paged import SamplingParams
from tests.support.simulation.schedules import run_schedule
from tests.support.simulation.solo_runs import BeamOptions, plain_beam_search

pytestmark = pytest.mark.usefixtures("limits_of_the_disk")

ONE_BEAM = BeamOptions(num_beams=1, length_penalty=1.0, early_stopping=False)
PARAMS = SamplingParams(max_tokens=2)


def logprobs(tokens: Sequence[int]) -> np.ndarray:
    """Token 0 is first by .01; what follows token 1 is far better."""
    return np.array({(7,): [-1.0, -1.01], (7, 0): [-3.0, -4.0], (7, 1): [-1.0, -4.0]}[(*tokens,)])


def test_a_hypothesis_wins_within_the_margin_alone():
    def found(margin: float) -> list[list[int]]:
        return plain_beam_search(logprobs, [7], PARAMS, ONE_BEAM, [[1, 0]], margin)

    assert plain_beam_search(logprobs, [7], PARAMS, ONE_BEAM) == [[0, 0]]
    assert found(0.009) == [[0, 0]]
    assert found(0.011) == [[1, 0]]


def test_a_search_that_keeps_the_other_of_two_equals_is_right():
    """With quantized K/V, two tokens whose hypotheses are .0006 apart."""
    counts, failure = run_schedule("all", 6512, 11)
    assert failure is None and counts["beams"]

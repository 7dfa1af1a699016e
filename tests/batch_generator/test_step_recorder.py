"""What a batch generator counts of its steps, and how its rows choose their tokens."""

from dataclasses import asdict

import pytest
from mlx_lm.generate_utils import BatchCounters
from mlx_lm.sample_utils import greedy_sampler, make_sampler

from mlx_paged.batch_generator.recorder import Recording
from mlx_paged.batch_generator.sequences import row_params


@pytest.mark.parametrize(
    ("num_prompt", "num_generated", "prompt_time", "decode_time", "steps"),
    [(30, 10, 3.0, 1.0, 1), (0, 8, 0.0, 4.0, 1), (64, 0, 4.0, 0.0, 0), (0, 0, 0.0, 4.0, 0)],
)
def test_time_is_divided_in_proportion_to_tokens(
    num_prompt, num_generated, prompt_time, decode_time, steps
):
    counters = BatchCounters()
    Recording(prompt_tokens=num_prompt).count(counters, num_generated, 4.0)
    assert {
        "prompt_tokens": num_prompt,
        "prompt_time": prompt_time,
        "generation_tokens": num_generated,
        "generation_steps": steps,
        "decode_time": decode_time,
    }.items() <= asdict(counters).items()


def test_greedy_rows_have_no_sampler_of_their_own():
    own = make_sampler(temp=0.5)
    greedy, drawn = row_params([3, 4], [greedy_sampler, own], [None, None])
    assert greedy.sampler is None and drawn.sampler is own
    assert (greedy.max_tokens, drawn.max_tokens) == (3, 4)

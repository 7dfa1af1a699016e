"""Predicted seconds, compared with machines whose true costs are known."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from mlx_paged.scheduler.cost_model import CostModel
from mlx_paged.scheduler.step import StepWork

COSTS = np.array([4e-3, 1e-4, 2e-7, 1e-4, 1.5e-8])
"""Seconds per step, decode row, token of decode context, chunk token, token of chunk context."""

BOUND = 0.05
MINIMUM = 16


class Machine:
    """Takes known times plus noise and rare long pauses."""

    def __init__(self, seed: int, noise: float = 0.05, pauses: float = 0.02) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.pauses = pauses
        self.slowness = 1.0
        self.costs = COSTS

    def true_seconds(self, work: StepWork) -> float:
        counts = [work.decode_rows, work.decode_context, work.chunk_tokens, work.chunk_context]
        return self.slowness * float(self.costs @ [1, *counts])

    def run(self, work: StepWork) -> float:
        seconds = self.true_seconds(work) * np.exp(self.noise * self.rng.standard_normal())
        is_pause = self.rng.random() < self.pauses
        return float(seconds * self.rng.uniform(3, 50) if is_pause else seconds)


def decodes(rng: np.random.Generator) -> StepWork:
    rows = int(rng.integers(1, 17))
    return StepWork(rows, int(rng.integers(50, 4000, rows).sum()))


def serve(
    model: CostModel, machine: Machine, num_steps: int, prompts: float = 0.3
) -> Iterator[tuple[StepWork, int]]:
    """Yield steps of a server and the chunk sizes chosen for them; the model observes each step
    afterwards. When no prompt is left, one starts with probability `prompts`."""
    rng = np.random.default_rng(1)
    start = stop = 0
    for _ in range(num_steps):
        work, chosen = decodes(rng), 0
        if start == stop and rng.random() < prompts:
            start, stop = 0, int(rng.integers(50, 6000))
        if start < stop:
            chosen = model.chunk_within(BOUND, work, start, stop - start, MINIMUM)
            work += StepWork.chunk(start, chosen)
            start += chosen
        yield work, chosen
        model.observe(work, machine.run(work))


def trained(num_steps: int, **options: float) -> tuple[CostModel, Machine]:
    """A model that observed so many steps of a machine."""
    model, machine = CostModel(), Machine(0, **options)
    deque(serve(model, machine, num_steps), maxlen=0)
    return model, machine


def relative_error(model: CostModel, machine: Machine, work: StepWork) -> float:
    return abs(model.predict(work) / machine.true_seconds(work) - 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prompts", [0.3, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_predictions_converge_through_noise_and_pauses(seed, prompts):
    model, machine = CostModel(), Machine(seed)
    steps = serve(model, machine, 1000, prompts)
    errors = [relative_error(model, machine, work) for work, _ in steps][200:]
    assert np.sqrt(np.mean(np.square(errors))) < 0.025
    assert max(errors) < 0.12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prompts", [0.3, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_chosen_chunks_use_the_bound_and_keep_to_it(seed, prompts):
    model, machine = CostModel(), Machine(seed)
    costs = [
        machine.true_seconds(work)
        for step, (work, chosen) in enumerate(serve(model, machine, 1200, prompts))
        if chosen > MINIMUM and step >= 200
    ]
    assert max(costs) < BOUND
    assert np.median(costs) > 0.8 * BOUND


def test_without_noise_the_costs_are_found():
    model, machine = trained(2000, noise=0, pauses=0)
    for work in (StepWork(1, 100), StepWork(16, 40_000), StepWork(4, 4000, 300, 10**6)):
        assert relative_error(model, machine, work) < 1e-3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.25])
@pytest.mark.parametrize("seed", range(4))
def test_a_change_of_speed_is_followed_within_fifty_steps(seed, factor):
    model, machine = CostModel(), Machine(seed)
    errors = []
    for i, (work, _) in enumerate(serve(model, machine, 400)):
        if i == 300:
            machine.slowness = factor
        errors.append(relative_error(model, machine, work))
    assert max(errors[300:303]) > 0.15
    assert np.mean(errors[350:]) < 0.05


@pytest.mark.parametrize("factor, num_steps", [(2.0, 20), (0.5, 20), (1.1, 40)])
def test_even_a_steady_machine_may_change_its_speed(factor, num_steps):
    model, machine = trained(600, noise=0, pauses=0)
    machine.slowness = factor
    steps = serve(model, machine, num_steps)
    errors = [relative_error(model, machine, work) for work, _ in steps]
    assert np.mean(errors[:5]) > 0.05
    assert np.mean(errors[-10:]) < 0.03


def test_a_change_of_one_cost_alone_is_learned():
    model, machine = trained(1000, pauses=0)
    machine.costs = COSTS * [1, 1, 1.5, 1, 1]
    errors = [relative_error(model, machine, work) for work, _ in serve(model, machine, 400)]
    assert np.mean(errors[300:]) < 0.03


def test_a_step_that_should_take_no_time_is_no_outlier():
    model = CostModel()
    for rows in [1, 2, 4, 8] * 50:  # no cost per step
        model.observe(StepWork(rows), 1e-3 * rows - 5e-4)
    assert model.predict(StepWork()) == 0
    before = model.predict(StepWork(4))
    model.observe(StepWork(), 1e-3)
    assert model.predict(StepWork(4)) == pytest.approx(before, rel=0.1)


def test_chunk_costs_follow_a_change_of_speed_seen_in_decodes_alone():
    model, machine = trained(300, pauses=0)
    chunk = StepWork(4, 4000) + StepWork.chunk(1000, 200)
    machine.slowness = 2.0
    deque(serve(model, machine, 50, prompts=0), maxlen=0)
    assert relative_error(model, machine, chunk) < 0.1


@pytest.mark.slow
def test_chunk_costs_stay_known_through_a_long_time_of_decoding():
    model, machine = trained(300)
    deque(serve(model, machine, 5000, prompts=0), maxlen=0)
    for start in (0, 1000, 4000):
        chunk = StepWork(4, 4000) + StepWork.chunk(start, 200)
        assert relative_error(model, machine, chunk) < 0.1


@pytest.mark.parametrize("times", [0.02, 50])
def test_a_few_outliers_move_no_prediction_far(times):
    model, machine = trained(300, pauses=0)
    work = StepWork(8, 8000)
    before = model.predict(work)
    for _ in range(2):
        model.observe(work, times * machine.true_seconds(work))
    assert model.predict(work) == pytest.approx(before, rel=0.1)


def test_a_slow_first_step_is_soon_forgotten():
    model, machine = CostModel(), Machine(0, pauses=0)
    work = StepWork(4, 4000)
    model.observe(work, 30 * machine.true_seconds(work))
    for _ in range(4):
        model.observe(work, machine.run(work))
    assert relative_error(model, machine, work) < 0.1


def test_work_of_a_new_size_is_learned_at_once():
    model, machine = CostModel(), Machine(0, pauses=0)
    for _ in range(100):
        model.observe(StepWork(1, 100), machine.run(StepWork(1, 100)))
    large = StepWork(64, 200_000)
    for _ in range(3):
        model.observe(large, machine.run(large))
    assert relative_error(model, machine, large) < 0.1


def test_no_cost_is_negative():
    model = CostModel()
    rng = np.random.default_rng(0)
    for _ in range(300):  # more work, less time
        work = decodes(rng) + StepWork.chunk(int(rng.integers(1000)), int(rng.integers(1, 500)))
        model.observe(work, 1 / (1 + work.chunk_tokens + work.decode_rows))
        assert min(model.coefficients) >= 0


def test_the_first_chunks_grow_from_the_minimum_at_most_twofold():
    model, machine = CostModel(), Machine(0, noise=0, pauses=0)
    sizes, start = [], 0
    for _ in range(8):
        size = model.chunk_within(10.0, StepWork(4, 400), start, 10**6, MINIMUM)
        work = StepWork(4, 400) + StepWork.chunk(start, size)
        sizes.append(size)
        start += size
        model.observe(work, machine.run(work))
    assert sizes[0] == MINIMUM
    assert all(a < b <= 2 * a for a, b in pairwise(sizes))


def test_chunks_already_in_the_step_count_as_growth():
    model = CostModel()
    model.observe(StepWork.chunk(0, 100), 1e-3)
    other = StepWork.chunk(0, 90)
    assert model.chunk_within(10.0, StepWork(), 0, 10**6, 1) == 200
    assert model.chunk_within(10.0, other, 0, 10**6, 1) == 200 - 90
    far = StepWork(0, 0, 1, 8 * StepWork.chunk(0, 100).chunk_context)
    assert model.chunk_within(10.0, far, 0, 10**6, 1) == 1


def test_a_context_much_longer_than_any_before_is_tried_with_a_small_chunk():
    model = CostModel()
    model.observe(StepWork.chunk(0, 500), 1e-3)
    size = model.chunk_within(10.0, StepWork(), 20_000, 500, 1)
    seen, tried = StepWork.chunk(0, 500).chunk_context, StepWork.chunk(20_000, size).chunk_context
    assert 1 < size < 100 and tried <= 8 * seen


@pytest.mark.parametrize("wanted, minimum, expected", [(500, 16, 16), (5, 16, 5), (500, 0, 0)])
@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: model.observe(BUSY, 0.2)])
def test_the_minimum_is_chosen_even_where_decodes_alone_break_the_bound(
    prepare: Callable[[CostModel], None], wanted, minimum, expected
):
    model = CostModel()
    prepare(model)
    assert model.chunk_within(BOUND, BUSY, 0, wanted, minimum) == expected


BUSY = StepWork(64, 500_000, 1000, 10**7)


def test_the_chosen_chunk_is_the_largest_within_the_bound():
    model, _ = trained(300)
    rng = np.random.default_rng(2)
    for _ in range(50):
        work, start = decodes(rng), int(rng.integers(3000))
        size = model.chunk_within(BOUND, work, start, 10**4, 1)
        assert model.predict(work + StepWork.chunk(start, size)) * model.margin <= BOUND
        assert model.predict(work + StepWork.chunk(start, size + 1)) * model.margin > BOUND
        assert model.chunk_within(BOUND, work, start, size // 2, 1) == size // 2


@pytest.mark.parametrize("start, size", [(0, 0), (0, 1), (7, 1), (0, 9), (100, 33)])
def test_work_adds_up(start, size):
    attended = sum(position + 1 for position in range(start, start + size))
    chunk = StepWork.chunk(start, size)
    assert chunk == StepWork(0, 0, size, attended)
    assert StepWork(1, 2, 3, 4) + StepWork(10, 20, 30, 40) == StepWork(11, 22, 33, 44)
    assert StepWork(1, 2, 3, 4) + chunk == StepWork(1, 2, 3 + size, 4 + attended)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds):
    with pytest.raises(AssertionError, match=r"seconds is .*"):
        CostModel().observe(StepWork(1, 1), seconds)


def test_nothing_is_predicted_before_anything_was_observed():
    assert CostModel().predict(StepWork(8, 1000, 100, 5000)) == 0

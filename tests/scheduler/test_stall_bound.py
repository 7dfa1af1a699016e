"""A long prompt neither stalls running streams nor starves, on a machine with known costs."""

from collections.abc import Sequence

import numpy as np
import pytest

from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import MIN_CHUNK
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken, Step, StepReport
from tests.support.simulation.fake_model import FakeClock

BASE, ROW, TOKEN, CONTEXT = 5e-3, 1e-3, 0.2e-3, 1e-7


class Launched:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.report = StepReport(step)
        self.requests = [span.request for span in step.spans if span.samples]
        self.errors: dict[int, Exception] = {}


class FakeMachine:
    """A runner that takes a known time, with noise, and always samples token 7."""

    def __init__(self, clock: FakeClock, slowness: float = 1.0) -> None:
        self.clock = clock
        self.slowness = slowness
        self.noise = np.random.default_rng(0)

    def cost(self, step: Step) -> float:
        context = step.work.decode_context + step.work.chunk_context
        work = ROW * step.work.decode_rows + TOKEN * step.work.chunk_tokens + CONTEXT * context
        return self.slowness * (BASE + work)

    def launch(self, step: Step, before: Launched | None) -> Launched:
        return Launched(step)

    def collect(self, launched: Launched) -> list[SampledToken]:
        self.clock.now += self.cost(launched.step) * self.noise.uniform(0.97, 1.03)
        return [SampledToken(request, 7, -1.0) for request in launched.requests]

    def release(self, state_ids: Sequence[int], rested: Sequence[int] = ()) -> None: ...
    def recover(self, error: BaseException | None = None) -> None: ...


def make_engine(
    max_stall: float | None,
    lookahead: bool = False,
    prefill_chunk: int = 512,
    few_sizes: bool = False,
) -> tuple[EngineCore, FakeClock]:
    clock = FakeClock()
    options = {"max_stall": max_stall, "few_sizes": few_sizes, "clock": clock}
    scheduler = Scheduler(BlockAllocator(8000, 16), 16, prefill_chunk, **options)
    stats = EngineStats(16, 1, 8000)
    machine = FakeMachine(clock)
    return EngineCore(scheduler, machine, stats, lookahead=lookahead), clock


def run_streams_and_a_long_prompt(
    engine: EngineCore, clock: FakeClock
) -> tuple[list[float], float]:
    """The gaps between tokens of 8 streams while a 6,000-token prompt is computed, and its TTFT."""
    streams = [engine.add_request([1, 2, 3], max_tokens=4000) for _ in range(8)]
    warm_up = engine.add_request(list(range(2000)), max_tokens=1)
    while engine.has_work and engine.is_open(warm_up):
        engine.step()
    for _ in range(50):
        engine.step()
    arrival = clock.now
    long = engine.add_request(list(range(6000)), max_tokens=1)
    last = dict.fromkeys(streams, clock.now)
    gaps = []
    while True:
        for output in engine.step():
            if output.request_id == long:
                return gaps, clock.now - arrival
            gaps.append(clock.now - last[output.request_id])
            last[output.request_id] = clock.now


@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("bound", [0.03, 0.06])
def test_streams_wait_no_longer_than_the_bound_and_one_minimal_chunk(bound, lookahead, few_sizes):
    engine, clock = make_engine(bound, lookahead, few_sizes=few_sizes)
    gaps, _ = run_streams_and_a_long_prompt(engine, clock)
    minimal = MIN_CHUNK * (TOKEN + 6000 * CONTEXT)
    assert max(gaps) <= bound * 1.05 + minimal
    assert np.median(gaps) >= 0.7 * bound, "the bound is not used: the prompt waits without need"


def test_without_a_bound_streams_wait_for_whole_chunks():
    gaps, _ = run_streams_and_a_long_prompt(*make_engine(None))
    assert max(gaps) > 0.1


@pytest.mark.parametrize("few_sizes", [False, True])
def test_a_prompt_advances_even_if_streams_alone_break_the_bound(few_sizes):
    engine, clock = make_engine(max_stall=1e-3, few_sizes=few_sizes)
    gaps, ttft = run_streams_and_a_long_prompt(engine, clock)
    assert len(gaps) >= 8 * 6000 // 512, "the streams ended before the prompt was computed"
    steps = -(-6000 // MIN_CHUNK)
    step = BASE + 8 * (ROW + 1000 * CONTEXT) + MIN_CHUNK * (TOKEN + 6000 * CONTEXT)
    assert ttft <= steps * step * 1.05


def test_nothing_is_held_back_while_no_stream_runs():
    engine, _ = make_engine(max_stall=1e-3)
    engine.add_request(list(range(1024)), max_tokens=1)
    while engine.has_work:
        engine.step()
    assert engine.stats.steps == 2


def test_a_slower_machine_gets_smaller_chunks():
    engine, clock = make_engine(0.06)
    run_streams_and_a_long_prompt(engine, clock)
    engine.runner.slowness = 2.0
    for _ in range(60):
        engine.step()
    gaps = []
    engine.add_request(list(range(5000)), max_tokens=1)
    for _ in range(60):
        before = clock.now
        engine.step()
        gaps.append(clock.now - before)
    minimal = 2 * MIN_CHUNK * (TOKEN + 6000 * CONTEXT)
    assert max(gaps) <= 0.06 * 1.05 + minimal


def rows_of_chunks(engine: EngineCore, clock: FakeClock) -> list[tuple[int, int]]:
    """Decode rows and prompt tokens of each step before the long prompt's last."""
    seen = []
    schedule = engine.scheduler.schedule

    def noted() -> Step:
        step = schedule()
        if any(not span.samples for span in step.spans):
            seen.append((step.work.decode_rows, step.work.chunk_tokens))
        return step

    engine.scheduler.schedule = noted
    run_streams_and_a_long_prompt(engine, clock)
    return seen


@pytest.mark.parametrize("bound", [None, 0.03, 0.06])
def test_rows_of_a_step_have_few_sizes_where_that_is_asked_for(bound):
    seen = rows_of_chunks(*make_engine(bound, few_sizes=True))
    for decodes, chunk in seen:
        rows = decodes + chunk
        spare = rows % max(8, min(64, (1 << rows.bit_length()) // 16))
        assert spare == 0 or 8 * spare > chunk or chunk - spare < MIN_CHUNK
    before = rows_of_chunks(*make_engine(bound))
    assert len(seen) <= 1.1 * len(before)
    sizes, others = ({sum(rows) for rows in each if rows[0]} for each in (seen, before))
    assert sizes == {512} if bound is None else len(sizes) < len(others)


def test_small_chunks_stay_as_they_are_and_nothing_fills_a_rounded_step():
    scheduler = Scheduler(BlockAllocator(8000, 16), 16, 100, few_sizes=True)
    for number, length in enumerate((3, 3, 3, 500, 500)):
        params = SamplingParams(max_tokens=50)
        scheduler.add(Request(number, [number] * length, params, seed=0))
    first = scheduler.schedule()
    assert [len(span) for span in first.spans] == [3, 3, 3, 87]
    for span in first.spans:
        span.request.tokens += [7] * span.samples
    assert [len(span) for span in scheduler.schedule().spans] == [1, 1, 1, 93]
    scheduler.budget.prefill_chunk = 17
    for span in first.spans:
        span.request.tokens += [7] * span.samples
    third = scheduler.schedule()
    assert [len(span) for span in third.spans] == [1, 1, 1, 17]  # 16 rows would be 4 tokens fewer


@pytest.mark.parametrize("lookahead", [False, True])
def test_no_request_is_admitted_for_a_few_tokens(lookahead):
    """Otherwise prompts would hold blocks while each step computes few of their tokens."""
    engine, clock = make_engine(24e-3, lookahead)
    run_streams_and_a_long_prompt(engine, clock)
    prompts = [engine.add_request([i] * (100 + 3 * i), max_tokens=1) for i in range(8)]
    first_chunks: dict[int, int] = {}
    while any(engine.is_open(prompt) for prompt in prompts):
        engine.step()
        for request in engine.scheduler.running.values():
            if request.id in prompts and request.num_computed:
                first_chunks.setdefault(request.id, request.num_computed)
    assert len(first_chunks) == len(prompts)
    assert min(first_chunks.values()) >= MIN_CHUNK


def test_with_chunks_below_the_minimum_prompts_are_admitted():
    engine, _ = make_engine(8e-3, prefill_chunk=MIN_CHUNK // 2)
    for length in (40, 30, 5):
        engine.add_request([length] * length, max_tokens=60)
    for _ in range(80):
        engine.step()
    assert not engine.has_work


def test_the_times_of_a_completion_are_of_the_engines_clock():
    """Seventeen requests where sixteen run: the last one starts when the others have ended."""
    engine, clock = make_engine(None)
    ids = [engine.add_request([1, 2, 3], max_tokens=5) for _ in range(17)]
    done, ended = {}, {}
    while engine.has_work:
        for output in engine.step():
            if output.completion is not None:
                done[output.request_id], ended[output.request_id] = output.completion, clock.now
    first, last = done[ids[0]], done[ids[16]]
    assert first.queue_s == 0 and last.queue_s == pytest.approx(ended[ids[0]])
    assert 0 < last.queue_s < last.ttft_s < last.seconds

"""What each step computes: decodes first, bounded prefill chunks, admission, preemption."""

from inspect import signature

import pytest

from mlx_paged.attention.forward import even_length
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import longest_chunk
from mlx_paged.scheduler.places import Places
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Span, Step, StepWork


def make_request(request_id: int, num_prompt: int, max_tokens: int = 8) -> Request:
    tokens = [1000 * request_id + i for i in range(num_prompt)]
    return Request(request_id, tokens, SamplingParams(max_tokens=max_tokens), seed=0)


def make_scheduler(
    num_blocks: int = 100, block_size: int = 4, max_running: int = 8, prefill_chunk: int = 8
) -> Scheduler:
    return Scheduler(BlockAllocator(num_blocks, block_size), max_running, prefill_chunk)


def with_prompts(*lengths: int, **options: int) -> Scheduler:
    """A scheduler where requests of these lengths wait."""
    scheduler = make_scheduler(**options)
    for request_id, length in enumerate(lengths):
        scheduler.add(make_request(request_id, length))
    return scheduler


def compute(scheduler: Scheduler, step: Step) -> None:
    """Act as if the model had computed the step: requests that sample get a token."""
    for span in step.spans:
        if span.samples:
            span.request.tokens.append(7)
        if span.request.num_generated == span.request.params.max_tokens:
            scheduler.complete(span.request)


def summary(step: Step) -> list[tuple[int, int, int]]:
    return [(span.request.id, span.start, span.stop) for span in step.spans]


def test_a_long_prompt_is_computed_in_bounded_chunks_beside_every_decode():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 3))
    compute(scheduler, scheduler.schedule())
    scheduler.add(make_request(1, 20))
    seen = []
    for _ in range(4):
        step = scheduler.schedule()
        seen.append(summary(step))
        compute(scheduler, step)
    assert seen == [
        [(0, 3, 4), (1, 0, 8)],
        [(0, 4, 5), (1, 8, 16)],
        [(0, 5, 6), (1, 16, 20)],
        [(0, 6, 7), (1, 20, 21)],
    ]


def test_only_the_last_chunk_of_a_prompt_yields_a_token():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 20))
    sampled = []
    for _ in range(3):
        step = scheduler.schedule()
        sampled.append([span.samples for span in step.spans])
        compute(scheduler, step)
    assert sampled == [[False], [False], [True]]


def test_one_steps_budget_serves_several_short_prompts():
    scheduler = with_prompts(3, 3, 6, prefill_chunk=8)
    assert summary(scheduler.schedule()) == [(0, 0, 3), (1, 0, 3), (2, 0, 2)]


def test_a_finished_request_is_replaced_in_the_next_step():
    scheduler = make_scheduler(max_running=2)
    for request_id in range(3):
        scheduler.add(make_request(request_id, 2, max_tokens=1 if request_id == 0 else 8))
    compute(scheduler, scheduler.schedule())
    assert 0 not in scheduler.running and len(scheduler.waiting) == 1
    assert summary(scheduler.schedule()) == [(1, 2, 3), (2, 0, 2)]


def test_admission_waits_for_blocks_and_keeps_the_order():
    scheduler = make_scheduler(num_blocks=4, prefill_chunk=100)
    scheduler.add(make_request(0, 8, max_tokens=4))
    scheduler.add(make_request(1, 12, max_tokens=1))
    scheduler.add(make_request(2, 1, max_tokens=1))
    assert summary(scheduler.schedule()) == [(0, 0, 8)]
    assert [request.id for request in scheduler.waiting] == [1, 2]


def test_out_of_blocks_preempts_the_newest_and_computes_it_again_later():
    scheduler = make_scheduler(num_blocks=5, prefill_chunk=100)
    old, new = make_request(0, 8, max_tokens=9), make_request(1, 4, max_tokens=9)
    scheduler.add(old)
    scheduler.add(new)
    preempted_at = None
    steps = 0
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        assert step.spans, "no progress"
        if preempted_at is None and new.num_preempted:
            preempted_at = new.num_generated
        compute(scheduler, step)
        scheduler.allocator.check_integrity()
        steps += 1
        assert steps < 100
    assert scheduler.num_preemptions >= 1 and old.num_preempted == 0
    assert preempted_at is not None and preempted_at > 0
    assert old.num_generated == new.num_generated == 9
    assert scheduler.allocator.store.blocks_in_use == 0


def test_a_preempted_request_is_next_in_line_and_starts_over():
    scheduler = make_scheduler(num_blocks=4, prefill_chunk=100)
    for request_id in (0, 1):
        scheduler.add(make_request(request_id, 4))
    scheduler.add(make_request(2, 4))
    while not scheduler.num_preemptions:
        compute(scheduler, scheduler.schedule())
    assert scheduler.waiting.peek().id == 1
    assert scheduler.waiting.peek().num_computed == 0


def test_what_can_never_fit_is_refused_on_arrival():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_request(0, 9, max_tokens=8))  # 16 tokens need K/V: exactly the pool
    with pytest.raises(ValueError, match="need 5 KV blocks of 4, but the pool has 4"):
        scheduler.add(make_request(1, 10, max_tokens=8))
    assert len(scheduler.waiting) == 1


def test_a_request_as_large_as_the_pool_finishes_beside_others():
    scheduler = make_scheduler(num_blocks=4, prefill_chunk=3)
    for request_id in range(4):
        scheduler.add(make_request(request_id, 9, max_tokens=8))
    steps = 0
    while scheduler.waiting or scheduler.running:
        compute(scheduler, scheduler.schedule())
        steps += 1
        assert steps < 500
    assert scheduler.allocator.store.blocks_in_use == 0


def test_complete_takes_waiting_and_running_requests_out():
    scheduler = make_scheduler()
    running, waiting = make_request(0, 4), make_request(1, 4)
    scheduler.add(running)
    scheduler.schedule()
    scheduler.add(waiting)
    scheduler.complete(running)
    scheduler.complete(waiting)
    assert not scheduler.waiting and not scheduler.running
    assert scheduler.allocator.store.blocks_in_use == 0


def test_a_request_that_runs_alone_after_a_fault_preempts_others_and_not_itself():
    """Layers with a window get more blocks on the way, and the first suspect holds them here."""
    groups = (LayerGroup(), LayerGroup(4, 2))
    scheduler = Scheduler(BlockAllocator(11, 8, groups, chunk=1), 8, 1)
    suspects = [make_request(request_id, 16, max_tokens=2) for request_id in range(3)]
    for request in suspects:
        scheduler.add(request)
    scheduler.recover(suspects)
    steps = 0
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        assert len(step.spans) == 1 or suspects[-1].num_generated, "they run one at a time"
        for span in step.spans:
            if span.samples:
                scheduler.clear(span.request)
        compute(scheduler, step)
        steps += 1
        assert steps < 200, "no end"
    assert suspects[0].num_preempted > 0 and suspects[-1].num_preempted == 0
    assert [request.num_generated for request in suspects] == [2, 2, 2]


def test_a_shared_prefix_is_not_scheduled_again():
    scheduler = make_scheduler(prefill_chunk=100)
    first = make_request(0, 10)
    scheduler.add(first)
    scheduler.schedule()
    scheduler.allocator.register_prefix(0, first.tokens, 10)
    second = Request(1, list(first.tokens), SamplingParams(max_tokens=4), seed=0)
    scheduler.add(second)
    first.tokens.append(7)
    assert summary(scheduler.schedule()) == [(0, 10, 11), (1, 8, 10)]
    assert second.num_cached == 8


def test_samples_fork_off_even_where_one_token_of_the_prompt_was_left():
    """The step computes this token like a decode."""
    scheduler = make_scheduler(prefill_chunk=8)
    leader, second, third = (make_request(i, 9) for i in range(3))
    leader.samples = [second, third]
    scheduler.add(leader)
    compute(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    (span,) = step.spans
    assert (span.start, span.stop, span.samples) == (8, 9, True)
    assert span.forks == (second, third)
    assert set(scheduler.running) == {0, 1, 2}


def test_decodes_of_a_step_count_as_its_work_and_are_computed():
    scheduler = make_scheduler()
    requests = [make_request(i, num_prompt) for i, num_prompt in enumerate((3, 4))]
    for request in requests:
        scheduler.add(request)
    compute(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    assert step.work == StepWork(2, 4 + 5)
    assert [request.num_computed for request in requests] == [4, 5]


def test_a_request_whose_last_token_is_under_way_is_computed_no_further():
    scheduler = make_scheduler()
    request = make_request(0, 3, max_tokens=1)
    scheduler.add(request)
    assert summary(scheduler.schedule()) == [(0, 0, 3)]
    request.num_in_flight = 1
    assert scheduler.schedule().spans == []
    assert scheduler.running == {} and request.id not in scheduler.allocator


def test_prompts_of_like_length_are_computed_one_after_the_other():
    scheduler = with_prompts(300, 130, prefill_chunk=64)
    steps = [summary(scheduler.schedule()) for _ in range(4)]
    assert steps[:2] == [[(0, 0, 64)], [(0, 64, 128)]]
    assert steps[2:] == [[(0, 128, 192)], [(0, 192, 256)]]


def test_nobody_gives_way_to_those_for_whom_there_is_no_place():
    scheduler = with_prompts(300, 20, prefill_chunk=64, max_running=1)
    assert [summary(scheduler.schedule()) for _ in range(2)] == [[(0, 0, 64)], [(0, 64, 128)]]


def half_generated(request_id: int) -> Request:
    """A request with five prompt tokens and three generated ones."""
    request = make_request(request_id, 5)
    request.tokens += [2] * 3
    return request


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
    planning = Planning()
    for i, (start, stop) in enumerate(spans):
        planning.add(Span(half_generated(i), start, stop, samples=stop == 8))
    assert planning.step().prompt_tokens == expected


def test_a_decode_may_compute_the_last_token_of_a_prompt():
    planning = Planning()
    planning.add_decodes([half_generated(i) for i in range(4)], [4, 5, 7, 4])
    assert planning.step().prompt_tokens == 2


def test_a_scheduler_hands_on_the_options_of_its_places(monkeypatch):
    options = {
        name: object()
        for name, parameter in signature(Places).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    defaults, found = signature(Scheduler).parameters, {}

    def init(self, allocator, max_running, **given):
        found.update(given)
        raise ValueError("it sees them")

    for name, parameter in signature(Places).parameters.items():
        assert defaults[name].default == parameter.default, name
    monkeypatch.setattr(Places, "__init__", init)
    with pytest.raises(ValueError, match="it sees them"):
        Scheduler(None, 1, 1, **options)
    assert found == options


def run_step(scheduler: Scheduler) -> list[Span]:
    """The spans of a step, which is computed."""
    step = scheduler.schedule()
    compute(scheduler, step)
    return step.spans


def test_a_prompt_that_is_alone_takes_long_chunks():
    scheduler = Scheduler(BlockAllocator(1000, 16), 8, 512, alone_chunk=2048)
    scheduler.add(make_request(0, 5000))
    sizes = [len(run_step(scheduler)[0]) for _ in range(3)]
    assert sizes == [2048, 2048, 904]


def test_a_prompt_beside_a_stream_or_another_prompt_takes_short_chunks():
    scheduler = Scheduler(BlockAllocator(1000, 16), 8, 512, alone_chunk=2048)
    scheduler.add(make_request(0, 20, max_tokens=3))
    run_step(scheduler)
    scheduler.add(make_request(1, 9000))
    seen = [sorted(map(len, run_step(scheduler))) for _ in range(2)]
    assert seen == [[1, 512], [1, 512]]
    alone = run_step(scheduler)
    assert [len(span) for span in alone] == [2048]  # the stream has ended
    scheduler.add(make_request(2, 5000))
    assert sum(map(len, run_step(scheduler))) == 512


@pytest.mark.parametrize(
    ("seconds_per_token", "sizes"), [(1e-4, [512, 1024, 2048]), (0.01, [512, 512, 512])]
)
def test_a_prompt_alone_takes_long_chunks_of_known_time(seconds_per_token, sizes):
    """A request that arrives waits for the step, so that a step takes two seconds at most."""
    allocator = BlockAllocator(1000, 16)
    scheduler = Scheduler(allocator, 8, 512, max_stall=0.1, alone_chunk=2048)
    scheduler.add(make_request(0, 9000))
    seen = []
    for _ in sizes:
        [span] = run_step(scheduler)
        seen.append(len(span))
        work = StepWork.chunk(span.start, len(span))
        scheduler.budget.observe(work, seconds_per_token * len(span))
    assert seen == sizes


@pytest.mark.parametrize(
    ("chunk", "alone"), [(512, 2048), (128, 512), (16, 64), (4096, 4096), (600, 2048)]
)
def test_the_longest_chunk_follows_the_callers(chunk, alone):
    assert longest_chunk(chunk) == alone


@pytest.mark.parametrize("num_tokens", [1024, 8192, 32768])
def test_a_lone_prompt_gathers_as_much_as_mlx_lms_caches_copy(num_tokens):
    """mlx-lm's cache is copied whole for each chunk of 2,048 tokens, which the prompt's last token
    follows. Here each chunk gathers the blocks up to its end. A layer takes four launches a chunk:
    the write, two gathers and attention; mlx-lm's takes five: two copies of the longer cache, two
    updates of slices and attention."""
    scheduler = Scheduler(BlockAllocator(3000, 16), 8, 512, alone_chunk=longest_chunk(512))
    scheduler.add(make_request(0, num_tokens))
    stops = []
    while not stops or stops[-1] < num_tokens:
        [span] = run_step(scheduler)
        stops.append(span.stop)
    gathered = sum(16 * even_length(-(-stop // 16)) for stop in stops)
    stops_of_mlx_lm = [*range(2048, num_tokens - 1, 2048), num_tokens - 1]
    copied = sum(-(-stop // 256) * 256 for stop in stops_of_mlx_lm)
    assert gathered <= 1.05 * copied
    assert 4 * len(stops) <= 1.05 * (5 * len(stops_of_mlx_lm) + 3)

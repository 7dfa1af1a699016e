"""The serving bench's engines give the tokens they were asked for and know what they hold."""

import gc
import importlib.util
from dataclasses import replace

import pytest

from bench.flags import engines as flags_of_engines
from bench.flags.engines import ENGINES
from bench.flags.limits import Stall
from bench.flags.presets import PRESETS
from bench.serving import engines
from bench.serving.engines import Limits, enough_blocks, kv_token_bytes, make_server, static_blocks
from bench.serving.replay import Replay, StepClock
from bench.serving.run import Run
from bench.serving.servers import Counters, Level, PagedServer, Token
from bench.serving.trace import Job, make_trace
from bench.serving.workload import ClosedLoop, OpenLoop, make_jobs
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

INSTALLED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name.startswith("llama_cpp")
            and any(importlib.util.find_spec(each) is None for each in ("llama_cpp", "gguf")),
            reason="llama-cpp-python and gguf are not installed",
        ),
    )
    for name in ENGINES
]
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32
STEP_S = 0.02


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def trace_of(num_requests=5, samples=1):
    jobs = make_jobs(PRESETS["uniform"], VOCAB, seed=0, requests=num_requests)
    short = [Job(0, job.prompt[:40], job.max_tokens % 7 + 2, samples) for job in jobs]
    return make_trace(short, [0.0] * num_requests)


@pytest.mark.slow
def test_a_disk_ends_with_its_engine(model):
    trace = trace_of()
    server = make_server("mlx_paged_disk", model, limits_for(trace))
    assert isinstance(server, PagedServer) and server.engine.scheduler.has_tier
    directory = server.engine.scheduler.tier.store._packs.directory
    assert directory.is_dir()
    del server
    gc.collect()
    assert not directory.exists()


def limits_for(trace, max_running=3, block_size=8, num_blocks=None):
    num_blocks = num_blocks or enough_blocks(trace, max_running, block_size)
    context = max(job.kv_tokens for job in trace)
    return Limits(max_running, 16, context, block_size=block_size, num_blocks=num_blocks)


def play(name, model, trace, limits=None, source=None):
    run = Run(name)
    server = make_server(name, model, limits or limits_for(trace))
    Replay(run, server, source or OpenLoop(trace), StepClock(STEP_S), TOKEN_BYTES).play()
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_every_engine_gives_each_stream_the_tokens_of_its_prompt_alone(name, model):
    trace = trace_of(samples=2)
    run = play(name, model, trace)
    expected = [solo_greedy(model, list(j.prompt), j.max_tokens) for j in trace for _ in range(2)]
    assert [stream.tokens for stream in run.streams] == expected
    assert [stream.job for stream in run.streams] == [i // 2 for i in range(10)]
    assert all(stream.is_done for stream in run.streams)
    assert run.output_tokens == sum(job.output_tokens for job in trace)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", INSTALLED)
def test_engines_hold_no_less_than_lives_and_nothing_at_the_end(name, model):
    trace = trace_of()
    run = play(name, model, trace)
    most = 3 * (40 + 8) * TOKEN_BYTES
    assert all(0 <= tick.live_bytes <= tick.held_bytes for tick in run.ticks)
    assert 0 < max(tick.live_bytes for tick in run.ticks) <= most
    assert run.ticks[-1].live_bytes == run.ticks[-1].held_bytes == 0
    most_running = {"sequential": 1, "mlx_lm": 3 + 3 - 1}.get(name, 3)  # prompts beside the batch
    assert 0 < max(tick.running for tick in run.ticks) <= most_running
    assert run.ticks[-1].waiting == 0 <= min(tick.waiting for tick in run.ticks)
    assert sum(tick.joined for tick in run.ticks) == sum(tick.left for tick in run.ticks) == 5
    assert sum(tick.prompt_tokens for tick in run.ticks) == sum(len(j.prompt) for j in trace)


def test_live_tokens_are_those_whose_kv_is_computed_or_under_way(model):
    trace = make_trace([Job(0, tuple(range(20)), 3)], [0.0])
    live = [tick.live_bytes / TOKEN_BYTES for tick in play("mlx_paged", model, trace).ticks]
    assert live == [20, 21, 22, 0]  # the second chunk, then each token, under way
    held = [tick.blocks_in_use for tick in play("mlx_paged", model, trace).ticks]
    assert held == [3, 3, 3, 0]


def test_token_bytes_are_those_of_the_models_cache(model):
    assert kv_token_bytes(model) == TOKEN_BYTES


def test_static_batches_begin_when_the_last_one_has_ended(model):
    trace = make_trace([Job(0, (1, 2, 3), n) for n in (2, 12, 12, 3, 3)], [0.0] * 5)
    static = play("mlx_paged_static", model, trace).streams
    ends = [stream.times_s[-1] for stream in static[:3]]
    assert min(stream.times_s[0] for stream in static[3:]) > max(ends)
    continuous = play("mlx_paged", model, trace).streams
    assert continuous[3].times_s[0] < max(stream.times_s[-1] for stream in continuous[:3])


def test_a_job_with_more_samples_than_a_batch_holds_is_a_batch(model):
    trace = trace_of(2, samples=5)
    run = play("mlx_lm_static", model, trace)
    assert all(stream.is_done for stream in run.streams)


@pytest.mark.slow
def test_counts_of_two_runs_by_step_are_the_same_even_when_blocks_run_out(model):
    jobs = [Job(0, tuple(range(i, i + 12)), 30, samples=2) for i in range(6)]
    trace = make_trace(jobs, [0.05 * i for i in range(6)])
    limits = limits_for(trace, max_running=8, num_blocks=20)
    first, second = (play("mlx_paged", model, trace, limits) for _ in range(2))
    assert first.ticks == second.ticks and first.streams == second.streams
    assert first.counters == second.counters
    assert first.counters.preemptions > 0 and first.counters.cow_clones > 0
    assert first.counters.peak_blocks_in_use <= 20


def test_a_closed_loop_keeps_so_many_streams_running(model):
    trace = trace_of(6)
    run = play("mlx_paged", model, trace, source=ClosedLoop(trace, clients=2))
    assert max(tick.running + tick.waiting for tick in run.ticks) == 2
    assert all(stream.is_done for stream in run.streams)
    assert run.streams[2].arrival_s == min(run.streams[i].times_s[-1] for i in (0, 1))


def test_pools_are_as_large_as_the_largest_sequences_need_side_by_side():
    jobs = [Job(0, (1,) * 10, 7), Job(0, (1,) * 16, 17), Job(0, (1,), 1, samples=3)]
    assert static_blocks(tuple(jobs), max_running=2, block_size=16) == 2 * 2
    assert static_blocks(tuple(jobs), max_running=9, block_size=16) == 5 * 2
    assert enough_blocks(tuple(jobs), max_running=2, block_size=16) >= 3


def test_the_policy_decides_whose_prompt_is_computed_first(model):
    long, short = Job(0, tuple(range(100)), 2), Job(0, tuple(range(60)), 2)
    trace = make_trace([long, short], [0.0, 0.0])
    limits = limits_for(trace)
    firsts = [
        [stream.times_s[0] for stream in play("mlx_paged", model, trace, each).streams]
        for each in (limits, replace(limits, policy="shortest"))
    ]
    assert firsts[0][0] <= firsts[0][1] and firsts[1][1] < firsts[1][0]


class SlowServer:
    """Takes each job for itself; its steps take a second, on a clock of their own."""

    pool_bytes = None

    def __init__(self):
        self.queue = []

    @property
    def has_work(self):
        return bool(self.queue)

    def submit(self, job, streams):
        self.queue += [(stream, i == job.max_tokens) for stream in streams for i in (1, 2)]

    def step(self):
        return [Token(self.queue[0][0], 7, self.queue.pop(0)[1])]

    def level(self):
        return Level(int(self.has_work), 0, 0, 0)

    def counters(self):
        return Counters()

    def causes(self, step):
        return ("prewarm",) if step == 3 else ()


def test_waiting_behind_a_slow_engine_counts_from_the_scheduled_arrival():
    trace = make_trace([Job(0, (1,), 2)] * 3, [0.0, 0.5, 9.0])
    run = Run("slow")
    clock = StepClock(1.0)
    clock.is_virtual = False
    Replay(run, SlowServer(), OpenLoop(trace), clock, 1.0).play()
    assert [stream.arrival_s for stream in run.streams] == [0.0, 0.5, 9.0]
    assert [stream.times_s for stream in run.streams] == [[1, 2], [3, 4], [10, 11]]
    assert run.wall_s == 11.0 and [tick.start_s for tick in run.ticks] == [0, 1, 2, 3, 9, 10]
    assert [tick.causes for tick in run.ticks] == [()] * 3 + [("prewarm",)] + [()] * 2


def test_an_interrupt_leaves_what_was_measured():
    class Interrupted(SlowServer):
        def step(self):
            if len(self.queue) == 3:
                raise KeyboardInterrupt
            return super().step()

    run = Run("slow")
    trace = make_trace([Job(0, (1,), 2)] * 3, [0.0, 0.0, 0.0])
    with pytest.raises(KeyboardInterrupt):
        Replay(run, Interrupted(), OpenLoop(trace), StepClock(1.0), 1.0, Stall(0.001, 1)).play()
    assert run.is_partial and len(run.ticks) == 3
    assert [stream.is_done for stream in run.streams] == [True, False, False]


def test_what_the_engine_says_about_its_own_spikes_comes_with_their_ticks(model):
    trace = trace_of(3)
    server = make_server("mlx_paged", model, limits_for(trace))
    run = Run("mlx_paged")
    log = server.engine.ticks
    Replay(run, server, OpenLoop(trace), StepClock(STEP_S), TOKEN_BYTES).play()
    assert len(run.ticks) == len(log)
    log[4].causes = ("eviction",)
    assert server.causes(4) == ("eviction",)
    assert [tick.tokens for tick in run.ticks] == [tick.sampled for tick in log]
    assert [tick.blocks_in_use for tick in run.ticks] == [tick.blocks_in_use for tick in log]


def test_each_variant_of_the_engine_has_a_name_among_the_flags():
    assert tuple(engines.VARIANTS) == flags_of_engines.VARIANTS

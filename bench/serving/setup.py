"""From arguments to a trace and a session that can run it."""

import argparse

import mlx.nn as nn

from bench.serving.arrivals import arrival_times
from bench.serving.clocks import Clock, StepClock, WallClock
from bench.serving.engines import Limits, check_engines, enough_blocks, static_blocks
from bench.serving.session import Session
from bench.serving.sources import ClosedLoop, OpenLoop, Source
from bench.serving.trace import Trace, make_trace
from bench.serving.trace_file import read_trace
from bench.serving.workload import PRESETS, make_jobs


def trace_of(args: argparse.Namespace, vocab_size: int) -> Trace:
    """The recorded trace, or one drawn from the preset; ValueError if it cannot be read."""
    if args.trace is not None:
        return read_trace(args.trace, vocab_size, args.seed)
    jobs = make_jobs(PRESETS[args.preset], vocab_size, args.seed, args.requests, args.tokens_target)
    return make_trace(jobs, arrival_times(len(jobs), args.request_rate, args.burstiness, args.seed))


def session_of(args: argparse.Namespace, model: nn.Module, trace: Trace) -> Session:
    """Raises ValueError if some request could never run, or an engine is missing."""
    check_engines(args.engines, model, args.target_active)

    def make_source(jobs: Trace) -> Source:
        return ClosedLoop(jobs, args.target_active) if args.closed_loop else OpenLoop(jobs)

    def make_clock() -> Clock:
        step_ms = args.arrivals_by_step
        return WallClock() if step_ms is None else StepClock(step_ms / 1000)

    limits = Limits(
        max_running=args.target_active,
        prefill_chunk=args.prefill_chunk,
        context=max(job.kv_tokens for job in trace),
        block_size=args.kv_block_size,
        num_blocks=_pool_blocks(args, trace),
        max_stall_ms=args.max_stall_ms,
        policy=args.policy,
        prefix_cache=not args.no_prefix_cache,
    )
    return Session(model, limits, make_source, make_clock, args.inject_stall)


def _pool_blocks(args: argparse.Namespace, trace: Trace) -> int:
    if args.num_blocks is None:
        return enough_blocks(trace, args.target_active, args.kv_block_size)
    needed = static_blocks(trace, 1, args.kv_block_size)
    if args.num_blocks < needed:
        raise ValueError(
            f"--num-blocks: expected at least {needed}, as one request needs, got {args.num_blocks}"
        )
    return int(args.num_blocks)

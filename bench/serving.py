"""Engines side by side under the same requests: throughput, latency, K/V memory.

    python -m bench.serving --preset reference --engines mlx_paged,mlx_lm --rounds 3
    python -m bench.serving --request-rate 8 --slo ttft=500ms,itl=100ms --max-rate --report out

Requests come when they are due, not when an engine has time for them. The last line is one JSON
object; docs/serving-bench.md says what each value means.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from bench.models import check_machine
from bench.serving_parts.arguments import make_parser, parse
from bench.serving_parts.arrivals import arrival_times
from bench.serving_parts.clocks import Clock, StepClock, WallClock
from bench.serving_parts.engines import Limits, enough_blocks, static_blocks, static_sibling
from bench.serving_parts.floor import gemm_flops
from bench.serving_parts.loading import load_model
from bench.serving_parts.presets import PRESETS, make_jobs
from bench.serving_parts.rate_search import Probe, search
from bench.serving_parts.report import check_report, write_report
from bench.serving_parts.results import Rates, print_results, result, rows_of
from bench.serving_parts.run import Run
from bench.serving_parts.session import Session
from bench.serving_parts.slo import Slo
from bench.serving_parts.sources import ClosedLoop, OpenLoop, Source
from bench.serving_parts.trace import Trace, digest, make_trace
from bench.serving_parts.trace_file import read_trace, write_trace

INTERRUPTED = 130
SEARCH_START = 0.8
"""Part of the throughput measured before, in requests, that a rate search begins with."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 130 after Ctrl-C; mistakes exit with 2."""
    parser = make_parser((__doc__ or "").splitlines()[0])
    args = parse(parser, argv)
    try:
        if args.report is not None:
            check_report(args.report)
        model, vocab_size = load_model(args.model)
        trace = make_the_trace(args, vocab_size)
        if args.write_trace is not None:
            write_trace(args.write_trace, trace)
        session = make_session(args, model, trace)
        about = describe(args, model, trace)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("interrupted: nothing was measured", file=sys.stderr)
        return INTERRUPTED
    rates, is_partial = Rates(), False
    try:
        measure(args, session, trace, rates)
    except KeyboardInterrupt:
        is_partial = True
    rounds = rows_of(args.engines, session.runs, args.target_active, args.slo, args.spike_threshold)
    outcome = result(about, rounds, rates, is_partial=is_partial)
    print_results(outcome)
    if args.report is not None:
        write_report(args.report, outcome, session.runs)
        print(f"report: {args.report / 'index.html'}", file=sys.stderr)
    return INTERRUPTED if is_partial else 0


def make_the_trace(args: argparse.Namespace, vocab_size: int) -> Trace:
    if args.trace is not None:
        return read_trace(args.trace, vocab_size, args.seed)
    jobs = make_jobs(PRESETS[args.preset], vocab_size, args.seed, args.requests, args.tokens_target)
    return make_trace(jobs, arrival_times(len(jobs), args.request_rate, args.burstiness, args.seed))


def make_session(args: argparse.Namespace, model: Any, trace: Trace) -> Session:
    def make_source(jobs: Trace) -> Source:
        return ClosedLoop(jobs, args.target_active) if args.closed_loop else OpenLoop(jobs)

    def make_clock() -> Clock:
        step_ms = args.arrivals_by_step
        return WallClock() if step_ms is None else StepClock(step_ms / 1000)

    limits = Limits(
        max_running=args.target_active,
        prefill_chunk=args.prefill_chunk,
        block_size=args.kv_block_size,
        num_blocks=pool_blocks(args, trace),
        max_stall_ms=args.max_stall_ms,
        policy=args.policy,
        prefix_cache=not args.no_prefix_cache,
    )
    return Session(model, limits, make_source, make_clock, args.inject_stall)


def pool_blocks(args: argparse.Namespace, trace: Trace) -> int:
    """Raises ValueError if some request could never run."""
    if args.num_blocks is None:
        return enough_blocks(trace, args.target_active, args.kv_block_size)
    needed = static_blocks(trace, 1, args.kv_block_size)
    if args.num_blocks < needed:
        raise ValueError(
            f"--num-blocks: expected at least {needed}, as one request needs, got {args.num_blocks}"
        )
    return int(args.num_blocks)


def describe(args: argparse.Namespace, model: Any, trace: Trace) -> dict[str, Any]:
    """What is run on what, printed and as plain values."""
    machine = check_machine()
    num_prompt = sum(len(job.prompt) for job in trace)
    num_output = sum(job.output_tokens for job in trace)
    work = {
        "digest": digest(trace),
        "requests": len(trace),
        "streams": sum(job.samples for job in trace),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "last_arrival_s": round(trace[-1].arrival_s, 4),
    }
    flops = gemm_flops(model, trace)
    floor_s = None if flops is None else round(flops / 1e9 / machine["gemm_gflops"], 3)
    print(
        f"{len(trace)} requests, {num_prompt} prompt and {num_output} output tokens, on the model"
        f" {args.model}; float32 GEMM: {machine['gemm_gflops']:.0f} GFLOP/s; load average"
        f" {machine['load_average']:.1f}.",
        flush=True,
    )
    if floor_s:
        print(
            f"Floor: the weights' products take {floor_s:.2f} s, so {num_output / floor_s:.0f}"
            " output tokens/s at most without shared prefixes.\n",
            flush=True,
        )
    loop = "closed" if args.closed_loop else "open"
    options = {
        name: _plain(value) for name, value in vars(args).items() if not name.endswith("_loop")
    }
    return {"loop": loop, **options, **machine, "work": work, "floor_s": floor_s}


def measure(args: argparse.Namespace, session: Session, trace: Trace, rates: Rates) -> None:
    """Fill `session.runs` and `rates`; what was measured before an interrupt stays there."""
    siblings = [static_sibling(name) for name in args.engines] if args.static else []
    engines = list(dict.fromkeys([*args.engines, *(name for name in siblings if name)]))
    num_tokens = sum(job.output_tokens for job in trace)
    with tqdm(total=args.rounds * len(engines) * num_tokens, unit="token", disable=None) as bar:
        session.on_tokens = bar.update
        bar.set_description("warm-up")
        session.warm_up(engines)
        session.compare(engines, trace, args.rounds, bar.set_description)
        for name in args.engines if args.max_rate else ():
            bar.set_description(f"{name}, rate")
            rates.probes[name] = []

            def probe(rate: float, name: str = name) -> Probe:
                bar.total += num_tokens
                times = arrival_times(len(trace), rate, args.burstiness, args.seed)
                timed = make_trace(trace, times)
                run = session.play(name, timed, OpenLoop(timed), keep=False)
                rates.probes[name].append(_probe(rate, run, args.slo))
                return rates.probes[name][-1]

            start = SEARCH_START * len(trace) / session.runs[name][0].wall_s
            rates.max_rate[name] = search(probe, start, args.attainment)


def _probe(rate: float, run: Run, slo: Slo) -> Probe:
    good = [stream for stream in run.streams if slo.holds(stream)]
    return Probe(
        rate,
        len(good) / len(run.streams),
        run.output_tokens / run.wall_s,
        sum(len(stream.tokens) for stream in good) / run.wall_s,
    )


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | list | None) else str(value)


if __name__ == "__main__":
    sys.exit(main())

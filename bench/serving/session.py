"""Engines side by side on one trace, round after round; then the highest rate of each."""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tqdm import tqdm

from bench.flags.presets import PRESETS
from bench.machine import check_machine, linear_gflops, machine_text, machine_warnings
from bench.models import gguf_of
from bench.pairs import turns
from bench.serving.engines import (
    Limits,
    check_engines,
    enough_blocks,
    is_url,
    kv_token_bytes,
    make_server,
    static_blocks,
    static_sibling,
)
from bench.serving.http_engine import WARM_UP, Endpoint
from bench.serving.measures import Summary, goodput
from bench.serving.replay import Clock, Replay, StepClock
from bench.serving.run import Run
from bench.serving.trace import Trace, digest, make_trace, read_trace
from bench.serving.workload import ClosedLoop, OpenLoop, arrival_times, make_jobs
from mlx_paged.options import checked_bits

SEARCH_START = 0.8
"""A rate search begins with this part of the throughput measured before, in requests."""

RATE_STEP = 1.6
MAX_RATE_STEPS = 4  # up or down from where the search starts
BISECTIONS = 2


def trace_of(args: argparse.Namespace, vocab_size: int) -> Trace:
    """The recorded trace, or one drawn from the preset; ValueError if it cannot be read."""
    if args.trace is not None:
        return read_trace(args.trace, vocab_size, args.seed)
    preset = PRESETS[args.preset]
    jobs = make_jobs(preset, vocab_size, args.seed, args.requests, args.tokens_target)
    times = arrival_times(len(jobs), args.request_rate, args.burstiness, args.seed)
    return make_trace(jobs, preset.arrivals_s or times)


class Session:
    """All runs of a comparison; ValueError if a request or an engine could never run.

    `model` may be None if all engines are servers over HTTP.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module | None, trace: Trace) -> None:
        gguf = None if args.model is None else gguf_of(args.model)
        check_engines(args.engines, model, args.target_active, gguf)
        self.args = args
        self.model = model
        self.trace = trace
        self.limits = Limits(
            max_running=args.target_active,
            prefill_chunk=args.prefill_chunk,
            context=max(job.kv_tokens for job in trace),
            block_size=args.kv_block_size,
            num_blocks=_pool_blocks(args, trace),
            max_stall_ms=args.max_stall_ms,
            policy=args.policy,
            prefix_cache=not args.no_prefix_cache,
            kv_bits=checked_bits("--kv-bits", args.kv_bits),
            gguf=gguf,
        )
        self.runs: dict[str, list[Run]] = {}  # by engine; those that ended or were interrupted
        self.probes: dict[str, list[Summary]] = {}  # of rate searches, by engine
        self.max_rate: dict[str, float | None] = {}  # what these searches found
        self._endpoints = {
            url: Endpoint(url, args.api or "completions", args.served_model)
            for url in filter(is_url, args.engines)
        }

    def measure(self) -> None:
        """The comparison, then the rate searches; an interrupt leaves what was measured before."""
        args = self.args
        siblings = [static_sibling(name) for name in args.engines] if args.static else []
        engines = list(dict.fromkeys([*args.engines, *(name for name in siblings if name)]))
        num_tokens = sum(job.output_tokens for job in self.trace)
        with tqdm(total=args.rounds * len(engines) * num_tokens, unit="token", disable=None) as bar:
            bar.set_description("warm-up")
            for name in engines:
                if not is_url(name):
                    self._warm_up(name)
            for _, name in turns(engines, args.rounds):
                bar.set_description(name)
                run = Run(name)
                self.runs.setdefault(name, []).append(run)
                source = OpenLoop(self.trace)
                if args.closed_loop:
                    source = ClosedLoop(self.trace, args.target_active)
                self._play(run, source, bar.update)
            for name in args.engines if args.max_rate else ():
                bar.set_description(f"{name}, rate")
                self._search_rate(name, bar)

    def _warm_up(self, name: str) -> None:
        """Let an engine touch its code and the weights once; an endpoint has done so."""
        assert self.model is not None
        server = make_server(name, self.model, self.limits)
        for i, job in enumerate(WARM_UP):
            server.submit(job, [i])
        while server.has_work:
            server.step()

    def _play(self, run: Run, source: OpenLoop, on_tokens: Callable[[int], object]) -> None:
        """A new engine, or a server as it is, through the trace once."""
        if is_url(run.engine):
            return self._endpoints[run.engine].play(run, source, on_tokens)
        assert self.model is not None
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        limits, step_ms = self.limits, self.args.arrivals_by_step
        run.static_blocks = static_blocks(self.trace, limits.max_running, limits.block_size)
        kv_bits = limits.kv_bits if run.engine.startswith("mlx_paged") else None
        token_bytes = kv_token_bytes(self.model, kv_bits)
        run.block_bytes = token_bytes * limits.block_size
        server = make_server(run.engine, self.model, limits)
        clock = Clock() if step_ms is None else StepClock(step_ms / 1000)
        stall = self.args.inject_stall
        Replay(run, server, source, clock, token_bytes, stall, on_tokens).play()

    def _search_rate(self, name: str, bar: Any) -> None:
        args, trace = self.args, self.trace
        probes = self.probes[name] = []

        def attainment(rate: float) -> float:
            bar.total += sum(job.output_tokens for job in trace)
            times = arrival_times(len(trace), rate, args.burstiness, args.seed)
            run = Run(name)
            self._play(run, OpenLoop(make_trace(trace, times)), bar.update)
            good = goodput(run, args.slo)
            assert good is not None
            found = {"rate": rate, "attainment": good["attainment"]}
            found["tokens_per_sec"] = run.output_tokens / run.wall_s
            probes.append(found | {"good_tokens_per_sec": good["tokens_per_sec"]})
            return float(good["attainment"])

        start = SEARCH_START * len(trace) / self.runs[name][0].wall_s
        self.max_rate[name] = search(attainment, start, args.attainment)


def _pool_blocks(args: argparse.Namespace, trace: Trace) -> int:
    if args.num_blocks is None:
        return enough_blocks(trace, args.target_active, args.kv_block_size)
    needed = static_blocks(trace, 1, args.kv_block_size)
    if args.num_blocks < needed:
        raise ValueError(
            f"--num-blocks: expected at least {needed}, as one request needs, got {args.num_blocks}"
        )
    return int(args.num_blocks)


def search(attainment: Callable[[float], float], start: float, least: float) -> float | None:
    """The highest rate that held; None if no rate did.

    `attainment` runs the trace at a rate and tells which part of the streams kept the objectives. A
    rate holds if at least `least` did. Steps up or down from `start`, then halves the gap.
    """

    def holds(rate: float) -> bool:
        return attainment(rate) >= least

    low, high = _bracket(holds, start)
    for _ in range(BISECTIONS):
        if low is None or high is None:
            break
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(holds: Callable[[float], bool], start: float) -> tuple[float | None, float | None]:
    """A rate that holds and a higher one that fails; None where the steps did not find one."""
    rate, is_good = start, holds(start)
    for _ in range(MAX_RATE_STEPS):
        further = rate * RATE_STEP if is_good else rate / RATE_STEP
        if holds(further) != is_good:
            return min(rate, further), max(rate, further)
        rate = further
    return (rate, None) if is_good else (None, rate)


def describe(args: argparse.Namespace, model: nn.Module | None, trace: Trace) -> dict[str, Any]:
    """Workload, options, machine and an estimate: printed, and returned as plain JSON values."""
    machine = check_machine()
    warnings = [*machine_warnings(machine)]
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
    flops = None if model is None else gemm_flops(model, trace)
    products_s = None
    if model is not None and flops is not None:
        dtype = next(w.dtype for _, w in tree_flatten(model.parameters()) if w.ndim == 2)
        gflops = machine["linear_gflops"] = linear_gflops(dtype)
        products_s = round(flops / 1e9 / gflops, 6)
    print(
        f"{len(trace)} requests, {num_prompt} prompt and {num_output} output tokens, on"
        f" {'servers' if model is None else f'the model {args.model}'}; {machine_text(machine)}.",
        flush=True,
    )
    if products_s:
        print(
            f"Estimate: at {gflops:.0f} GFLOP/s, the best of a linear layer here, the products with"
            f" the weights alone take {products_s:.2f} s: {num_output / products_s:.0f} output"
            " tokens/s, if prompts share no prefixes.\n",
            flush=True,
        )
    if args.url and trace[-1].arrival_s:
        load = num_output / trace[-1].arrival_s
        print(f"Ceiling over HTTP: the load asks for {load:.0f} output tokens/s.\n", flush=True)
    options = {
        name: value if isinstance(value, int | float | str | list | None) else str(value)
        for name, value in vars(args).items()
        if not name.endswith("_loop")
    }
    loop = "closed" if args.closed_loop else "open"
    return {
        "loop": loop,
        **options,
        **machine,
        "work": work,
        "products_s": products_s,
        "warnings": warnings,
    }


def gemm_flops(model: nn.Module, trace: Trace) -> float | None:
    """Operations of the products with the weights if every token is computed once, and logits for
    outputs only; None for quantized weights."""
    weights = [(name, w) for name, w in tree_flatten(model.parameters()) if w.ndim == 2]
    if not all(mx.issubdtype(w.dtype, mx.floating) for _, w in weights):
        return None
    sizes = {name: w.size for name, w in weights}
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    head = sum(size for name, size in sizes.items() if "lm_head" in name)
    body = sum(sizes.values()) - embedding - head
    outputs = sum(job.output_tokens for job in trace)
    tokens = sum(len(job.prompt) for job in trace) + outputs
    return float(2 * (body * tokens + (head or embedding) * outputs))

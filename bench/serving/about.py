"""What is run on what, before it is run."""

import argparse
from typing import Any

import mlx.nn as nn

from bench.models import check_machine
from bench.serving.floor import gemm_flops
from bench.serving.trace import Trace, digest


def describe(args: argparse.Namespace, model: nn.Module, trace: Trace) -> dict[str, Any]:
    """Workload, options, machine and floor, printed and as plain JSON values."""
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


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | list | None) else str(value)

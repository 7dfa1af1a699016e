"""What it costs to record a step: an engine whose model computes nothing, with and without it.

Both engines decode the same requests and take turns step by step, in one process.

    python -m bench.ticks --running 32
"""

import argparse
import json
import time
from typing import Any

import numpy as np
from tqdm import trange

from mlx_paged.block_allocator import BlockAllocator
from mlx_paged.common_args import COUNT, Parser
from mlx_paged.engine_core import EngineCore
from mlx_paged.request import Request
from mlx_paged.scheduler import Scheduler
from mlx_paged.stats import EngineStats
from mlx_paged.step import Step
from mlx_paged.step_pipeline import Choice, StepResult

BLOCK_SIZE = 16
BUDGET_US = 20.0
"""The ceiling: more than that a step would show beside a fast model's."""

WARM_UP = 50


class Launched:
    def __init__(self, step: Step) -> None:
        self.requests = step.everyone
        self.errors: dict[int, Exception] = {}


class NoModel:
    """A runner that always chooses the same token."""

    def launch(self, step: Step, before: Launched | None) -> Launched:
        return Launched(step)

    def collect(self, launched: Launched) -> list[Choice]:
        return [Choice(request, 7, -1.0) for request in launched.requests]

    def drop(self, request: Request) -> None: ...
    def fork(self, parent: Request, child: Request) -> None: ...
    def recover(self) -> None: ...


class NoRecorder:
    """Keeps nothing, not even the statistics."""

    def begin(self) -> None: ...
    def take_in(self) -> None: ...
    def end(self, result: StepResult) -> None: ...


def make_engine(num_running: int, num_steps: int, records: bool) -> EngineCore:
    num_blocks = num_running * (num_steps // BLOCK_SIZE + 2)
    scheduler = Scheduler(BlockAllocator(num_blocks, BLOCK_SIZE), num_running, 4 * num_running)
    stats = EngineStats(BLOCK_SIZE, BLOCK_SIZE * 1024, num_blocks)
    engine = EngineCore(scheduler, NoModel(), stats, lookahead=False)
    if not records:
        engine._recorder = NoRecorder()  # type: ignore[assignment]
    for i in range(num_running):
        engine.add_request([1, 2, 3, i], max_tokens=num_steps)
    return engine


def step_us(engine: EngineCore) -> float:
    started = time.perf_counter()
    engine.step()
    return 1e6 * (time.perf_counter() - started)


def make_parser() -> Parser:
    parser = Parser(prog="bench.ticks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=COUNT, default=32, help="requests that decode")
    parser.add_argument("--steps", type=COUNT, default=3000, help="of each engine")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians, and the median of the difference of neighbouring steps, in microseconds."""
    num_steps = WARM_UP + args.steps
    engines = [make_engine(args.running, num_steps + 1, records) for records in (True, False)]
    times = np.array(
        [[step_us(engine) for engine in engines] for _ in trange(num_steps, unit="step")][WARM_UP:]
    )
    with_us, without_us = np.median(times, axis=0).tolist()
    return {
        "step_us": round(with_us, 1),
        "step_without_us": round(without_us, 1),
        "recording_us": round(float(np.median(times[:, 0] - times[:, 1])), 1),
    }


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    print(f"Ceiling: {BUDGET_US:g} us a step. {args.running} requests decode, {args.steps} steps.")
    found = measure(args)
    print(
        f"A step takes {found['step_us']} us, {found['step_without_us']} without recording;"
        f" recording takes {found['recording_us']} us (median of neighbouring steps)."
    )
    print(json.dumps({"bench": "ticks", **vars(args), "budget_us": BUDGET_US, **found}))


if __name__ == "__main__":
    main()

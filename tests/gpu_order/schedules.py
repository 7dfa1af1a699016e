"""Random schedules under the model of MLX's Metal encoder.

    python -m tests.gpu_order.schedules --schedules 2000 --seed 0

Each schedule runs on the CPU; its evals are traced as a GPU would encode them. What nothing orders
is printed with the command that repeats it; the last line is one JSON object with what was counted.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from mlx_paged.cli import COUNT, Parser, number
from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.runner.model_runner import ModelRunner
from tests.gpu_order.model.backend import Backend, Report
from tests.gpu_order.model.knockouts import FIXES, Change
from tests.gpu_order.model.lives import KINDS, lives_of
from tests.gpu_order.model.trace import Event
from tests.gpu_order.model.tracer import Tracer

FEW_QUERIES = 2
"""Longer chunks are gathered: a GPU gathers those of more than 8 tokens, which are rare here."""


MAX_OPS = 0, 2, 7, 40
"""Dispatches in a command buffer. A GPU has more dispatches than the model, so that its command
buffers may end anywhere."""


@dataclass(frozen=True)
class Outcome:
    """A schedule's verdict and what happened in it."""

    kind: str
    report: Report
    counts: Counter[str]


def run_schedule(seed: int, index: int, change: Change | None = None) -> Outcome:
    """Run one schedule; `change` alters its trace."""
    kind, rng = KINDS[index % len(KINDS)], random.Random(f"{seed}:{index}")
    backend = Backend(max_ops=rng.choice(MAX_OPS))

    def sink(event: Event) -> None:
        backend.encode(change(event) if change else event)

    tracer = Tracer(sink)
    is_patched = kind == "patched batches" or (kind == "caches" and rng.random() < 0.5)
    patched = patched_mlx_lm(block_size=2) if is_patched else nullcontext()
    let_go = ModelRunner._let_go

    def counted(runner: ModelRunner, *args: Any) -> None:
        tracer.counts["held_back"] += 1
        let_go(runner, *args)

    goes_on = mock.patch.object(ModelRunner, "_let_go", counted)
    with tracer.installed(FEW_QUERIES), patched, goes_on:
        lives = list(lives_of(kind, seed, index))
        while working := [life for life in lives if life.has_work]:
            rng.choice(working).turn()
    report = backend.finish()
    counts = tracer.counts + Counter({kind: 1, "schedules": 1})
    counts["hazards"] += len(report.hazards)
    counts["command_buffers"] += sum(report.command_buffers)
    counts["failures"] += bool(report.hazards)
    for life in lives:
        if hasattr(life, "simulation"):
            counts.update(life.simulation.result())
    counts["schedules"] = 1
    return Outcome(kind, report, counts)


def make_parser() -> Parser:
    parser = Parser(prog="schedules", description="Schedules under the encoder's model.")
    parser.add_argument("--schedules", type=COUNT, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    index = number(int, 0, 2**31, "a whole number >= 0")
    parser.add_argument("--only", type=index, metavar="I", help="run schedule I alone")
    parser.add_argument("--without", choices=FIXES, help="take this fix back")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    change = FIXES[args.without] if args.without else None
    totals: Counter[str] = Counter(hazards=0, failures=0)
    for index in range(args.schedules) if args.only is None else [args.only]:
        outcome = run_schedule(args.seed, index, change)
        totals.update(outcome.counts)
        if outcome.report.hazards:
            print(f"schedule {index} ({outcome.kind}) of seed {args.seed}:")
            for hazard in (
                outcome.report.hazards if args.only is not None else outcome.report.hazards[:1]
            ):
                print(f"  {hazard}")
            flags = f" --without {args.without!r}" if args.without else ""
            script = "python -m tests.gpu_order.schedules"
            print(f"  {script} --seed {args.seed} --only {index}{flags}", flush=True)
    print(json.dumps(dict(sorted(totals.items()))))
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())

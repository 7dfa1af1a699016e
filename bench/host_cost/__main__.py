"""What a decode step costs the host, part by part, and what the allocator's verbs cost.

The model computes nothing and the device's time is left out. Engines take turns in one process.

    python -m bench.host_cost --rows 8 32 128 256 --blocks 512
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from bench.host_cost.block_costs import (
    PUBLISHED,
    MakeVerbs,
    block_costs,
    mlx_paged_verbs,
    nano_vllm_verbs,
)
from bench.host_cost.silent_engine import (
    BLOCK_SIZE,
    VOCAB,
    decoding_engine,
    silenced,
    smallest_llama,
)
from bench.host_cost.stopwatch import Stopwatch
from bench.models import check_machine
from mlx_paged import Engine
from mlx_paged.common_args import COUNT, Parser
from mlx_paged.model_loader import load_model
from mlx_paged.text_stream import TextStream

COUNTED = ("schedule", "tables", "sampling")
PARTS = (*COUNTED, "launch", "results", "pipeline")
"""A step from its schedule to the choices that were read back; "outputs", what callers see of a
token, comes after it."""

TARGET_US = {32: 300, 256: 1000}
"""For the parts that are counted, together."""

VLLM_US = {8: 100, 32: 310, 256: 2500}
"""Of vLLM V1's scheduler alone, `schedule` and `update_from_output`, on the machine that the
published figures of :data:`bench.host_cost.block_costs.PUBLISHED` are from."""

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass
class Course:
    """Steps of one engine."""

    name: str
    rows: int
    engine: Engine
    watch: Stopwatch = field(default_factory=Stopwatch)
    steps: list[dict[str, float]] = field(default_factory=list)

    def run(self, num_steps: int) -> None:
        """Watch some more steps."""
        engine = self.engine
        with (
            silenced(engine, self.rows, VOCAB),
            self.watch.watching(
                (engine, "step", "outputs"),
                (engine._pipeline, "advance", "pipeline"),
                (engine.scheduler, "schedule", "schedule"),
                (engine.scheduler, "commit", "schedule"),
                (engine.scheduler.budget, "observe", "cost model"),
                (engine.runner, "launch", "launch"),
                (engine.runner, "_batches", "tables"),
                (engine.runner, "model", "model"),
                (engine.runner, "sampler", "sampling"),
                (engine.runner, "collect", "results"),
                (mx, "async_eval", "device"),
                (mx, "eval", "device"),
            ),
        ):
            for _ in range(num_steps):
                outputs = engine.step()
                assert len(outputs) == self.rows, "a step that is not a decode of all rows"
                self.steps.append(self.watch.lap())

    def microseconds(self) -> dict[str, float]:
        """Medians over the steps: of each part, of the parts that are counted, of all together; and
        of both sums the quietest tenth, to which other processes added least."""
        counted = [sum(lap[part] for part in COUNTED) for lap in self.steps]
        step = [sum(lap[part] for part in PARTS) for lap in self.steps]
        parts = {
            part: median(lap[part] for lap in self.steps)
            for part in (*PARTS, "cost model", "outputs")
        }
        seconds = {**parts, "counted": median(counted), "step": median(step)}
        seconds["quiet"] = float(np.quantile(counted, 0.1))
        seconds["quiet step"] = float(np.quantile(step, 0.1))
        return {name: round(1e6 * value, 1) for name, value in seconds.items()}


def floor_us(rows: int) -> dict[str, float]:
    """What nothing that looks at each row goes below: microseconds of an empty loop over the rows,
    of an object made for each, of an operation of numpy on all, and of one such array for MLX."""
    indices, column = list(range(rows)), np.zeros(rows, np.int32)

    def loop() -> None:
        for _ in indices:
            pass

    actions: dict[str, Callable[[], object]] = {
        "loop": loop,
        "objects": lambda: [Course for _ in indices] and [slice(i, i) for i in indices],
        "numpy": lambda: column + 1,
        "mx.array": lambda: mx.array(column),
    }
    return {name: round(1e6 * timed(action, 200), 2) for name, action in actions.items()}


def timed(action: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the median of several."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)


def detokenise_us(num_tokens: int = 2000) -> float:
    """Microseconds that a token of the demo model takes to become text."""
    _, tokenizer = load_model()
    ids = np.random.default_rng(0).integers(200, tokenizer.vocab_size, size=num_tokens)
    tokens = iter(ids.tolist())
    text = TextStream(tokenizer.detokenizer)
    return round(1e6 * timed(lambda: text.push(next(tokens)), num_tokens), 2)


def make_parser() -> Parser:
    parser = Parser(prog="bench.host_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rows", type=COUNT, nargs="+", default=[8, 32, 128, 256], help="running requests"
    )
    parser.add_argument("--blocks", type=COUNT, default=512, help="that each request holds")
    parser.add_argument("--steps", type=COUNT, default=40, help="of each engine in a round")
    parser.add_argument("--rounds", type=COUNT, default=5)
    parser.add_argument(
        "--no-lookahead", action="store_true", help="read each step before the next is launched"
    )
    parser.add_argument(
        "--nano-vllm", type=Path, help="a checkout of nano-vllm, to run its block manager too"
    )
    return parser


def measure_steps(args: argparse.Namespace) -> list[Course]:
    model, lookahead = smallest_llama(), not args.no_lookahead
    courses = [
        Course(
            name,
            rows,
            decoding_engine(
                model, VOCAB, rows, args.blocks * BLOCK_SIZE, lookahead=lookahead, **options
            ),
        )
        for rows in tqdm(args.rows, desc="engines", disable=None)
        for name, options in SAMPLING.items()
    ]
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for course in courses:
            course.run(args.steps)
    return courses


def print_steps(courses: Sequence[Course]) -> None:
    columns = (*PARTS, "step", "quiet step", "cost model", "outputs", "counted", "quiet")
    print(f"\n{'us a step':16}" + "".join(f"{name:>11}" for name in columns), end="")
    print(f"{'target':>9}{'vLLM':>9}")
    for course in courses:
        cost = course.microseconds()
        print(f"{course.rows:6} {course.name:9}", end="")
        print("".join(f"{cost[name]:11.0f}" for name in columns), end="")
        print(f"{TARGET_US.get(course.rows, '-'):>9}{VLLM_US.get(course.rows, '-'):>9}")


def print_blocks(live: dict[str, dict[str, float]]) -> None:
    columns = {f"{name}, elsewhere": figures for name, figures in PUBLISHED.items()} | live
    print(f"\n{'':34}" + "".join(f"{name:>22}" for name in columns))
    for verb in live["mlx_paged"]:
        cells = [figures.get(verb) for figures in columns.values()]
        print(f"{verb:34}" + "".join(f"{'-' if c is None else f'{c:g}':>22}" for c in cells))


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    makers: dict[str, MakeVerbs] = {"mlx_paged": mlx_paged_verbs}
    if args.nano_vllm is not None:
        try:
            makers["nano-vllm"] = nano_vllm_verbs(args.nano_vllm)
        except ValueError as error:
            parser.error(f"argument --nano-vllm: {error}")
    machine = check_machine()
    floors = {rows: floor_us(rows) for rows in args.rows}
    print("Floor, us: what it takes to look at each row once.")
    for rows, floor in floors.items():
        print(f"{rows:6} rows  " + "  ".join(f"{name} {us:g}" for name, us in floor.items()))
    courses = measure_steps(args)
    print_steps(courses)
    detokenise = detokenise_us()
    print(f"A token of the demo model becomes text in {detokenise:g} us, beside all that.")

    blocks = block_costs(makers, args.blocks)
    print_blocks(blocks)
    result = {
        "bench": "host_cost",
        **machine,
        "blocks": args.blocks,
        "lookahead": not args.no_lookahead,
        "floor_us": floors,
        "steps_us": [
            {"rows": c.rows, "sampling options": c.name, **c.microseconds()} for c in courses
        ],
        "detokenise_us": detokenise,
        "block_costs": blocks,
        "published": PUBLISHED,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

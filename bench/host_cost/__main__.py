"""What a decode step costs the host, part by part, and what the allocator's methods cost.

The model computes nothing and the device's time is left out. Engines take turns in one process.

    python -m bench.host_cost --rows 1 8 32 128 --blocks 512
    python -m bench.host_cost --gpu
    python -m bench.host_cost --gpu --counted --rows 1
    python -m bench.host_cost --policies --rows 64
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from bench.command import print_result, table, text_of
from bench.flags.clock import Clock
from bench.flags.host_cost import parse
from bench.host_cost.block_costs import PUBLISHED, block_costs
from bench.host_cost.counted_steps import counted_steps
from bench.host_cost.gpu_steps import TURN, gpu_steps, gpu_table
from bench.host_cost.graph_costs import graph_costs, graph_table
from bench.host_cost.policy_costs import policy_costs, policy_table
from bench.host_cost.silent_engine import (
    BLOCK_SIZE,
    VOCAB,
    decoding_engine,
    silenced,
    smallest_llama,
)
from bench.machine import check_machine
from bench.pairs import in_turns, turns
from mlx_paged import Engine
from mlx_paged.scheduler.step import StepResult

COUNTED = ("schedule", "tables", "sampling")
PARTS = (*COUNTED, "launch", "results", "pipeline")
"""A step from its schedule until the sampled tokens were read."""

BESIDE = ("cost model", "outputs")
"""What is not in that. The cost model only learns where a bound on steps, drafts or a disk ask it;
outputs are what callers see of a token, after the step."""

TARGET_US = {32: 300, 256: 1000}
"""For the counted parts together."""

VLLM_US = {8: 100, 32: 310, 256: 2500}
"""vLLM V1's scheduler alone, `schedule` and `update_from_output`, measured on the same machine as
the figures of :data:`bench.host_cost.block_costs.PUBLISHED`."""

SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.95}}
RECORDED_ROWS = 32
MOST_ROWS = 32  # of a graph: mlx-lm's steps of more would take most of the time
RECORDING_BUDGET_US = 20.0  # more than that would show in the steps of a fast model


class Stopwatch:
    """Seconds of watched calls, by label, without the watched calls inside them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # of each call under way, seconds of watched calls inside

    @contextmanager
    def watching(self, *calls: tuple[Any, str, str]) -> Iterator[None]:
        """Within this context watch calls, each an owner, the name of its attribute, a label."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in calls]
        for (owner, name, original), (_, _, label) in zip(originals, calls, strict=True):
            setattr(owner, name, self._timed(original, label))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        clock, seconds, inner = time.perf_counter, self.seconds, self._inner

        def timed(*args: Any, **options: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return call(*args, **options)
            finally:
                took = clock() - start
                seconds[label] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return timed


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
        """Medians over the steps: of each part, of the counted parts together, of all together.

        "quiet" and "quiet step" are the quietest tenth of both sums, to which other processes added
        least.
        """
        columns = {part: [lap.get(part, 0.0) for lap in self.steps] for part in (*PARTS, *BESIDE)}
        for name, parts in (("counted", COUNTED), ("step", PARTS)):
            columns[name] = [sum(lap[part] for part in parts) for lap in self.steps]
        seconds = {name: median(values) for name, values in columns.items()}
        seconds["quiet"] = float(np.quantile(columns["counted"], 0.1))
        seconds["quiet step"] = float(np.quantile(columns["step"], 0.1))
        return {name: round(1e6 * value, 1) for name, value in seconds.items()}


class NoRecorder:
    """Records no tick and no statistics."""

    def begin(self) -> None: ...
    def end(self, result: StepResult) -> None: ...


def recording_engines(rows: int) -> list[Engine]:
    """Two equal engines; only the first one records its steps."""
    model = smallest_llama()
    engines = [decoding_engine(model, VOCAB, rows, BLOCK_SIZE, lookahead=False) for _ in range(2)]
    engines[1]._recorder = NoRecorder()  # type: ignore[assignment]
    return engines


def recording_us(rows: int, num_steps: int) -> dict[str, float]:
    """Microseconds of a step with and without recording, in turns step by step: medians.

    "recording_us" is the median difference of neighbouring steps.
    """
    engines = recording_engines(rows)
    with silenced(engines[0], rows, VOCAB), silenced(engines[1], rows, VOCAB):
        recorded, unrecorded = (partial(Clock.WALL.seconds, each.step, 1) for each in engines)
        seconds = in_turns({"with": recorded, "without": unrecorded}, num_steps)
    with_us, without_us = (1e6 * np.array(times) for times in seconds.values())
    return {
        "rows": rows,
        "step_us": round(float(np.median(with_us)), 1),
        "step_without_us": round(float(np.median(without_us)), 1),
        "recording_us": round(float(np.median(with_us - without_us)), 1),
        "budget_us": RECORDING_BUDGET_US,
    }


def floor_us(rows: int) -> dict[str, float]:
    """The least that any code takes that looks at each row, in microseconds.

    An empty loop over the rows, an object for each row, an operation of numpy on all rows, and one
    such array for MLX.
    """
    indices, column = list(range(rows)), np.zeros(rows, np.int32)

    actions: dict[str, Callable[[], object]] = {
        "loop": lambda: [None for _ in indices],
        "objects": lambda: [Course for _ in indices] and [slice(i, i) for i in indices],
        "numpy": lambda: column + 1,
        "mx.array": lambda: mx.array(column),
    }
    return {name: median_us(action, 200) for name, action in actions.items()}


def median_us(action: Callable[[], object], repeats: int) -> float:
    """Microseconds of one call, the median of several."""
    return round(1e6 * median(Clock.WALL.seconds(action, 1) for _ in range(repeats)), 2)


def measure_steps(args: argparse.Namespace) -> list[Course]:
    model, context = smallest_llama(), args.blocks * BLOCK_SIZE
    courses = []
    for rows in tqdm(args.rows, desc="engines", disable=None):
        for name, options in SAMPLING.items():
            options = options | {"lookahead": not args.no_lookahead}
            courses.append(
                Course(name, rows, decoding_engine(model, VOCAB, rows, context, **options))
            )
    for _, course in turns(courses, args.rounds, title="rounds"):
        course.run(args.steps)
    return courses


def step_table(courses: Sequence[Course]) -> str:
    columns = (*PARTS, "step", "quiet step", *BESIDE, "counted", "quiet")
    rows = [["us a step", *columns, "target", "vLLM"]]
    for course in courses:
        costs = course.microseconds()
        cells = [f"{costs[name]:.0f}" for name in columns]
        cells += [text_of(each.get(course.rows), "d") for each in (TARGET_US, VLLM_US)]
        rows.append([f"{course.rows} {course.name}", *cells])
    return table(rows)


def block_table(live: dict[str, dict[str, float]]) -> str:
    columns = {f"{name}, elsewhere": figures for name, figures in PUBLISHED.items()} | live
    rows = [["", *columns]]
    for method in live["mlx_paged"]:
        cells = [text_of(figures.get(method), "g") for figures in columns.values()]
        rows.append([method, *cells])
    return table(rows)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    if args.counted:
        counts = counted_steps(args.layers, args.rows)
        print(gpu_table(counts))
        print_result("host_cost", machine | {"layers": args.layers, "counted_steps": counts})
        return
    if args.gpu:
        found = gpu_steps(args.layers, args.rows, args.rounds * args.steps // TURN)
        print(gpu_table(found))
        print_result("host_cost", machine | {"layers": args.layers, "gpu_steps": found})
        return
    if args.policies:
        costs = {rows: policy_costs(rows, args.rounds, args.steps) for rows in args.rows}
        for rows, ratios in costs.items():
            print(f"{rows} rows", policy_table(ratios), sep="\n")
        print_result("host_cost", machine | {"policies": costs})
        return
    floors = {rows: floor_us(rows) for rows in args.rows}
    print("Floor, us: code that looks at each row once.")
    for rows, floor in floors.items():
        print(f"{rows:6} rows  " + "  ".join(f"{name} {us:g}" for name, us in floor.items()))
    courses = measure_steps(args)
    print("", step_table(courses), sep="\n")
    recording = recording_us(RECORDED_ROWS, args.rounds * args.steps)
    print(
        f"Recording a step of {RECORDED_ROWS} rows takes {recording['recording_us']:g} us of"
        f" {recording['step_us']:g}; ceiling: {RECORDING_BUDGET_US:g} us."
    )
    graphs = graph_costs(args.layers, [n for n in args.rows if n <= MOST_ROWS], args.steps)
    print("", graph_table(graphs), sep="\n")
    blocks = block_costs(args.blocks)
    print("", block_table(blocks), sep="\n")
    steps = [{"rows": c.rows, "sampling options": c.name, **c.microseconds()} for c in courses]
    result = {
        **machine,
        "blocks": args.blocks,
        "lookahead": not args.no_lookahead,
        "floor_us": floors,
        "steps_us": steps,
        "recording": recording,
        "graphs": graphs,
        "block_costs": blocks,
        "published": PUBLISHED,
    }
    print_result("host_cost", result)


if __name__ == "__main__":
    main()

"""What it costs to build the graph of a decode step: compiled, plain, and in mlx-lm."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from bench.command import table
from bench.flags.clock import Clock
from bench.models import random_llama, random_prompts
from bench.names import SIZES
from bench.pairs import in_turns, ratio
from mlx_paged import Engine

PROMPT = 20
WARM_UP = 2  # steps that do not count


class Timed:
    """A call whose processor time on this thread is summed up; other attributes are its own."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        started = time.thread_time()
        result = self._call(*args, **options)
        self.seconds += time.thread_time() - started
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


Way = tuple[Callable[[], Any], Timed]
"""What computes a step, and the call that builds the graph of its forward."""


def _engine(model: nn.Module, rows: int, tokens: int, compiled: bool) -> Way:
    blocks = 2 * rows * -(-(PROMPT + tokens) // 16)
    engine = Engine(model, num_blocks=blocks, max_running=rows, compile=compiled)
    for prompt in random_prompts(rows, PROMPT, "tiny"):
        engine.add_request(prompt, max_tokens=tokens)
    runner: Any = engine.runner
    runner._forward = Timed(runner._forward)
    return engine.step, runner._forward


def _batch_generator(model: nn.Module, rows: int, tokens: int) -> Way:
    timed = Timed(model)
    generator = BatchGenerator(timed, completion_batch_size=rows, prefill_batch_size=rows)
    generator.insert(random_prompts(rows, PROMPT, "tiny"), [tokens] * rows)
    return generator.next, timed


def graph_costs(layers: int, rows: Sequence[int], num_steps: int) -> list[dict[str, float]]:
    """Medians over steps of a Llama of so many layers, in turns step by step. "graph_us" is the
    processor time of the forward's graph, "step_ms" the wall time of the whole step."""
    model = random_llama(SIZES["tiny"] | {"hidden_size": 128, "num_hidden_layers": layers})
    found, tokens = [], num_steps + 8
    for count in rows:
        ways = {
            "compiled": _engine(model, count, tokens, True),
            "plain": _engine(model, count, tokens, False),
            "mlx-lm": _batch_generator(model, count, tokens),
        }
        courses = {name: partial(_lap, *way) for name, way in ways.items()}
        laps = in_turns(courses, num_steps - WARM_UP, warm_up=WARM_UP)
        costs: dict[str, float] = {"rows": count}
        steps: dict[str, list[float]] = {}
        for name, each in laps.items():
            steps[name] = [step_seconds for _, step_seconds in each]
            graph = median(graph_seconds for graph_seconds, _ in each)
            costs[f"{name} graph_us"] = round(1e6 * graph, 1)
            costs[f"{name} step_ms"] = round(1e3 * median(steps[name]), 2)
        plain_over_compiled = ratio(steps["plain"], steps["compiled"]).median
        found.append(costs | {"plain over compiled step": round(plain_over_compiled, 3)})
    return found


def _lap(step: Callable[[], Any], timed: Timed) -> tuple[float, float]:
    """Seconds of one step: processor time of its graph, and wall time of the whole."""
    timed.seconds = 0.0
    whole = Clock.WALL.seconds(step, 1)
    return timed.seconds, whole


def graph_table(costs: Sequence[dict[str, float]]) -> str:
    return table([list(costs[0]), *([f"{value:g}" for value in each.values()] for each in costs)])

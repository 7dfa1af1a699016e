"""What a whole decode step costs the host where ops choose as on a GPU, beside mlx-lm's.

Nothing here runs on a GPU. The time is the processor time of the thread that makes the step,
without the calls of ``mx.eval`` and ``mx.async_eval``: Python, and the graph that Python builds.
"""

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step

from bench.command import table
from bench.host_cost.gpu_answers import gpu_answers, gpu_nodes
from bench.models import random_llama, random_prompts
from bench.names import SIZES
from bench.pairs import in_turns, ratio
from mlx_paged import Engine
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.patch import patched_mlx_lm

PROMPT = 20
TURN = 10  # steps of a course before the next course has its turn
WARM_STEPS = 3  # of a turn, which only fill the processor's caches
WARM_TURNS = 2
BASE = "mlx-lm"

LARGE = 1 << 16
"""Bytes of an allocation for which glibc first joins what the evaluation has freed: some 0.5 ms,
else a part of the step that first allocates so much. macOS has no such work."""

NO_SPIKE = 1e9
"""A busy machine makes some steps far longer than usual, and callgrind those that count. That an
engine finds their causes is no part of a usual step."""

ENGINES: dict[str, dict[str, Any]] = {
    "engine": {},
    "engine, compiled": {"compile": True},
    "engine, kv_bits 8": {"kv_bits": 8},
    "engine, kv_bits 8, compiled": {"kv_bits": 8, "compile": True},
    "engine, kv_bits 4": {"kv_bits": 4},
    "engine, kv_bits 4, compiled": {"kv_bits": 4, "compile": True},
}


class HostClock:
    """Processor seconds of this thread, without those of MLX's evaluation.

    Attributes:
        num_nodes: of the graphs that were evaluated while `counts`.
    """

    def __init__(self) -> None:
        self.num_nodes = 0
        self.counts = False
        self._evaluation = 0.0

    def seconds(self, run: Callable[[], object]) -> float:
        self._evaluation = 0.0
        started = time.thread_time()
        run()
        return time.thread_time() - started - self._evaluation

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context calls of MLX's evaluation are no part of the time."""
        with (
            patch.object(mx, "eval", self._apart(mx.eval)),
            patch.object(mx, "async_eval", self._apart(mx.async_eval)),
        ):
            yield

    def _apart(self, call: Callable[..., None]) -> Callable[..., None]:
        def apart(*arrays: Any) -> None:
            started = time.thread_time()
            if self.counts:
                self.num_nodes += _num_nodes(arrays)
            try:
                call(*arrays)
                mx.synchronize()  # else the CPU would compute beside the thread that is measured
                bytearray(LARGE)
            finally:
                self._evaluation += time.thread_time() - started

        return apart


def _num_nodes(arrays: Any) -> int:
    """Nodes of a graph that is not evaluated yet."""
    drawing, flat = io.StringIO(), [array for _, array in tree_flatten(arrays)]
    mx.export_to_dot(drawing, *flat)
    return drawing.getvalue().count("shape=rectangle")


@dataclass
class Course:
    """Steps of one way to decode."""

    step: Callable[[], object]
    clock: HostClock
    contexts: Sequence[Callable[[], AbstractContextManager[None]]]  # of its steps

    def turn(self) -> float:
        """Microseconds of a step, the median of a turn."""
        with self.inside():
            times = [self.clock.seconds(self.step) for _ in range(TURN)]
        return 1e6 * median(times[WARM_STEPS:])

    def num_nodes(self) -> int:
        """Nodes of the graphs that a step begins to evaluate."""
        self.clock.num_nodes, self.clock.counts = 0, True
        with self.inside():
            self.step()
        self.clock.counts = False
        return self.clock.num_nodes

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which the course's steps can be made."""
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            yield


def _engine_step(
    model: nn.Module, prompts: Sequence[list[int]], tokens: int, options: dict[str, Any]
) -> Callable[[], object]:
    rows = len(prompts)
    blocks = 2 * rows * -(-(PROMPT + tokens) // 16)
    given = {"compile": False, "spike_ms": NO_SPIKE} | options
    engine = Engine(model, num_blocks=blocks, max_running=rows, prewarm=False, **given)
    for prompt in prompts:
        engine.add_request(prompt, max_tokens=tokens)
    while not engine.step():
        pass
    return engine.step


def _mlx_lm_step(
    model: nn.Module, prompts: Sequence[list[int]], tokens: int, cache: Any = None
) -> Callable[[], object]:
    """A step of mlx-lm's generator for one stream, or of the one for a batch."""
    if len(prompts) == 1:
        steps = generate_step(mx.array(prompts[0]), model, max_tokens=tokens, prompt_cache=cache)
        next(steps)
        return lambda: next(steps)
    rows = len(prompts)
    generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=rows)
    generator.insert(list(prompts), [tokens] * rows)
    for _ in range(WARM_STEPS):
        generator.next()
    step: Callable[[], object] = generator.next
    return step


def courses_of(model: nn.Module, rows: int, tokens: int, clock: HostClock) -> dict[str, Course]:
    """mlx-lm's own decodes, the engine's, and mlx-lm's on paged caches, each with `rows` rows."""
    prompts = random_prompts(rows, PROMPT, "tiny")
    courses = {BASE: Course(_mlx_lm_step(model, prompts, tokens), clock, [gpu_nodes])}
    with gpu_answers():
        for name, options in ENGINES.items():
            step = _engine_step(model, prompts, tokens, options)
            courses[name] = Course(step, clock, [gpu_answers])
        with patched_mlx_lm():
            cache = make_prompt_cache(model) if rows == 1 else None
            step = _mlx_lm_step(model, prompts, tokens, cache)
        courses["drop-in"] = Course(step, clock, [gpu_answers, patched_mlx_lm])
    return courses


def deep_llama(layers: int) -> nn.Module:
    """A Llama of so many small layers with random float16 weights."""
    size = {"hidden_size": 128, "num_hidden_layers": layers}
    model = random_llama(SIZES["tiny"] | size)
    model.set_dtype(mx.float16)
    return model


def gpu_steps(layers: int, rows: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """By rows and course: microseconds of a step, the median over turns; how many times mlx-lm's
    step of the same turn; nodes of the step's graph."""
    model, found = deep_llama(layers), []
    for count in rows:
        clock, tokens = HostClock(), (turns + WARM_TURNS + 1) * TURN + 8
        with clock.watching():
            courses = courses_of(model, count, tokens, clock)
            runs = {name: course.turn for name, course in courses.items()}
            title = f"{count} rows"
            laps = in_turns(runs, turns, warm_up=WARM_TURNS, title=title)
            nodes = {name: course.num_nodes() for name, course in courses.items()}
        for name, times in laps.items():
            each = {
                "rows": count,
                "course": name,
                "step_us": round(median(times), 1),
                "over mlx-lm": round(ratio(times, laps[BASE]).median, 3),
                "nodes": nodes[name],
            }
            found.append(each)
    return found


def gpu_table(found: Sequence[dict[str, Any]]) -> str:
    return table([list(found[0]), *([str(value) for value in each.values()] for each in found)])

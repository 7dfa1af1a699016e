"""The arrays of engine steps on lazy models, whose weights are never computed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_paged import ops
from mlx_paged.attention import forward
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import plan_pool
from mlx_paged.kv.pool import KVPool
from mlx_paged.request import Request
from mlx_paged.runner.model_probe import ModelProfile, probe
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step

BLOCK_SIZE = 16
VIEWS = {
    *("Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape"),
    *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
}
"""Primitives whose outputs lie in the memory of their first input."""

DONATES = {
    *("Abs", "Add", "Divide", "Exp", "Maximum", "Minimum", "Multiply", "Negative", "Sigmoid"),
    *("Subtract", "Tanh"),
}
"""Primitives whose output takes an input's memory, if nobody else needs that."""


@dataclass(frozen=True)
class Op:
    """A primitive: the names of its inputs, and the names, elements and bytes of its outputs."""

    name: str
    inputs: list[str]
    outputs: list[tuple[str, int, int]]


def _size(array: tuple[str, Any, Any]) -> tuple[str, int, int]:
    name, shape, dtype = array
    return name, prod(shape), prod(shape) * dtype.size


@contextmanager
def metals_ops() -> Iterator[None]:
    """One primitive for each op that is one launch on a GPU, and a GPU's choice of paths."""

    def after(array: mx.array, *others: Any) -> mx.array:
        return mx.depends([array], [each for each in others if isinstance(each, mx.array)])[0]

    def write(pool: KVPool, layer: int, k: mx.array, v: mx.array, slots: mx.array) -> None:
        pool.k[layer] = after(pool.k[layer], k, v, slots)

    def through_tables(self: Any, query: Any, tables: mx.array, lens: mx.array, *_: Any) -> Any:
        out = mx.sin(query.q[..., : self.shape.v_head_dim])
        return after(out, self.pool.k[self.layer], tables, lens)

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **_: Any) -> mx.array:
        return after(mx.sin(q[..., : v.shape[-1]]), k, v, mask)

    with (
        patch.object(mx, "contiguous", lambda x, *_: mx.sin(x)),
        patch.object(mx.fast, "rms_norm", lambda x, weight, eps: mx.negative(x)),
        patch.object(mx.fast, "rope", lambda x, *_, **__: mx.abs(x)),
        patch.object(KVPool, "write", write),
        patch.object(forward.LayerView, "through_tables", through_tables),
        patch.object(forward, "mlx_attention", attention),
        patch.object(ops, "take_from_pool", lambda rows, runs: mx.take(rows, runs, axis=0)),
        patch("mlx_paged.ops.cpu_layers._DTYPES", ()),  # MLX's own ops choose tokens
        patch.object(ops, "is_transforming", lambda: False),
        patch.object(ops, "serves_chunks", lambda *_: True),
        patch.object(forward, "max_paged_queries", lambda: forward.FEW_QUERIES),
        patch("mlx_paged.runner.layer_cache.max_paged_queries", lambda: forward.FEW_QUERIES),
    ):
        yield


class StepArrays:
    """The ops of each step that a scheduler plans, for a model of any size."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        self.profile: ModelProfile = probe(model)
        self._model = model
        windows, recurrent = self.profile.windows, self.profile.recurrent
        plan = plan_pool(self.profile.shapes, windows, BLOCK_SIZE, one_group=recurrent)
        self.blocks = BlockAllocator(num_blocks, BLOCK_SIZE, plan.groups, 512)
        self._pool = KVPool((), 1, BLOCK_SIZE, plan, capacity=1)
        self._runner = ModelRunner(model, self.profile, plan.places, self.blocks, self._pool)
        self._runner.cpu_layers.diverted = nullcontext  # type: ignore[method-assign]
        self._runner._begin = lambda arrays: None  # type: ignore[method-assign]
        self._weights = dict(tree_flatten(model.parameters()))

    def ops(self, step: Step) -> tuple[list[Op], set[str]]:
        """The ops in the order of evaluation, and the names of the arrays that outlive them."""
        found: list[Op] = []
        results: set[str] = set()

        def note(entry: dict[str, Any]) -> None:
            if entry["type"] == "primitive":
                names = [name for name, *_ in entry["inputs"]]
                found.append(Op(entry["name"], names, [*map(_size, entry["outputs"])]))
            elif entry["type"] == "constants":
                sizes = ((name, array.size, array.nbytes) for name, array in entry["constants"])
                found.append(Op("constants", [], [*sizes]))
            elif entry["type"] == "inputs":
                found.append(Op("weights", [], [*map(_size, entry["inputs"])]))
            elif entry["type"] == "outputs":
                results.update(name for name, *_ in entry["outputs"])

        def compute(*weights: mx.array) -> list[mx.array]:
            self._model.update(tree_unflatten([*zip(self._weights, weights, strict=True)]))
            return self._runner.launch(step, None).pending

        try:
            mx.export_function(note, compute, *self._weights.values())
        finally:
            self._model.update(tree_unflatten([*self._weights.items()]))
            self._pool.reset_handles()
        return found, results


def steps_of(scheduler: Scheduler, seed: int, num_steps: int, longest: int) -> Iterator[Step]:
    """Steps with prompts of up to `longest` tokens that arrive and end at any time. Their seconds
    grow with their tokens, and vary."""
    random = Random(seed)
    for number in range(num_steps):
        while random.random() < 0.2 or not (scheduler.running or scheduler.waiting):
            length = int(longest ** random.uniform(0.3, 1.0))
            tokens = [random.randrange(100) for _ in range(length)]
            params = SamplingParams(max_tokens=random.randint(1, 200))
            scheduler.add(Request(1000 * number + random.randrange(1000), tokens, params, seed=0))
        step = scheduler.schedule()
        if not step.spans:
            continue
        yield step
        work = step.work
        seconds = 0.01 + 2e-4 * (work.decode_rows + work.chunk_tokens) + 1e-8 * work.chunk_context
        scheduler.budget.observe(work, seconds * random.uniform(0.9, 1.1))
        scheduler.commit(step)
        for span in step.spans:
            if span.samples:
                span.request.tokens.append(random.randrange(100))
                if span.request.num_generated >= span.request.params.max_tokens:
                    scheduler.complete(span.request)

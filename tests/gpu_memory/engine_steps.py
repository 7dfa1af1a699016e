"""The arrays of engine steps on lazy models, whose weights are never computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from random import Random
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import _ext, ops
from mlx_paged.attention import forward, paths
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.pool import KVPool
from mlx_paged.kv.shapes import KVShape
from mlx_paged.kv.states import StateIds
from mlx_paged.request import Request
from mlx_paged.runner.model_probe import ModelProfile, probe
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.recurrent_rows import States
from mlx_paged.runner.recurrent_states import RecurrentStates
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Step

Place = tuple[int, int, int]
"""The id of joined states, a layer among the recurrent ones, and which of the layer's arrays."""

BLOCK_SIZE = 16
VIEWS = {
    *("Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape"),
    *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
    *("State", "Pool"),
}
"""Primitives whose outputs lie in the memory of their first input. Two are none."""

FROM_BEFORE = "State", "Pool"
"""The input is a result of the step before: a state of a recurrent layer, which the engine still
holds, or an array of a pool, which nothing holds but the next step."""

DONATES = {
    *("Abs", "Add", "Divide", "Exp", "Maximum", "Minimum", "Multiply", "Negative", "Sigmoid"),
    *("Subtract", "Tanh", "Scatter"),
}
"""Primitives whose output takes an input's memory, if nobody else needs that; a scatter that of its
first one."""


@dataclass(frozen=True)
class Op:
    """A primitive: the names of its inputs, and the names, elements and bytes of its outputs."""

    name: str
    inputs: list[str]
    outputs: list[tuple[str, int, int]]


Weight = tuple[nn.Module, str, mx.array]
"""A module, the name of one of its arrays, and the array."""


def weights_of(model: nn.Module) -> list[Weight]:
    """The arrays of all modules."""
    return [
        (module, name, array)
        for module in model.modules()
        for name, array in module.items()
        if isinstance(array, mx.array)
    ]


@dataclass
class Exported:
    """What MLX says of a function of a model's weights and of other arrays.

    Attributes:
        ops: in the order of evaluation.
        weights: the op whose outputs are the weights.
        others: the names, elements and bytes of the other arrays.
        results: the names of the results.
    """

    ops: list[Op]
    weights: Op
    others: list[tuple[str, int, int]]
    results: list[str]

    @classmethod
    def of(
        cls,
        compute: Callable[[Sequence[mx.array]], list[mx.array]],
        weights: Sequence[Weight],
        others: Sequence[mx.array],
    ) -> "Exported":
        """Export `compute`, a function of `others` that also reads the weights of modules."""
        found: list[Op] = []
        inputs: list[tuple[str, int, int]] = []
        results: list[str] = []

        def note(entry: dict[str, Any]) -> None:
            if entry["type"] == "primitive":
                names = [name for name, *_ in entry["inputs"]]
                found.append(Op(entry["name"], names, [*map(_sized, entry["outputs"])]))
            elif entry["type"] == "constants":
                sizes = ((name, array.size, array.nbytes) for name, array in entry["constants"])
                found.append(Op("constants", [], [*sizes]))
            elif entry["type"] == "inputs":
                inputs.extend(map(_sized, entry["inputs"]))
            elif entry["type"] == "outputs":
                results.extend(name for name, *_ in entry["outputs"])

        def whole(*arrays: mx.array) -> list[mx.array]:
            for (module, name, _), array in zip(weights, arrays, strict=False):
                module[name] = array
            return compute(arrays[len(weights) :])

        try:
            mx.export_function(note, whole, *(array for *_, array in weights), *others)
        finally:
            for module, name, array in weights:
                module[name] = array
        of_weights = Op("weights", [], inputs[: len(weights)])
        return cls(found, of_weights, inputs[len(weights) :], results)


def _sized(array: tuple[str, Any, Any]) -> tuple[str, int, int]:
    name, shape, dtype = array
    return name, prod(shape), prod(shape) * dtype.size


@cache
def scratch_bytes(
    queries: tuple[int, ...], shape: KVShape, tables: tuple[int, ...], num_decodes: int | None
) -> int:
    """Bytes of the partial results of one call of attention; `num_decodes`: of a ragged batch."""
    q = mx.zeros(queries, shape.dtype)
    caches = (
        mx.zeros((shape.n_kv_heads, 1, BLOCK_SIZE, dim), shape.dtype)
        for dim in (shape.head_dim, shape.v_head_dim)
    )
    options: dict[str, Any] = {}
    if num_decodes is not None:
        options = {"cu_seqlens": mx.zeros(tables[0] + 1, mx.int32), "num_decodes": num_decodes}
    others = mx.zeros(tables, mx.int32), mx.zeros(tables[0], mx.int32)
    return sum(
        _ext.metal.plan_attention(q, *caches, *others, scale=1.0, **options)["scratch_bytes"]
    )


@contextmanager
def metals_ops() -> Iterator[None]:
    """One primitive for each op that is one launch on a GPU, and a GPU's choice of paths."""

    def after(array: mx.array, *others: Any) -> mx.array:
        """The array, and a tiny op that reads others."""
        read = (each.flatten()[:1].view(mx.uint8)[:1] for each in others if hasattr(each, "dtype"))
        return mx.depends([array], [mx.concatenate([*read])])[0]

    def write(pool: KVPool, layer: int, k: mx.array, v: mx.array, slots: mx.array) -> None:
        pool.k[layer] = after(pool.k[layer], k, v, slots)

    def through_tables(
        self: Any,
        query: Any,
        way: Any,
        tables: mx.array,
        lens: mx.array,
        cu_seqlens: Any = None,
        *num: int,
    ) -> Any:
        q, shape = query.q, self.shape
        of_ragged = None if cu_seqlens is None else num[0]
        size = scratch_bytes(tuple(q.shape), shape, tuple(tables.shape), of_ragged)
        scratch = mx.sin(mx.broadcast_to(mx.array(0.0), (max(1, size // 4),)))
        out = mx.sin(q[..., : shape.v_head_dim])
        return after(out, self.pool.k[self.layer], tables, lens, scratch)

    def gather_blocks(cache: mx.array, _: mx.array, num_tokens: int, runs: mx.array) -> mx.array:
        rows = cache.transpose(1, 0, 2, 3).flatten(0, 1).flatten(1, 2)
        found = mx.take(rows, runs, axis=0).reshape(*runs.shape[:2], -1, cache.shape[3])
        return found[:, :, :num_tokens]

    def gated_delta(q: Any, k: mx.array, v: mx.array, g: Any, beta: Any, state: Any, _: Any) -> Any:
        return after(mx.sin(v), q, k, g, beta), mx.sin(state)

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **_: Any) -> mx.array:
        return after(mx.sin(q[..., : v.shape[-1]]), k, v, mask)

    with (
        patch.object(mx, "contiguous", lambda x, *_: mx.sin(x)),
        patch.object(mx.fast, "rms_norm", lambda x, weight, eps: mx.negative(x)),
        patch.object(mx.fast, "rope", lambda x, *_, **__: mx.abs(x)),
        patch.object(KVPool, "write", write),
        patch.object(forward.LayerView, "append", lambda *_: None),
        patch.object(forward.LayerView, "attend_again", lambda *_: None),
        patch.object(forward.LayerView, "through_tables", through_tables),
        patch.object(forward, "mlx_attention", attention),
        patch.object(ops, "gather_blocks", gather_blocks),
        patch("mlx_lm.models.gated_delta.gated_delta_ops", gated_delta),
        patch("mlx_paged.ops.cpu_layers._DTYPES", ()),  # MLX's own ops choose tokens
        patch.object(ops, "is_transforming", lambda: False),
        patch.object(ops, "serves_chunks", lambda *_: True),
        patch.object(paths, "max_paged_queries", lambda: paths.FEW_QUERIES),
        patch("mlx_paged.runner.layer_cache.max_paged_queries", lambda: paths.FEW_QUERIES),
    ):
        yield


class StepArrays:
    """The ops of each step that a scheduler plans, for a model of any size."""

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        self.profile: ModelProfile = probe(model)
        plan = self.profile.pool_plan(BLOCK_SIZE)
        states = StateIds() if self.profile.states.exist else None
        self.blocks = BlockAllocator(num_blocks, BLOCK_SIZE, plan.groups, 512, states)
        self._pool = KVPool((), 1, BLOCK_SIZE, plan, capacity=1)
        self._runner = ModelRunner(model, self.profile, plan.places, self.blocks, self._pool)
        self._runner.cpu_layers.diverted = nullcontext  # type: ignore[method-assign]
        self._runner._begin = lambda arrays: None  # type: ignore[method-assign]
        self._weights = weights_of(model)
        self._names: dict[Place, str] = {}  # of the states after the step before

    def ops(self, step: Step) -> tuple[list[Op], set[str]]:
        """The ops in the order of evaluation, and the names of the arrays that outlive them. A name
        belongs to one step; that of an input of "State" to the step before."""
        held = self._runner.states
        held.release({*step.released} - {span.reads for span in step.spans})
        before, names = _states(held), self._names
        shapes: dict[Place, mx.array] = {}

        def compute(states: Sequence[mx.array]) -> list[mx.array]:
            joined = _joined(held)
            for (key, layer, index), array in zip(before, states, strict=True):
                joined[key][layer][index] = array
            pending = self._runner.launch(step, None).pending
            shapes.update(_states(held))
            return [*pending, *shapes.values()]

        try:
            found = Exported.of(compute, self._weights, [*before.values()])
        finally:
            self._pool.reset_handles()
        joined = _joined(held)
        for (key, layer, index), array in shapes.items():
            joined[key][layer][index] = mx.zeros(array.shape, array.dtype)
        results = found.results[-len(shapes) :]
        self._names = dict(zip(shapes, results, strict=True)) if shapes else {}
        of_states = zip(before, found.others, strict=True)
        first = [Op("State", [names[place]], [array]) for place, array in of_states]
        return [found.weights, *first, *found.ops], set(found.results)


def _joined(held: RecurrentStates) -> dict[int, States]:
    """The states after the newest tokens of all sequences, joined as they are."""
    return {id(joined): joined.states for joined, _ in held._held.values()}


def _states(held: RecurrentStates) -> dict[Place, mx.array]:
    """All arrays of them."""
    return {
        (key, i, j): array
        for key, layers in _joined(held).items()
        for i, layer in enumerate(layers)
        for j, array in enumerate(layer)
        if array is not None
    }


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

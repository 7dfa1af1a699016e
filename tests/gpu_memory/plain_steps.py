"""The arrays of engine steps where plain MLX writes to the pool and attends over gathered keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import ops
from mlx_paged.attention import forward
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.pool import KVPool
from mlx_paged.ops import dispatch
from mlx_paged.options import PoolConfig
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.scheduler.step import Step
from tests.gpu_memory.engine_steps import BLOCK_SIZE, Exported, Op, weights_of


@contextmanager
def plain_ops() -> Iterator[None]:
    """MLX's ops, each one launch on a GPU: fast attention, and gathers that can be exported."""

    def gather_blocks(cache: mx.array, _: mx.array, num_tokens: int, runs: mx.array) -> mx.array:
        blocks = cache.transpose(1, 0, 2, 3)
        rows = blocks.reshape(-1, blocks.shape[2] * blocks.shape[3])
        found = mx.take(rows, runs, axis=0).reshape(*runs.shape[:2], -1, cache.shape[3])
        return found[:, :, :num_tokens]

    def attention(q: mx.array, k: mx.array, v: mx.array, *, mask: Any, **_: Any) -> mx.array:
        read = [each.flatten()[:1] for each in (k, v, mask) if isinstance(each, mx.array)]
        return mx.depends([mx.sin(q[..., : v.shape[-1]])], read)[0]

    with (
        patch.object(mx.fast, "rms_norm", lambda x, weight, eps: mx.negative(x)),
        patch.object(mx.fast, "rope", lambda x, *_, **__: mx.abs(x)),
        patch.object(dispatch, "kernel_on", lambda *_: "reference"),
        patch.object(forward, "mlx_attention", attention),
        patch.object(ops, "gather_blocks", gather_blocks),
        patch.object(ops, "hadamard", mx.sin),
        patch("mlx_paged.ops.cpu_layers._DTYPES", ()),  # MLX's own ops choose tokens
        patch.object(ops, "is_transforming", lambda: False),
        patch("mlx_paged.runner.layer_cache.max_paged_queries", lambda: 0),
    ):
        yield


class PlainSteps:
    """The ops of steps, for a model of any size on a pool of two blocks. A step has one forward."""

    def __init__(self, model: nn.Module, num_blocks: int, kv_bits: Any = None) -> None:
        self.profile = probe(model).stored_by(PoolConfig(kv_bits=kv_bits))
        plan = self.profile.pool_plan(BLOCK_SIZE, shares=False)
        self.blocks = BlockAllocator(num_blocks, BLOCK_SIZE, plan.groups, 512, None)
        self.pool = KVPool((), 1, BLOCK_SIZE, plan, capacity=1)
        assert not self.pool.in_place
        self._runner = ModelRunner(model, self.profile, plan.places, self.blocks, self.pool)
        self._runner.cpu_layers.diverted = nullcontext  # type: ignore[method-assign]
        self._runner._begin = lambda arrays: None  # type: ignore[method-assign]
        self._weights = weights_of(model)
        self._written: list[str] = []  # by the step before

    def ops(self, step: Step) -> tuple[list[Op], set[str]]:
        """The ops in the order of evaluation, and the names of the arrays that outlive them."""
        handles = self.pool.handles()

        def compute(arrays: Sequence[mx.array]) -> list[mx.array]:
            self.pool.replace_handles(arrays)
            pending = self._runner.launch(step, None).pending
            return [*pending, *self.pool.handles()]

        try:
            found = Exported.of(compute, self._weights, handles)
        finally:
            self.pool.replace_handles(handles)
        if self._written:
            pairs = zip(self._written, found.others, strict=True)
            first = [Op("Pool", [name], [array]) for name, array in pairs]
        else:
            first = [Op("constants", [], found.others)]
        self._written = found.results[-len(handles) :]
        return [found.weights, *first, *found.ops], set(found.results)

"""The Metal launches that engines make: every architecture, in every dtype and block size.

An architecture's tiny model (docs/support.md) tells how its layers attend: windows, sinks, latents,
values narrower than keys. Released models have the same layers with other sizes, so each kind of
layer is taken with its own sizes and with those of `HEAD_DIMS` and `GROUPS`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_paged import UnsupportedModelError, _ext, ops
from mlx_paged.attention import prewarm as prewarming
from mlx_paged.attention.causal import FULL, causal
from mlx_paged.attention.prewarm import AttentionKind, prewarm
from mlx_paged.kv.layer_groups import PoolPlan
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.formats import FORMATS
from mlx_paged.runner.model_probe import ModelProfile, probe
from scripts.support_matrix import names
from tests.support.models.architectures import NOT_ON_A_CPU, build

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
EQUAL, NARROW, LATENT = "values as wide as keys", "narrower values", "latents"
HEAD_DIMS = {
    EQUAL: ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256)),
    NARROW: ((96, 64), (192, 128)),
    LATENT: ((320, 256), (576, 512)),
}
"""Dimensions of keys and of values in released models."""

GROUPS = {EQUAL: (1, 2, 4, 8), NARROW: (1, 8), LATENT: (16, 128)}
"""Query heads that share a KV head."""

Call = dict[str, Any]
"""As ``_ext.metal`` describes it."""


def _zeros_on_a_gpu(shape: Sequence[int], dtype: mx.Dtype, **_: int) -> mx.array:
    return mx.zeros(shape, dtype)


@dataclass(frozen=True)
class Architecture:
    """One that is served, as its tiny model shows it."""

    name: str
    profile: ModelProfile

    def pool_plan(self, block_size: int) -> PoolPlan:
        return self.profile.pool_plan(block_size)


def architectures() -> Iterator[Architecture]:
    """All of docs/support.md that are served."""
    for name in names():
        if name in NOT_ON_A_CPU:
            continue
        try:
            yield Architecture(name, probe(build(name)))
        except UnsupportedModelError:
            continue


def kinds_of(served: Sequence[Architecture]) -> list[AttentionKind]:
    """Each kind of layer of some architectures, with its own sizes and with real ones."""
    tiny = {kind for each in served for kind in each.profile.attentions}
    return list(dict.fromkeys(size for kind in tiny for size in (kind, *_real_sizes(kind))))


def _real_sizes(kind: AttentionKind) -> Iterator[AttentionKind]:
    shape = kind.shape
    form = LATENT if shape.latent else EQUAL if shape.head_dim == shape.v_head_dim else NARROW
    for k_dim, v_dim in HEAD_DIMS[form]:
        for group in GROUPS[form]:
            sized = replace(
                shape, n_kv_heads=1 if shape.latent else 2, head_dim=k_dim, v_head_dim=v_dim
            )
            num_heads = sized.n_kv_heads * group
            sees = FULL if kind.sees.is_full else causal(128)
            yield replace(kind, shape=sized, num_heads=num_heads, sees=sees)


def in_dtype(kind: AttentionKind, dtype: mx.Dtype) -> AttentionKind:
    return replace(kind, shape=replace(kind.shape, dtype=dtype), q_dtype=dtype)


def calls_of(
    kinds: Sequence[AttentionKind], block_size: int, plan: PoolPlan | None = None
) -> list[Call]:
    """What an engine's start plans on a GPU: attention of one sequence and of many, of one length
    and of several, over short and long contexts; a write; a copy."""
    calls: list[Call] = []

    def recorded(function: Any, changes: Any) -> Any:
        def record(*arguments: Any, **options: Any) -> Any:
            call = function(*arguments, **options)
            calls.append(call)
            return changes(call, (*arguments, *options.values()))

        return record

    metal = _ext.metal
    planned = recorded(metal.plan_attention, lambda call, _: call)
    written = recorded(metal.plan_write_kv, lambda _, given: given[2:4] + given[5:])
    copied = recorded(metal.plan_copy_blocks, lambda _, arguments: arguments[:2])
    with ExitStack() as patches:
        patches.enter_context(patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)))
        computed_once = SimpleNamespace(**vars(mx) | {"zeros": lru_cache(mx.zeros)})
        patches.enter_context(patch.object(prewarming, "mx", computed_once))
        patches.enter_context(patch.object(metal, "has_metal", lambda: True))
        patches.enter_context(patch.object(metal, "plan_attention", planned))
        patches.enter_context(patch.object(ops, "pool_zeros", _zeros_on_a_gpu))
        for op in ("paged_attention", "paged_attention_varlen"):
            patches.enter_context(patch.object(ops, op, lambda q, *_, **__: q))
        patches.enter_context(patch.object(ops, "write_kv", written))
        patches.enter_context(patch.object(ops, "copy_blocks", copied))
        prewarm(kinds, block_size, plan)
    return calls


def reachable_calls(
    kinds: Sequence[AttentionKind], dtypes: Sequence[mx.Dtype], block_sizes: Sequence[int]
) -> Iterator[Call]:
    """The calls for each kind of layer in each dtype and block size, and with each kv_bits."""
    for kind in kinds:
        for dtype in dtypes:
            for block_size in block_sizes:
                for kv_bits in _every_kv_bits(kind.shape):
                    shape = replace(kind.shape, kv_bits=kv_bits)
                    yield from calls_of([in_dtype(replace(kind, shape=shape), dtype)], block_size)


def _every_kv_bits(shape: KVShape) -> Iterator[int | None]:
    yield None
    for kv_bits in FORMATS:
        if not shape.latent and (kv_bits == 8 or not (shape.head_dim | shape.v_head_dim) % 8):
            yield kv_bits

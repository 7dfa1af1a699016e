"""The layers of a model to whose outputs low-rank terms may be added."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

from mlx_paged.ops import as_numpy
from mlx_paged.runner.layer_cuts import INPUTS, Cut, cuts_of

SUMMED = nn.ShardedToAllLinear, nn.QuantizedShardedToAllLinear
"""Layers of which each process has a part of the inputs, and which add the outputs up."""
_LINEAR = (
    *(nn.Linear, nn.QuantizedLinear, nn.AllToShardedLinear, nn.QuantizedAllToShardedLinear),
    *SUMMED,
)
_EXPERTS = SwitchLinear, QuantizedSwitchLinear
ROUTERS = SwitchGLU, SwitchMLP
"""Modules that give each row to its experts."""

Pair = tuple[mx.array, mx.array]
"""The two factors of a layer's term: ``[r, I]`` and ``[r, O]``, with experts ``[E, r, I]`` and
``[E, r, O]``. The scale is a part of the second one."""

Factors = dict[str, Pair]
"""By path of the layer, in the order of the paths."""

Numbers = npt.NDArray[np.uint8]
"""The bytes of a factor."""


@dataclass(frozen=True)
class Place:
    """A linear layer that may have terms.

    Attributes:
        path: of the module in the model, as mlx-lm names parameters.
        inputs: of the whole layer.
        outputs: of the whole layer.
        dtype: of the factors.
        experts: how many; None: the layer has none.
        cut: how processes divide the layer; None: each has the whole layer.
    """

    path: str
    inputs: int
    outputs: int
    dtype: mx.Dtype
    experts: int | None = None
    cut: Cut | None = None

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two factors of the whole layer."""
        lead = () if self.experts is None else (self.experts,)
        return (*lead, rank, self.inputs), (*lead, rank, self.outputs)

    def own_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two factors of this process's part."""
        (*lead, inputs), (*_, outputs) = self.shapes(rank)
        if self.cut is not None and self.cut.axis == INPUTS:
            inputs //= self.cut.num_parts
        elif self.cut is not None:
            outputs //= self.cut.num_parts
        return (*lead, inputs), (*lead, outputs)

    def num_bytes(self, rank: int) -> int:
        """Bytes of both factors of this process's part."""
        return sum(map(math.prod, self.own_shapes(rank))) * self.dtype.size

    def part(self, pair: Pair, number: int) -> tuple[Numbers, Numbers]:
        """The bytes of the factors of a process's part. The other factor is whole: with a part of
        the inputs the terms are summed as the layer's outputs are."""
        a, b = (as_numpy(each.view(mx.uint8)) for each in pair)
        size = self.dtype.size
        if self.cut is not None and self.cut.axis == INPUTS:
            a = _columns(a, self.cut.ranges(self.inputs, number), size)
        elif self.cut is not None:
            b = _columns(b, self.cut.ranges(self.outputs, number), size)
        return a, b

    def pair_of(self, numbers: Sequence[Numbers], rank: int) -> Pair:
        """The factors of this process's part that these bytes are."""
        a, b = (
            mx.array(each.reshape(*shape[:-1], -1)).view(self.dtype)
            for each, shape in zip(numbers, self.own_shapes(rank), strict=True)
        )
        return a, b


def _columns(numbers: Numbers, ranges: Sequence[tuple[int, int]], size: int) -> Numbers:
    """Some columns of numbers, each of `size` bytes."""
    pieces = [numbers[..., size * start : size * stop] for start, stop in ranges]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)


def places_of(model: nn.Module) -> Mapping[str, Place]:
    """The linear layers, of experts or not, within ``model.layers``, by path. Those are missing
    that processes divide in an unknown way."""
    within = {id(module) for layer in model.layers for module in layer.modules()}
    modules = {path: module for path, module in model.named_modules() if id(module) in within}
    routed = {
        id(child)
        for module in modules.values()
        if isinstance(module, ROUTERS)
        for child in module.children().values()
    }
    usual, cuts = _usual_dtype(model), cuts_of(model)
    return {
        path: _place(path, module, usual, cuts.by_path.get(path))
        for path, module in modules.items()
        if path not in cuts.unknown
        and (isinstance(module, _LINEAR) or (isinstance(module, _EXPERTS) and id(module) in routed))
    }


def _place(path: str, module: nn.Module, usual: mx.Dtype, cut: Cut | None) -> Place:
    weight = module["weight"]
    outputs, inputs = weight.shape[-2:]
    if hasattr(module, "bits"):
        inputs = inputs * 32 // module.bits
    if cut is not None and cut.axis == INPUTS:
        inputs *= cut.num_parts
    elif cut is not None:
        outputs *= cut.num_parts
    own = (each.dtype for _, each in tree_flatten(module.parameters()) if _is_real(each.dtype))
    experts = weight.shape[0] if isinstance(module, _EXPERTS) else None
    return Place(path, inputs, outputs, next(own, usual), experts, cut)


def _is_real(dtype: mx.Dtype) -> bool:
    return dtype in (mx.float32, mx.float16, mx.bfloat16)


def _usual_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of the first parameter that is a real number: of the embedding or of a norm."""
    dtypes = (each.dtype for _, each in tree_flatten(model.parameters()))
    return next(filter(_is_real, dtypes), mx.float32)

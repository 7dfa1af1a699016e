"""The layers of a model that an adapter may change."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)

_LINEAR = nn.Linear, nn.QuantizedLinear
_EXPERTS = SwitchLinear, QuantizedSwitchLinear
ROUTERS = SwitchGLU, SwitchMLP
"""Modules that give each row to its experts."""

Pair = tuple[mx.array, mx.array]
"""The two factors of a layer's term: ``[r, I]`` and ``[r, O]``, with experts ``[E, r, I]`` and
``[E, r, O]``. The scale is a part of the second one."""


@dataclass(frozen=True)
class Place:
    """A linear layer that an adapter may change.

    Attributes:
        path: of the module in the model, as mlx-lm names parameters.
        dtype: of the factors.
        experts: how many; None: the layer has none.
    """

    path: str
    inputs: int
    outputs: int
    dtype: mx.Dtype
    experts: int | None = None

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the two factors."""
        lead = () if self.experts is None else (self.experts,)
        return (*lead, rank, self.inputs), (*lead, rank, self.outputs)

    def num_bytes(self, rank: int) -> int:
        """Bytes of both factors."""
        count = (self.experts or 1) * rank * (self.inputs + self.outputs)
        return count * self.dtype.size


def places_of(model: nn.Module) -> Mapping[str, Place]:
    """The linear layers, of experts or not, within ``model.layers``, by path."""
    within = {id(module) for layer in model.layers for module in layer.modules()}
    modules = {path: module for path, module in model.named_modules() if id(module) in within}
    routed = {
        id(child)
        for module in modules.values()
        if isinstance(module, ROUTERS)
        for child in module.children().values()
    }
    usual = _usual_dtype(model)
    return {
        path: _place(path, module, usual)
        for path, module in modules.items()
        if isinstance(module, _LINEAR) or (isinstance(module, _EXPERTS) and id(module) in routed)
    }


def _place(path: str, module: nn.Module, usual: mx.Dtype) -> Place:
    weight = module["weight"]
    outputs, inputs = weight.shape[-2:]
    if hasattr(module, "bits"):
        inputs = inputs * 32 // module.bits
    own = (each.dtype for _, each in tree_flatten(module.parameters()) if _is_real(each.dtype))
    experts = weight.shape[0] if isinstance(module, _EXPERTS) else None
    return Place(path, inputs, outputs, next(own, usual), experts)


def _is_real(dtype: mx.Dtype) -> bool:
    return dtype in (mx.float32, mx.float16, mx.bfloat16)


def _usual_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype of the first parameter that is a real number: of the embedding or of a norm."""
    dtypes = (each.dtype for _, each in tree_flatten(model.parameters()))
    return next(filter(_is_real, dtypes), mx.float32)

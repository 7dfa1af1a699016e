"""Linear layers on CPUs, plain and quantized, as one op of :mod:`mlx_paged._ext.layers` each.

MLX's CPU backend computes a product with quantized or 16-bit weights on one thread, and a linear
layer is up to five nodes of its graph. Nothing else depends on this module: GPUs do not use it, and
without it all layers are MLX's.
"""

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged import _ext
from mlx_paged.ops.cpu_layers import Place, fits

VARIABLE = "MLX_PAGED_CPU_LINEAR"  # 0: all linear layers are MLX's

GROUPS = 32, 64, 128


def places(wanted: bool | None) -> list[Place]:
    """The methods that engines divert; `wanted`: None lets the environment decide."""
    if not (os.environ.get(VARIABLE) != "0" if wanted is None else wanted):
        return []
    methods: list[tuple[type[nn.Module], str, Callable[..., mx.array]]] = [
        (nn.Linear, "__call__", _linear),
        (nn.Embedding, "as_linear", _linear),
        (nn.QuantizedLinear, "__call__", _quantized),
        (nn.QuantizedEmbedding, "as_linear", _quantized),
    ]
    return [Place(kind, name, _ORIGINALS[kind], fused) for kind, name, fused in methods]


_ORIGINALS: dict[type[nn.Module], Callable[..., mx.array]] = {
    nn.Linear: nn.Linear.__call__,
    nn.Embedding: nn.Embedding.as_linear,
    nn.QuantizedLinear: nn.QuantizedLinear.__call__,
    nn.QuantizedEmbedding: nn.QuantizedEmbedding.as_linear,
}


def _original(layer: nn.Module) -> Callable[..., mx.array]:
    return next(_ORIGINALS[kind] for kind in type(layer).__mro__ if kind in _ORIGINALS)


def _linear(layer: nn.Module, x: mx.array) -> mx.array:
    weight, bias = layer["weight"], layer.get("bias")
    if not (fits(x, weight) and fits(x, bias)):
        return _original(layer)(layer, x)
    return _ext.layers.linear(x, weight, bias)


def _quantized(layer: Any, x: mx.array) -> mx.array:
    scales, offsets, bias = layer["scales"], layer.get("biases"), layer.get("bias")
    known = layer.mode == "affine" and layer.bits in (4, 8) and layer.group_size in GROUPS
    if not (known and fits(x, scales) and fits(x, offsets) and fits(x, bias)):
        return _original(layer)(layer, x)
    sizes = {"group_size": layer.group_size, "bits": layer.bits}
    return _ext.layers.quantized_linear(x, layer["weight"], scales, offsets, bias, **sizes)

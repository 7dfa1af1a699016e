"""Faster CPU kernels for layers of a model, and for the likeliest token of a row.

On CPUs MLX composes ``mx.fast.rms_norm``, ``mx.fast.rope`` and the activations of many operations.
Each of these is a pass over memory on one thread. Inside :meth:`CPULayers.diverted` the kernels of
:mod:`mlx_paged._ext.layers` replace them. Their results may differ in the last bits. GPUs keep
MLX's own kernels.

Linear layers, plain and quantized, are one op each (docs/cpu-linear.md). MLX computes products with
quantized or 16-bit weights on one thread, and a linear layer is up to five nodes of its graph.
:mod:`mlx_paged.ops.cpu_recurrent` has the functions of recurrent layers.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, switch_layers

from mlx_paged import _ext
from mlx_paged.ops.cpu_recurrent import KNOWN, Known, functions_of

Layer = Callable[..., mx.array]

_DTYPES = frozenset((mx.float32, mx.float16, mx.bfloat16))

mlx_rms_norm: Layer = mx.fast.rms_norm
mlx_rope: Layer = mx.fast.rope
mlx_silu: Layer = nn.silu
mlx_gelu_approx: Layer = nn.gelu_approx
mlx_swiglu: Layer = activations.swiglu
mlx_precise_swiglu: Layer = activations.precise_swiglu
mlx_linear: dict[type[nn.Module], Layer] = {
    nn.Linear: nn.Linear.__call__,
    nn.Embedding: nn.Embedding.as_linear,
    nn.QuantizedLinear: nn.QuantizedLinear.__call__,
    nn.QuantizedEmbedding: nn.QuantizedEmbedding.as_linear,
    switch_layers.SwitchLinear: switch_layers.SwitchLinear.__call__,
    switch_layers.QuantizedSwitchLinear: switch_layers.QuantizedSwitchLinear.__call__,
}

LINEAR_VARIABLE = "MLX_PAGED_CPU_LINEAR"  # 0: linear layers are MLX's
GROUP_SIZES = 32, 64, 128


class Attribute(NamedTuple):
    """An attribute, of a module or a class, through which models call a layer."""

    owner: Any
    name: str
    original: Layer
    fused: Layer


_lock = Lock()
_inside: dict[int, list["CPULayers"]] = {}  # by thread: whose contexts it is inside of
_diverted: set[Attribute] = set()


class CPULayers:
    """The layers of a model that have a fused kernel.

    Args:
        linear: whether linear layers are among them; None: on Linux, unless the environment says
            no. Layers whose weight is a view that is not dense stay MLX's.
    """

    def __init__(self, model: nn.Module, linear: bool | None = None) -> None:
        self._attributes = [
            Attribute(mx.fast, "rms_norm", mlx_rms_norm, _rms_norm),
            Attribute(mx.fast, "rope", mlx_rope, _rope),
            Attribute(nn, "silu", mlx_silu, _silu),
            Attribute(nn, "gelu_approx", mlx_gelu_approx, _gelu_approx),
        ]
        allowed = os.environ.get(LINEAR_VARIABLE) != "0" and sys.platform != "darwin"
        self.linear = allowed if linear is None else linear
        self._others: set[int] = set()  # linear layers that are left to MLX, by id
        if self.linear:
            self._others = {
                id(layer)
                for layer in model.modules()
                if isinstance(layer, nn.Linear | switch_layers.SwitchLinear)
                and not _ext.layers.is_dense(layer.weight)
            }
            for kind, original in mlx_linear.items():
                self._attributes.append(Attribute(kind, original.__name__, original, _fused[kind]))
        for name in sorted({type(layer).__module__ for layer in model.modules()}):
            module = sys.modules.get(name)
            for gated in _GATED:
                if getattr(module, gated.__name__, None) is gated:
                    own = Attribute(module, gated.__name__, gated, _GATED[gated])
                    self._attributes.append(own)
        self._attributes += [_known[known] for known in functions_of(model)]

    @contextmanager
    def diverted(self) -> Iterator[None]:
        """A context that uses the fused kernels for this thread's calls, if its device is a CPU.
        Contexts may nest, and overlap in several threads; the last one restores MLX's functions."""
        if mx.default_device() != mx.cpu:
            yield
            return
        thread = get_ident()
        with _lock:
            _inside.setdefault(thread, []).append(self)
            _diverted.update(self._attributes)
            for attribute in self._attributes:
                setattr(attribute.owner, attribute.name, attribute.fused)
        try:
            yield
        finally:
            with _lock:
                _inside[thread].pop()
                if not _inside[thread]:
                    del _inside[thread]
                if not _inside:
                    for attribute in _diverted:
                        setattr(attribute.owner, attribute.name, attribute.original)
                    _diverted.clear()

    def takes(self, layer: nn.Module) -> bool:
        """Whether a linear layer is computed by this package's kernel."""
        return self.linear and id(layer) not in self._others


def _fits(x: Any, other: Any = None) -> bool:
    """Whether this thread is inside the context and a fused kernel takes these arrays."""
    if get_ident() not in _inside or not isinstance(x, mx.array) or x.dtype not in _DTYPES:
        return False
    return other is None or (isinstance(other, mx.array) and other.dtype == x.dtype)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    if not _fits(x, weight):
        return mlx_rms_norm(x, weight, eps, stream=stream)
    return _ext.layers.rms_norm(x, weight, eps, stream=stream)


def _rope(a: mx.array, dims: int, **options: Any) -> mx.array:
    base, freqs, stream = options.get("base"), options.get("freqs"), options.get("stream")
    is_whole = options.keys() >= {"traditional", "base", "scale", "offset"}
    given_once = is_whole and (base is None) != (freqs is None)
    fits_dims = dims % 2 == 0 and (freqs is None or freqs.shape == (dims // 2,))
    if not (_fits(a) and a.ndim in (3, 4) and given_once and fits_dims):
        return mlx_rope(a, dims, **options)
    if freqs is None:
        frequencies = rope_frequencies(dims, base)
    else:
        frequencies = mx.reciprocal(freqs.astype(mx.float32), stream=stream)
    scale, traditional = options["scale"], options["traditional"]
    return _ext.layers.rope(
        a, options["offset"], frequencies, scale=scale, traditional=traditional, stream=stream
    )


@cache
def rope_frequencies(dims: int, base: float) -> mx.array:
    """The frequencies ``[dims / 2]`` that ``mx.fast.rope`` computes from a base, bit for bit."""
    step = mx.log(mx.array(base, mx.float32)) / (dims // 2)
    frequencies = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
    mx.eval(frequencies)
    return frequencies


def _silu(x: mx.array) -> mx.array:
    return _ext.layers.silu(x) if _fits(x) else mlx_silu(x)


def _gelu_approx(x: mx.array) -> mx.array:
    return _ext.layers.gelu_approx(x) if _fits(x) else mlx_gelu_approx(x)


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if _fits(gate, x) and gate.shape == x.shape:
        return _ext.layers.silu(gate, x)
    return mlx_swiglu(gate, x)


def _precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """In float32, rounded to the dtype of `like`."""
    if not (_fits(gate) and _fits(x) and gate.shape == x.shape):
        return mlx_precise_swiglu(like, gate, x)
    product = _ext.layers.silu(gate.astype(mx.float32), x.astype(mx.float32))
    return product.astype(like.dtype)


_GATED: dict[Layer, Layer] = {mlx_swiglu: _swiglu, mlx_precise_swiglu: _precise_swiglu}


def _takes(layer: nn.Module) -> bool:
    inside = _inside.get(get_ident())
    return inside is not None and inside[-1].takes(layer)


def _mlx_linear(layer: nn.Module, *args: Any, **options: Any) -> mx.array:
    kind = next(kind for kind in type(layer).__mro__ if kind in mlx_linear)
    return mlx_linear[kind](layer, *args, **options)


def _linear(layer: nn.Module, x: mx.array) -> mx.array:
    weight, bias = layer["weight"], layer.get("bias")
    fits = _takes(layer) and _fits(x, weight) and _fits(x, bias) and weight.ndim == 2
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        return _mlx_linear(layer, x)
    return _ext.layers.linear(x, weight, bias)


def _quantized_linear(layer: Any, x: mx.array) -> mx.array:
    scales, offsets, bias = layer["scales"], layer.get("biases"), layer.get("bias")
    known = layer.mode == "affine" and layer.bits in (4, 8) and layer.group_size in GROUP_SIZES
    fits = known and _fits(x, scales) and _fits(x, offsets) and _fits(x, bias)
    if not (fits and _takes(layer)):
        return _mlx_linear(layer, x)
    sizes = {"group_size": layer.group_size, "bits": layer.bits}
    return _ext.layers.quantized_linear(x, layer["weight"], scales, offsets, bias, **sizes)


def _fits_experts(layer: Any, x: Any, indices: Any) -> bool:
    is_known = isinstance(indices, mx.array) and indices.dtype in (mx.uint32, mx.int32)
    if not (is_known and _takes(layer) and _fits(x) and x.ndim == indices.ndim + 2 >= 3):
        return False
    batch, chosen = x.shape[:-2], indices.shape
    return x.shape[-2] == 1 and batch in (chosen, (*chosen[:-1], 1))


def _switch_linear(
    layer: Any, x: mx.array, indices: mx.array, *args: Any, **sorts: Any
) -> mx.array:
    weight, bias = layer["weight"], layer.get("bias")
    if not (_fits_experts(layer, x, indices) and _fits(x, weight) and _fits(x, bias)):
        return _mlx_linear(layer, x, indices, *args, **sorts)
    return _ext.layers.switch_linear(x, indices, weight, bias=bias)


def _quantized_switch_linear(
    layer: Any, x: mx.array, indices: mx.array, *args: Any, **sorts: Any
) -> mx.array:
    scales, offsets, bias = layer["scales"], layer.get("biases"), layer.get("bias")
    if layer.mode == "mxfp4":
        is_known = layer.global_scale is None
    else:
        is_known = layer.mode == "affine" and layer.bits in (4, 8)
        is_known = is_known and layer.group_size in GROUP_SIZES and _fits(x, scales)
    if not (is_known and _fits_experts(layer, x, indices) and _fits(x, offsets) and _fits(x, bias)):
        return _mlx_linear(layer, x, indices, *args, **sorts)
    sizes = {"group_size": layer.group_size, "bits": layer.bits}
    return _ext.layers.switch_linear(x, indices, layer["weight"], scales, offsets, bias, **sizes)


_fused: dict[type[nn.Module], Layer] = {
    nn.Linear: _linear,
    nn.Embedding: _linear,
    nn.QuantizedLinear: _quantized_linear,
    nn.QuantizedEmbedding: _quantized_linear,
    switch_layers.SwitchLinear: _switch_linear,
    switch_layers.QuantizedSwitchLinear: _quantized_switch_linear,
}


def _attribute_of(known: Known) -> Attribute:
    def call(*args: Any, **options: Any) -> Any:
        function = known.replacement if get_ident() in _inside else known.original
        return function(*args, **options)

    return Attribute(known.owner, known.name, known.original, call)


_known = {known: _attribute_of(known) for known in KNOWN}


def log_softmax(x: mx.array, allowed: mx.array | None = None) -> tuple[mx.array, ...]:
    """The logarithms ``[R, W]`` of the softmax of ``x [R, W]``, the first index ``[R]`` int32 of
    the largest of each row, and the logarithm ``[R, 1]`` float32 of the sum of each row's exp. With
    `allowed`, x counts as -inf where bit ``i % 32`` of ``allowed[r, i // 32]``, uint32, is 0; if
    nothing else is left, all are NaN."""
    kept = x if allowed is None else _ext.layers.mask(x, allowed)
    if x.dtype not in _DTYPES or mx.default_device() != mx.cpu:
        # As mlx-lm: three launches from the logits to the token. Nothing waits for a finer total.
        total = mx.logsumexp(kept, axis=-1, keepdims=True)
        logs = kept - total
        best = mx.argmax(logs, axis=-1).view(mx.int32)
        if x.dtype != mx.float32:
            total = mx.logsumexp(kept.astype(mx.float32), axis=-1, keepdims=True)
    else:
        found = _ext.layers.likeliest(x, allowed)
        total, best = found[:, :1], found[:, 1].astype(mx.int32)
        logs = kept - total.astype(x.dtype)
    if allowed is not None:  # if nothing is allowed, x there may be finite
        total = mx.where(total > -mx.inf, total, mx.nan)
    return logs, best, total

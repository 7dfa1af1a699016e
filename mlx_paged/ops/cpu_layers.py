"""What MLX's CPU backend is slow at, diverted to one pass each: a model's layers, log-sum-exp.

On CPUs MLX composes ``mx.fast.rms_norm``, ``mx.fast.rope`` and the activations of many operations,
each a pass over memory with a thread to itself and, of exponentials, one call an element. While a
model's forward runs in :meth:`CPULayers.diverted`, those go to :mod:`mlx_paged._ext.layers`: they
give the same but for the last bits. GPUs have kernels of MLX's own, and keep them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, get_ident
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from mlx_paged import _ext

Layer = Callable[..., mx.array]

_DTYPES = frozenset((mx.float32, mx.float16, mx.bfloat16))

mlx_rms_norm: Layer = mx.fast.rms_norm
mlx_rope: Layer = mx.fast.rope
mlx_silu: Layer = nn.silu
mlx_gelu_approx: Layer = nn.gelu_approx
mlx_swiglu: Layer = activations.swiglu


class Place(NamedTuple):
    """A name under which models find a layer."""

    module: Any
    name: str
    original: Layer
    fused: Layer

    def put(self, layer: Layer) -> None:
        setattr(self.module, self.name, layer)


_lock = Lock()
_threads: dict[int, int] = {}  # those inside, and how deep
_diverted: set[Place] = set()


class CPULayers:
    """A model's layers with a fused form, and where the model looks for them."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            Place(mx.fast, "rms_norm", mlx_rms_norm, _rms_norm),
            Place(mx.fast, "rope", mlx_rope, _rope),
            Place(nn, "silu", mlx_silu, _silu),
            Place(nn, "gelu_approx", mlx_gelu_approx, _gelu_approx),
        ]
        for module in _modules(model):
            if getattr(module, "swiglu", None) is mlx_swiglu:
                self._places.append(Place(module, "swiglu", mlx_swiglu, _swiglu))

    @contextmanager
    def diverted(self) -> Iterator[None]:
        """Divert this thread's calls of these layers within this context, if its device is a CPU.

        Contexts may nest and overlap in several threads; the last to leave restores MLX's own.
        """
        if mx.default_device() != mx.cpu:
            yield
            return
        thread = get_ident()
        with _lock:
            _threads[thread] = _threads.get(thread, 0) + 1
            _diverted.update(self._places)
            for place in self._places:
                place.put(place.fused)
        try:
            yield
        finally:
            with _lock:
                _threads[thread] -= 1
                if _threads[thread] == 0:
                    del _threads[thread]
                if not _threads:
                    for place in _diverted:
                        place.put(place.original)
                    _diverted.clear()


def _modules(model: nn.Module) -> list[ModuleType]:
    """Where the classes of a model's layers are defined."""
    names = {type(layer).__module__ for layer in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _fits(x: Any, other: Any = None) -> bool:
    """Whether this call is diverted: by its thread and by its arrays, alike where there are two."""
    if get_ident() not in _threads or not isinstance(x, mx.array) or x.dtype not in _DTYPES:
        return False
    return other is None or (isinstance(other, mx.array) and other.dtype == x.dtype)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    if not _fits(x, weight):
        return mlx_rms_norm(x, weight, eps, stream=stream)
    return _ext.layers.rms_norm(x, weight, eps, stream=stream)


def _rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    given_once = (base is None) != (freqs is None)
    fits_freqs = freqs is None or freqs.shape == (dims // 2,)
    if not (_fits(a) and a.ndim in (3, 4) and given_once and fits_freqs):
        return mlx_rope(
            a,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            stream=stream,
        )
    if freqs is None:
        assert base is not None
        frequencies = _frequencies(dims, base)
    else:
        frequencies = mx.reciprocal(freqs.astype(mx.float32), stream=stream)
    return _ext.layers.rope(
        a, offset, frequencies, scale=scale, traditional=traditional, stream=stream
    )


@cache
def _frequencies(dims: int, base: float) -> mx.array:
    frequencies = _ext.layers.rope_frequencies(dims, base)
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


def log_sum_exp(x: mx.array) -> mx.array:
    """``mx.logsumexp`` over the last axis, which stays: ``[..., 1]`` of ``[..., W]``."""
    if x.dtype in _DTYPES and mx.default_device() == mx.cpu:
        return _ext.layers.log_sum_exp(x)
    return mx.logsumexp(x, axis=-1, keepdims=True)

"""Python that runs as on a GPU, on a machine without one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.ops import dispatch
from mlx_paged.ops.cpu_layers import rope_frequencies

Replacement = tuple[Any, str, Callable[..., Any]]


def _rope(
    x: mx.array, dims: int, *, traditional: bool, base: float, scale: float, offset: Any
) -> mx.array:
    frequencies = rope_frequencies(dims, base)
    return _ext.layers.rope(x, offset, frequencies, scale=scale, traditional=traditional)


def _attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **_: Any) -> mx.array:
    """One node with the inputs of attention; the numbers are wrong."""
    out: mx.array = mx.depends([q], [k, v])[0]
    return out


NODES: list[Replacement] = [(mx.fast, "rms_norm", _ext.layers.rms_norm), (mx.fast, "rope", _rope)]
"""Norms and rotary embeddings of one node each, as MLX makes them for a GPU. On a CPU, MLX composes
them of many nodes."""


@contextmanager
def _replaced(*functions: Replacement) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, function in functions:
            stack.enter_context(patch.object(owner, name, function))
        yield


@contextmanager
def gpu_nodes() -> Iterator[None]:
    """Within this context mlx-lm's models build graphs with as many nodes as on a GPU."""
    with _replaced(*NODES, (mx.fast, "scaled_dot_product_attention", _attention)):
        yield


@contextmanager
def gpu_answers() -> Iterator[None]:
    """Within this context Python runs as on a GPU whose compiler takes every kernel.

    The package asks the same questions and takes the same ways as there. What is chosen is built
    for the CPU's stream, so a CPU can compute the result.
    """
    on_cpu, stream_of = mx.Device(mx.cpu), mx.default_stream
    answers: list[Replacement] = [
        (mx, "default_device", lambda: mx.Device(mx.gpu)),
        (mx, "default_stream", lambda device: stream_of(on_cpu)),
        (_ext.metal, "has_metal", lambda: True),
        (dispatch, "_compile", lambda plan, *arrays, **options: True),
    ]
    with _replaced(*NODES, *answers):
        yield

"""The arithmetic of training a head on a CPU. MLX computes elements on one thread there, and
exponentials one at a time: these take longer than the products. So NumPy computes them."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

THREADS = ThreadPoolExecutor(2)
ROWS, NUMBERS = 64, 1 << 16  # of a piece, which fits in a cache


def _pieces(count: int, size: int, work: Callable[[slice], None]) -> None:
    list(THREADS.map(work, [slice(i, i + size) for i in range(0, count, size)]))


def _view(array: mx.array) -> np.ndarray:
    return np.array(array, copy=False)


@mx.custom_function
def _softmax(scores: mx.array) -> mx.array:
    flat = _view(scores).reshape(-1, scores.shape[-1])
    found = np.empty_like(flat)

    def of(piece: slice) -> None:
        own = np.subtract(flat[piece], flat[piece].max(-1, keepdims=True), out=found[piece])
        np.exp(own, out=own)
        own /= own.sum(-1, keepdims=True)

    _pieces(len(flat), ROWS, of)
    return mx.array(found.reshape(scores.shape))


@_softmax.vjp
def _softmax_vjp(scores: mx.array, cotangent: mx.array, weights: mx.array) -> mx.array:
    product = cotangent * weights
    result: mx.array = product - weights * mx.sum(product, axis=-1, keepdims=True)
    return result


def softmax(scores: mx.array) -> mx.array:
    """Softmax over the last axis."""
    found: Any = _softmax(scores)
    result: mx.array = found
    return result


@mx.custom_function
def _gated(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    source = _view(gate).reshape(-1, gate.shape[-1])
    share = np.empty_like(source)

    def of(piece: slice) -> None:
        own = np.negative(source[piece], out=share[piece])
        np.exp(own, out=own)
        own += 1
        np.reciprocal(own, out=own)

    _pieces(len(source), ROWS, of)
    found = mx.array(share.reshape(gate.shape))
    return gate * found * up, found


@_gated.vjp
def _gated_vjp(
    given: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    found: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    (gate, up), share = given, found[1]
    swish, cotangent = gate * share, cotangents[0]
    return cotangent * up * (share + swish * (1 - share)), cotangent * swish


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up."""
    found: Any = _gated(gate, up)
    result: mx.array = found[0]
    return result


@mx.custom_function
def _crossed(logits: mx.array, ids: mx.array, shares: mx.array) -> tuple[mx.array, mx.array]:
    source, columns, wanted = _view(logits), _view(ids), _view(shares)
    gradient, losses = np.empty_like(source), np.empty(len(source), np.float32)
    count = len(source)

    def of(piece: slice) -> None:
        own, rows, given = gradient[piece], source[piece], wanted[piece]
        top, whole = rows.max(-1, keepdims=True), given.sum(-1, keepdims=True)
        np.exp(np.subtract(rows, top, out=own), out=own)
        total = own.sum(-1, keepdims=True)
        picked = np.take_along_axis(rows, columns[piece], -1)
        lse = top + np.log(total)
        losses[piece] = (whole * lse)[:, 0] - (given * picked).sum(-1)
        own *= whole / (total * count)
        at = np.arange(len(own))[:, None], columns[piece]
        own[at] -= given / count

    _pieces(count, ROWS, of)
    return mx.array(losses.mean()), mx.array(gradient)


@_crossed.vjp
def _crossed_vjp(
    given: tuple[mx.array, ...],
    cotangents: tuple[mx.array, mx.array],
    found: tuple[mx.array, mx.array],
) -> tuple[mx.array, ...]:
    _, ids, shares = given
    return cotangents[0] * found[1], mx.zeros_like(ids), mx.zeros_like(shares)


def cross_entropy(logits: mx.array, ids: mx.array, shares: mx.array) -> mx.array:
    """Mean cross entropy of rows.

    Args:
        logits: ``[R, V]``.
        ids: ``[R, K]``, the columns that are wanted, each once.
        shares: ``[R, K]``, how much of each. All others are wanted by 0.
    """
    found: Any = _crossed(logits, ids, shares)
    result: mx.array = found[0]
    return result


def _step(
    scales: tuple[float, ...],
    gradient: np.ndarray,
    value: np.ndarray,
    mean: np.ndarray,
    square: np.ndarray,
    piece: slice,
) -> None:
    first, second, rate, unbias, shrink = scales
    own = gradient[piece] * shrink
    mean[piece] += (1 - first) * (own - mean[piece])
    square[piece] += (1 - second) * (own * own - square[piece])
    value[piece] -= rate * mean[piece] / (np.sqrt(unbias * square[piece]) + 1e-8)


class Adam:
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) of a module's trainable parameters."""

    def __init__(self, module: nn.Module, betas: tuple[float, float], most_norm: float) -> None:
        self._module, self._betas, self._most_norm, self._count = module, betas, most_norm, 0
        self._own: Mapping[str, list[np.ndarray]] = {}
        for name, array in tree_flatten(module.trainable_parameters()):
            value = np.array(array).reshape(-1)
            self._own[name] = [value, np.zeros_like(value), np.zeros_like(value)]
        self._shapes = {n: a.shape for n, a in tree_flatten(module.trainable_parameters())}

    def update(self, gradients: Any, rate: float) -> None:
        """Move all parameters by a step whose gradient is at most `most_norm` long."""
        first, second = self._betas
        self._count += 1
        given = {n: _view(a).reshape(-1) for n, a in tree_flatten(gradients)}
        norm = float(np.sqrt(sum(float(a @ a) for a in given.values())))
        shrink = min(1.0, self._most_norm / (norm + 1e-6))
        rate /= 1 - first**self._count
        scales = first, second, rate, 1 / (1 - second**self._count), shrink
        for name, parts in self._own.items():
            step = partial(_step, scales, given[name], parts[0], parts[1], parts[2])
            _pieces(len(given[name]), NUMBERS, step)
        arrays = [
            (name, mx.array(parts[0].reshape(self._shapes[name])))
            for name, parts in self._own.items()
        ]
        self._module.update(tree_unflatten(arrays))

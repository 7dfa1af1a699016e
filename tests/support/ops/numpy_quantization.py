"""Quantized K/V by NumPy, on its own and within mlx-lm's caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as stock

from mlx_paged.ops.formats import FORMATS

GROUP = 64
BITS = list(FORMATS)


def quantize_symmetric(x: np.ndarray, most: int) -> tuple[Any, Any]:
    """Rows ``[..., D]`` as int8 elements up to `most`, and a float16 scale ``[..., 1]``."""
    x = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale = (np.abs(x).max(axis=-1, keepdims=True) / np.float32(most)).astype(np.float16)
        q = np.clip(np.rint(x / scale.astype(np.float32)), -most, most)
        return np.where(scale == 0, 0, q).astype(np.int8), scale


def quantize6(x: np.ndarray) -> tuple[Any, Any]:
    """Rows ``[..., D]`` as eights of elements in 48 bits, the first one lowest, and a scale."""
    q, scale = quantize_symmetric(x, 31)
    eights = (q.astype(np.int64) & 63).reshape(*q.shape[:-1], -1, 8)
    bits = (eights << np.arange(0, 48, 6)).sum(axis=-1)
    words = bits[..., None] >> np.arange(0, 48, 16) & 0xFFFF
    return words.astype(np.uint16).reshape(*q.shape[:-1], -1), scale


def quantize4(x: np.ndarray) -> tuple[Any, Any]:
    """Rows ``[..., D]`` as bytes of two elements each, and a scale and a minimum of each group."""
    x = x.astype(np.float32)
    elements, numbers = [], []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for first in range(0, x.shape[-1], GROUP):
            group = x[..., first : first + GROUP]
            low = group.min(axis=-1, keepdims=True).astype(np.float16)
            rise = group - low.astype(np.float32)
            scale = (rise.max(axis=-1, keepdims=True) / np.float32(15)).astype(np.float16)
            q = np.clip(np.rint(rise / scale.astype(np.float32)), 0, 15)
            elements.append(np.where(scale == 0, 0, q).astype(np.uint8))
            numbers += [scale, low]
    q = np.concatenate(elements, axis=-1)
    return q[..., ::2] | q[..., 1::2] << 4, np.concatenate(numbers, axis=-1)


def restored(stored: np.ndarray, scales: np.ndarray) -> Any:
    """What the elements and scales stand for, in float64."""
    scales = scales.astype(np.float64)
    if stored.dtype == np.int8:
        return np.multiply(stored, scales)
    if stored.dtype == np.uint16:
        words = stored.astype(np.int64).reshape(*stored.shape[:-1], -1, 3)
        bits = (words << np.arange(0, 48, 16)).sum(axis=-1, keepdims=True)
        q = bits >> np.arange(0, 48, 6) & 63
        return np.where(q < 32, q, q - 64).reshape(*stored.shape[:-1], -1) * scales
    q = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)
    groups = np.arange(q.shape[-1]) // GROUP
    return np.add(q * scales[..., 2 * groups], scales[..., 2 * groups + 1])


def quantize(x: np.ndarray, bits: int) -> tuple[Any, Any]:
    if bits == 8:
        return quantize_symmetric(x, 127)
    return quantize6(x) if bits == 6 else quantize4(x)


def rounded(x: np.ndarray, bits: int) -> Any:
    """Rows as a quantized pool gives them back."""
    return restored(*quantize(x, bits))


def hadamard(x: np.ndarray) -> Any:
    """The orthonormal Hadamard transform of the last axis, or of its parts that are powers of two,
    the largest ones first."""
    parts, first = [], 0
    while first < x.shape[-1]:
        count = 1 << ((x.shape[-1] - first).bit_length() - 1)
        # The matrix of count elements is the Kronecker product of two smaller ones.
        rows = 1 << (count.bit_length() - 1) // 2
        part = x[..., first : first + count].reshape(*x.shape[:-1], rows, count // rows)
        product = _hadamard_matrix(rows) @ part @ _hadamard_matrix(count // rows)
        parts.append(product.reshape(*x.shape[:-1], count) / np.sqrt(count))
        first += count
    return np.concatenate(parts, axis=-1)


def _hadamard_matrix(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rounded_in_rotation(x: np.ndarray, bits: int) -> Any:
    """Rows as the pool of an engine gives them back."""
    return hadamard(rounded(hadamard(x).astype(np.float32), bits))


def noisy(x: np.ndarray, noise: float, rng: np.random.Generator) -> np.ndarray:
    """`x` plus normal numbers of so many times the largest element of each row."""
    added = noise * rng.standard_normal(x.shape) * np.abs(x).max(axis=-1, keepdims=True)
    return (x + added).astype(np.float32) if noise else x


@contextmanager
def quantized_mlx_lm(kv_bits: Any, noise: float = 0.0, seed: int = 0) -> Iterator[None]:
    """Within this context mlx-lm's own caches store K/V that NumPy has quantized and restored;
    :func:`noisy` K/V, as another order of additions would give it."""
    rng = np.random.default_rng(seed)
    names = () if kv_bits is None else ("KVCache", "RotatingKVCache", "ChunkedKVCache")
    kinds = [getattr(stock, name) for name in names]
    originals = [kind.update_and_fetch for kind in kinds]

    def quantizing(original: Any) -> Any:
        def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
            rows = [np.array(x.astype(mx.float32)) for x in (keys, values)]
            arrays = zip(rows, FORMATS[kv_bits], strict=True)
            k, v = (
                mx.array(rounded_in_rotation(noisy(row, noise, rng), form.bits)).astype(keys.dtype)
                for row, form in arrays
            )
            return original(self, k, v)

        return update_and_fetch

    for kind, original in zip(kinds, originals, strict=True):
        kind.update_and_fetch = quantizing(original)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.update_and_fetch = original

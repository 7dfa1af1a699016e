"""Quantized K/V by NumPy, and random cases of pools that hold it."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from paged_cases import Case, random_case, with_layout

from mlx_paged.ops.formats import FORMATS

GROUP = 64
BITS = list(FORMATS)


def quantize8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[..., D]`` as int8 elements, and a float16 scale ``[..., 1]``."""
    x = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale = (np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
        q = np.clip(np.rint(x / scale.astype(np.float32)), -127, 127)
        return np.where(scale == 0, 0, q).astype(np.int8), scale


def quantize4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def restored(stored: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What the elements and scales stand for, in float64."""
    scales = scales.astype(np.float64)
    if stored.dtype == np.int8:
        return stored * scales
    q = np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)
    groups = np.arange(q.shape[-1]) // GROUP
    return q * scales[..., 2 * groups] + scales[..., 2 * groups + 1]


def quantize(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    return quantize8(x) if bits == 8 else quantize4(x)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Rows as a quantized pool gives them back."""
    return restored(*quantize(x, bits))


def quantized_case(kv_bits: Any, contexts: list[int], **sizes: Any) -> tuple[Case, Case]:
    """A case of :func:`random_case` as it is in a quantized pool, with scales as options, and the
    same in float32, whose answers are expected. Slots that may not be read have NaN as scales."""
    layout = sizes.pop("layout", "NHSD")
    plain = random_case(contexts, **sizes)
    arrays, expected = [], []
    for cache, form in zip((plain.k_cache, plain.v_cache), FORMATS[kv_bits], strict=True):
        x = np.array(cache.astype(mx.float32))
        is_used = np.isfinite(x).all(axis=-1, keepdims=True)
        stored, scales = quantize(np.where(is_used, x, 1.0), form.bits)
        scales = np.where(is_used, scales, np.float16(np.nan))
        arrays.append([with_layout(mx.array(a), layout) for a in (stored, scales)])
        expected.append(mx.array(restored(stored, scales).astype(np.float32)))
    (k, k_scales), (v, v_scales) = arrays
    options = {"k_scales": [k_scales], "v_scales": [v_scales]}
    case = replace(plain, k_cache=k, v_cache=v, options=plain.options | options)
    return case, replace(plain, k_cache=expected[0], v_cache=expected[1])

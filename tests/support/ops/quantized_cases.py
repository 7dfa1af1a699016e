"""Random cases of quantized pools."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.ops.formats import FORMATS
from tests.support.ops.numpy_quantization import quantize, restored
from tests.support.ops.paged_cases import Case, random_case, with_layout


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

"""Which Metal kernels the GPU's compiler takes: calls of the others are computed in plain MLX.

Each question is about one kind of calls. The first time it compiles their pipelines, on arrays of
zeros, and the answer is kept. Dimension letters as in :mod:`mlx_paged.ops.paged`.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.ops.formats import dims_of, format_of

VARIABLE = "MLX_PAGED_METAL"  # 0: no kernel of this package runs on a GPU

LENGTHS = *range(1, _ext.metal.MOST_ROWS + 1), 8, 64
"""Tokens of a sequence: a decode, drafts, a chunk whose threadgroups are full. Calls of other
lengths have the pipelines of the next length, or of the last one."""

SHORT_CONTEXT, LONG_CONTEXT = 512, 8192  # tokens; longer contexts may be split over threadgroups

_Rows = tuple[tuple[int, ...], mx.Dtype]  # of a block: shape and type

refused: dict[str, str] = {}
"""By kernel: what the compiler said."""


def are_on() -> bool:
    """Whether this build has the kernels, and the environment lets them run."""
    return _ext.metal.has_metal() and not are_switched_off()


@cache
def are_switched_off() -> bool:
    """Whether the environment forbids them."""
    return os.environ.get(VARIABLE) == "0"


def take_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    columns: int,
    tokens: int | None,
    *,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    causal: bool = True,
    **others: Any,
) -> bool:
    """Whether the GPU takes attention of `q`, so many `tokens` of each sequence, over tables of
    `columns` blocks. With None the sequences have different numbers of tokens. The `others` are
    options of no model's layer, and taken where a call without them is."""
    length = (
        LENGTHS[-1] if tokens is None else min(n for n in LENGTHS if n >= min(tokens, LENGTHS[-1]))
    )
    options = window is not None, sinks is not None, softcap is not None, causal
    caches = *k_cache.shape[::2], k_cache.dtype, v_cache.dtype, dims_of(v_cache)
    is_long = columns * k_cache.shape[2] > SHORT_CONTEXT
    shape = q.shape[1], length, q.shape[3]
    return _take_attention(shape, q.dtype, caches, is_long, tokens is None, options)


@cache
def _take_attention(
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
    caches: tuple[int, int, mx.Dtype, mx.Dtype, int],
    is_long: bool,
    ragged: bool,
    options: tuple[bool, bool, bool, bool],
) -> bool:
    (heads, length, head_dim), (slots, size, k_dtype, v_dtype, v_dim) = shape, caches
    k = _zeros((slots, 1, size, head_dim), k_dtype)
    is_latent = slots == 1 and k_dtype == v_dtype and v_dim < head_dim
    v_columns = v_dim // 2 if v_dtype == mx.uint8 else v_dim
    v = k[..., :v_dim] if is_latent else _zeros((slots, 1, size, v_columns), v_dtype)
    given: dict[str, Any] = {"scale": 1.0, "causal": options[3], **_scales(k, v)}
    for name, is_given, value in zip(
        ("window", "sinks", "softcap"), options, (1, _zeros((heads,), dtype), 1.0), strict=False
    ):
        given[name] = value if is_given else None
    q = _zeros((1, heads, length, head_dim), dtype)
    if ragged:
        q, given["cu_seqlens"] = q.transpose(2, 1, 0, 3), mx.array([0, length], mx.int32)
    tables = [_zeros((1, n), mx.int32) for n in (1, -(-LONG_CONTEXT // size))[: 1 + is_long]]
    lens, plan = _zeros((1,), mx.int32), _ext.metal.plan_attention
    return all([_compile(plan, q, k, v, table, lens, **given) for table in tables])


def take_writes(dtype: mx.Dtype, k_cache: mx.array, v_cache: mx.array, scaled: bool) -> bool:
    """Whether the GPU takes writes of rows of this dtype to these caches; `scaled` quantizes."""
    keys, values = ((cache.shape[2:], cache.dtype) for cache in (k_cache, v_cache))
    return _take_writes(dtype, keys, values, scaled)


@cache
def _take_writes(dtype: mx.Dtype, keys: _Rows, values: _Rows, scaled: bool) -> bool:
    caches = [_zeros((1, 1, *shape), form) for shape, form in (keys, values)]
    rows = [_zeros((1, 1, dims_of(c) if scaled else c.shape[3]), dtype) for c in caches]
    slots, scales = _zeros((1,), mx.int32), _scales(*caches) if scaled else {}
    return _compile(_ext.metal.plan_write_kv, *rows, *caches, slots, **scales)


def take_copies(k_cache: mx.array, v_cache: mx.array) -> bool:
    """Whether the GPU takes copies of blocks in these caches."""
    return _take_copies(k_cache.dtype, k_cache.shape[3], v_cache.dtype, v_cache.shape[3])


@cache
def _take_copies(k_dtype: mx.Dtype, k_columns: int, v_dtype: mx.Dtype, v_columns: int) -> bool:
    caches = _zeros((1, 1, 1, k_columns), k_dtype), _zeros((1, 1, 1, v_columns), v_dtype)
    return _compile(_ext.metal.plan_copy_blocks, *caches, _zeros((1, 2), mx.int32))


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.zeros(shape, dtype, stream=mx.cpu)


def _scales(k_cache: mx.array, v_cache: mx.array) -> dict[str, mx.array]:
    """Scales of quantized caches; none of others."""
    return {
        name: _zeros((*cache.shape[:3], format_of(cache).scale_columns(dims_of(cache))), mx.float16)
        for name, cache in (("k_scales", k_cache), ("v_scales", v_cache))
        if not mx.issubdtype(cache.dtype, mx.floating)
    }


def _compile(plan: Callable[..., dict[str, Any]], *arrays: mx.array, **options: Any) -> bool:
    """Compile the pipelines of a call, each by itself. The first refusal of a kernel is logged."""
    is_taken = True
    for launch in plan(*arrays, **options)["launches"]:
        if message := _ext.metal.refusal(launch):
            is_taken, kernel = False, launch["kernel"]
            if kernel not in refused:
                refused[kernel] = message
                logging.warning("%s: plain MLX instead, the compiler says: %s", kernel, message)
    return is_taken


def is_device_error(error: BaseException) -> bool:
    """Whether MLX tells of a command buffer that failed: to whoever asks next, and only once."""
    return isinstance(error, RuntimeError) and str(error).startswith("[METAL] Command buffer")


def forget() -> None:
    """Ask the compiler and the environment again from now on."""
    refused.clear()
    for answers in (are_switched_off, _take_attention, _take_writes, _take_copies):
        answers.cache_clear()

"""Where a call of an op is computed: by a compiled kernel, or by plain MLX. Dimension letters as in
:mod:`mlx_paged.ops.paged`.

A GPU's compiler may refuse a kernel. The first question about one kind of calls compiles their
pipelines, on arrays of zeros, and the answer is kept. If the compiler refuses a pipeline, the calls
are planned in the simplest form of their kernels; plain MLX computes them if it refuses that, too.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any, Literal

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.ops.formats import dims_of, format_of

LOGGER = logging.getLogger(__name__)

Stream = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType

VARIABLE = "MLX_PAGED_METAL"  # 0: no kernel of this package runs on a GPU

LENGTHS = *range(1, _ext.metal.MOST_ROWS + 1), 8, 64
"""Tokens of a sequence: a decode, drafts, a chunk whose threadgroups are full. Calls of other
lengths have the pipelines of the next length, or of the last one."""

MOST_TOGETHER = 32
"""Sequences whose shared keys a threadgroup computes, at most."""

SHORT_CONTEXT, LONG_CONTEXT = 512, 8192  # tokens; longer contexts may be split over threadgroups

SEQUENCES = 1, 64
"""Sequences of calls: calls of few threadgroups and of many have pipelines of their own."""

_Rows = tuple[tuple[int, ...], mx.Dtype]  # of a block: shape and type

refused: dict[str, str] = {}
"""By kernel: what the compiler said."""

plain: set[str] = set()
"""The kernels of `refused` whose calls plain MLX computes, because no form of them is taken."""


def kernel_for(
    stream: Stream | None = None, head_dim: int = 64, v_head_dim: int = 64
) -> Literal["native", "reference"]:
    """Whether a stream or device runs the compiled kernel ("native") or plain MLX ("reference").

    CPUs have a kernel for all head dimensions. GPUs have one if this build has Metal, the variable
    MLX_PAGED_METAL is not 0, and the head dimensions are multiples of 4 up to 576; plain MLX also
    computes what the GPU's compiler refuses. Within one of MLX's function transformations (grad,
    vjp, jvp, vmap, compile) the answer is "reference": plain MLX has derivatives.
    """
    if _ext.is_transforming():
        return "reference"
    return kernel_on(stream, head_dim, v_head_dim)


def kernel_on(
    stream: Stream | None, head_dim: int = 64, v_head_dim: int = 64
) -> Literal["native", "reference"]:
    """:func:`kernel_for`, whether or not a transformation is under way."""
    if device_of(stream) == mx.cpu:
        return "native"
    metal = are_on() and not _ext.metal.unsupported(head_dim, v_head_dim)
    return "native" if metal else "reference"


def device_of(stream: Stream | None) -> mx.Device | mx.DeviceType:
    if stream is None:
        return mx.default_device()
    return stream if isinstance(stream, mx.Device | mx.DeviceType) else stream.device


def serves_chunks(dtype: mx.Dtype, head_dim: int, v_head_dim: int) -> bool:
    """Whether the GPU's kernel for chunks takes pools of this dtype with these head dimensions."""
    return are_on() and _ext.metal.serves_chunks(dtype, head_dim, v_head_dim)


def takes_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    columns: int,
    tokens: int | None,
    stream: Stream | None = None,
    *,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    causal: bool = True,
    sequences: int = 1,
    **others: Any,
) -> bool:
    """Whether a kernel of this package may compute such a call. False: the GPU's compiler refuses
    one, so that plain MLX computes the call.

    Args:
        k_cache, v_cache: one layer's.
        columns: blocks of a table.
        tokens: of each sequence; None: the sequences have different numbers of tokens.
        sequences: how many have `shared_prefixes`; 1: none. A refused call is made without it.
        others: options of no model's layer, which are taken where a call without them is.
    """
    if device_of(stream) == mx.cpu:
        return True
    if kernel_on(stream, dims_of(k_cache), dims_of(v_cache)) == "reference":
        return True
    most = LENGTHS[-1]
    length = most if tokens is None else min(n for n in LENGTHS if n >= min(tokens, most))
    options = window is not None, sinks is not None, softcap is not None, causal
    keys, values = ((cache.shape[2:], cache.dtype) for cache in (k_cache, v_cache))
    is_long = columns * k_cache.shape[2] > SHORT_CONTEXT
    shares = is_long and length == 1
    shape = min(sequences, MOST_TOGETHER) if shares else 1, q.shape[1], length, q.shape[3]
    slots, is_ragged = k_cache.shape[0], tokens is None
    return _take_attention(shape, q.dtype, slots, keys, values, is_long, is_ragged, options)


def writes_in_place(
    k: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    scaled: bool = False,
    stream: Stream | None = None,
) -> bool:
    """Whether ``write_kv`` with these arguments writes in place; `scaled`: with scales."""
    if not is_native(stream, k_cache, v_cache, slot_mapping):
        return False
    if device_of(stream) == mx.cpu:
        return True
    keys, values = ((cache.shape[2:], cache.dtype) for cache in (k_cache, v_cache))
    return _take_writes(k.dtype, keys, values, scaled)


def copies_in_place(
    k_cache: mx.array, v_cache: mx.array, block_pairs: mx.array, stream: Stream | None = None
) -> bool:
    """Whether ``copy_blocks`` with these arguments copies in place; arrays of any width."""
    if not is_compiled(stream, block_pairs):
        return False
    caches = k_cache.dtype, k_cache.shape[3], v_cache.dtype, v_cache.shape[3]
    return device_of(stream) == mx.cpu or _take_copies(*caches)


def attends(q: mx.array, k_cache: mx.array, v_cache: mx.array, is_ragged: bool) -> bool:
    """Whether the current device has a kernel for attention over one layer's arrays, with queries
    of q's type; the GPU's compiler may still refuse it. Transformations are not looked at."""
    if device_of(None) == mx.cpu:
        return True
    if is_ragged and not _fits_chunks(q, k_cache, v_cache):
        return False
    return kernel_on(None, *_dims_on_gpu(k_cache, v_cache)) == "native"


def is_compiled(stream: Stream | None, indices: mx.array, *dims: int) -> bool:
    """Whether the stream computes an op with these indices by the compiled kernel. Plain MLX needs
    their values: if MLX transforms these too, only the compiled op is possible."""
    return (kernel_for if _ext.has_values(indices) else kernel_on)(stream, *dims) == "native"


def is_native(
    stream: Stream | None, k_cache: mx.array, v_cache: mx.array, indices: mx.array
) -> bool:
    """Whether the stream can evaluate the compiled op for these caches."""
    if device_of(stream) == mx.cpu:
        return is_compiled(stream, indices)
    return is_compiled(stream, indices, *_dims_on_gpu(k_cache, v_cache))


def _dims_on_gpu(k_cache: mx.array, v_cache: mx.array) -> tuple[int, int]:
    """The head dimensions of keys and of values. Values that a GPU cannot read have one of no
    kernel: GPUs need whole vectors of pairs, too."""
    columns = v_cache.shape[-1]
    if v_cache.dtype != mx.uint8 or columns % 4 == 0:
        columns = dims_of(v_cache)
    return dims_of(k_cache), columns


def serves_varlen(
    stream: Stream | None, q: mx.array, k_cache: mx.array, v_cache: mx.array, indices: mx.array
) -> bool:
    """Whether the stream can evaluate the compiled op for sequences of different lengths."""
    if device_of(stream) == mx.gpu and not _fits_chunks(q, k_cache, v_cache):
        return False
    return is_native(stream, k_cache, v_cache, indices)


def _fits_chunks(q: mx.array, k_cache: mx.array, v_cache: mx.array) -> bool:
    fits = format_of(k_cache).has_scales or k_cache.dtype == q.dtype
    return fits and serves_chunks(q.dtype, dims_of(k_cache), dims_of(v_cache))


def are_on() -> bool:
    """Whether this build has the kernels, and the environment lets them run."""
    return _ext.metal.has_metal() and not are_switched_off()


@cache
def are_switched_off() -> bool:
    """Whether the environment forbids them."""
    return os.environ.get(VARIABLE) == "0"


@cache
def _take_attention(
    shape: tuple[int, int, int, int],
    dtype: mx.Dtype,
    slots: int,
    keys: _Rows,
    values: _Rows,
    is_long: bool,
    ragged: bool,
    options: tuple[bool, bool, bool, bool],
) -> bool:
    """The answer of :func:`takes_attention` to all calls with these properties."""
    sequences, heads, length, head_dim = shape
    k, v = (_zeros((slots, 1, *sizes), form) for sizes, form in (keys, values))
    if slots == 1 and k.dtype == v.dtype and v.shape[3] < k.shape[3]:
        v = k[..., : v.shape[3]]  # latents
    given: dict[str, Any] = {"scale": 1.0, "causal": options[3], **_scales(k, v)}
    for name, is_given, value in zip(
        ("window", "sinks", "softcap"),
        options,
        # Long tables are split if the window is long too, and are not if it is short.
        (LONG_CONTEXT, _zeros((heads,), dtype), 1.0),
        strict=False,
    ):
        given[name] = value if is_given else None
    counts = SEQUENCES if sequences == 1 and not ragged else (sequences,)
    compiles = _compile if sequences == 1 else _compile_wanted
    if sequences > 1:
        given["shared_prefixes"] = _zeros((2, sequences), mx.int32)
    answers = []
    for count, width in product(counts, widths_of(k.shape[2])[: 3 if is_long else 1]):
        q = _zeros((count, heads, length, head_dim), dtype)
        if ragged:
            q, given["cu_seqlens"] = q.transpose(2, 1, 0, 3), mx.array([0, length], mx.int32)
        tables, lens = _zeros((count, width), mx.int32), _zeros((count,), mx.int32)
        answers.append(compiles(partial(_ext.metal.plan_attention, q, k, v, tables, lens, **given)))
    return all(answers)


def widths_of(block_size: int) -> tuple[int, int, int]:
    """Columns of block tables whose keys are not split, are split in few parts, and in many."""
    return 1, SHORT_CONTEXT // block_size + 1, -(-LONG_CONTEXT // block_size)


@cache
def _take_writes(dtype: mx.Dtype, keys: _Rows, values: _Rows, scaled: bool) -> bool:
    """Whether the GPU takes writes of rows of this dtype to such caches; `scaled` quantizes."""
    caches = [_zeros((1, 1, *shape), form) for shape, form in (keys, values)]
    kinds = [(dims_of(c), dtype) if scaled else (c.shape[3], c.dtype) for c in caches]
    dense = [_zeros((1, 1, width), kind) for width, kind in kinds]
    sparse = [_zeros((1, 1, 2 * width), kind)[..., ::2] for width, kind in kinds]
    slots, scales = _zeros((1,), mx.int32), _scales(*caches) if scaled else {}
    of_dense, of_sparse = (
        partial(_ext.metal.plan_write_kv, *rows, *caches, slots, **scales)
        for rows in (dense, sparse)
    )
    # Rows of models are dense: the other pipeline is compiled if this one is refused.
    return _compile_wanted(of_dense) or all([_compile(of_dense), _compile(of_sparse)])


@cache
def _take_copies(k_dtype: mx.Dtype, k_columns: int, v_dtype: mx.Dtype, v_columns: int) -> bool:
    caches = _zeros((1, 1, 1, k_columns), k_dtype), _zeros((1, 1, 1, v_columns), v_dtype)
    return _compile(partial(_ext.metal.plan_copy_blocks, *caches, _zeros((1, 2), mx.int32)))


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.zeros(shape, dtype, stream=mx.cpu)


def _scales(k_cache: mx.array, v_cache: mx.array) -> dict[str, mx.array]:
    """Scales of quantized caches; none of others."""
    return {
        name: _zeros((*cache.shape[:3], format_of(cache).scale_columns(dims_of(cache))), mx.float16)
        for name, cache in (("k_scales", k_cache), ("v_scales", v_cache))
        if format_of(cache).has_scales
    }


_Launch = dict[str, Any]
_Plan = Callable[[], dict[str, Any]]


def _compile(plan: _Plan) -> bool:
    """Whether the compiler takes a call in some form: as it is planned, or, after a refusal, in the
    simplest form of its kernels, which is planned from then on."""
    planned: set[str] = set()
    while True:
        launches = plan()["launches"]
        found = _refused_of(launches)
        if not found:
            return True
        pipelines = {launch["pipeline"] for launch in launches}
        if pipelines == planned:
            plain.update(launch["kernel"] for launch in found)
            return False
        planned = pipelines
        for launch in found:
            _ext.metal.note_refused(launch["pipeline"])


def _compile_wanted(plan: _Plan) -> bool:
    """Whether the compiler takes a call as it is planned. After a refusal the caller plans another
    call."""
    return not _refused_of(plan()["launches"])


def _refused_of(launches: Sequence[_Launch]) -> list[_Launch]:
    """The launches whose pipelines the compiler refuses, each compiled by itself. A refusal counts
    if asking again gives one, too. The first one of a kernel is logged."""
    found = []
    for launch in launches:
        if _ext.metal.refusal(launch) and (message := _ext.metal.refusal(launch)):
            found.append(launch)
            kernel = launch["kernel"]
            if kernel not in refused:
                refused[kernel] = message
                LOGGER.warning("%s is not used, the compiler says: %s", kernel, message)
    return found


def is_of_another_thread(error: BaseException) -> bool:
    """Whether an error only says that another thread launched the work that was waited for."""
    return str(error).startswith("[METAL] Command buffer of another thread")


def is_device_error(error: BaseException) -> bool:
    """Whether MLX reports a command buffer that failed. MLX reports the failure once, to whoever
    asks next."""
    return isinstance(error, RuntimeError) and str(error).startswith("[METAL] Command buffer")


@contextmanager
def in_simplest_forms() -> Iterator[None]:
    """A context in which all threads plan each call in the simplest form of its kernels."""
    before = set(plain)
    try:
        _ext.metal.use_simplest_forms(True)
        _ask_again()
        yield
    finally:
        _ext.metal.use_simplest_forms(False)
        _ask_again()
        plain.intersection_update(before)


def forget() -> None:
    """Ask the compiler and the environment again from now on."""
    refused.clear()
    plain.clear()
    _ext.metal.forget_refused()
    are_switched_off.cache_clear()
    _ask_again()


def _ask_again() -> None:
    for answers in (_take_attention, _take_writes, _take_copies):
        answers.cache_clear()

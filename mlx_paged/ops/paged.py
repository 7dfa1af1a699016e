"""The public ops: they choose the kernel and the layer, and check the data.

Dimensions: B sequences, L query tokens each, H query heads, H_kv KV heads, D key head dimension,
D_v value head dimension, N blocks in the pool, S = block_size tokens per block, M columns of a
block table, T rows to write, P block pairs, R rotated dimensions.

One layer's pool is ``k_cache [H_kv, N, S, D]`` and ``v_cache [H_kv, N, S, D_v]``, both float32,
float16 or bfloat16, in any layout whose last axis is dense; no op copies it. A quantized pool has
also ``k_scales`` and ``v_scales``: :mod:`mlx_paged.ops.formats` describes all four arrays. In
latent attention the values are columns of the keys: ops that read take ``k_cache[..., :D_v]`` as
values, and ops that write take ``k_cache[..., :D_v]`` and ``k_cache[..., D_v:]``, which share no
memory.

MLX knows the layout of an evaluated array and of its slices, transposes and squeezed axes: an op
checks these when it is called. It checks the others when it is evaluated, before it reads or
writes. Both raise ValueError.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.arguments import MAX_INT32, integer
from mlx_paged.ops import fallback, metal_kernels
from mlx_paged.ops.arguments import Cache, checked
from mlx_paged.ops.formats import dims_of

Stream = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType
Tagged = TypeVar("Tagged", bound=mx.array)


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
    return _kernel_on(stream, head_dim, v_head_dim)


def _kernel_on(
    stream: Stream | None, head_dim: int = 64, v_head_dim: int = 64
) -> Literal["native", "reference"]:
    if _device(stream) == mx.cpu:
        return "native"
    metal = metal_kernels.are_on() and not _ext.metal.unsupported(head_dim, v_head_dim)
    return "native" if metal else "reference"


def _device(stream: Stream | None) -> mx.Device | mx.DeviceType:
    if stream is None:
        return mx.default_device()
    return stream if isinstance(stream, mx.Device | mx.DeviceType) else stream.device


def serves_chunks(dtype: mx.Dtype, head_dim: int, v_head_dim: int) -> bool:
    """Whether the GPU's kernel for chunks takes pools of this dtype with these head dimensions."""
    return metal_kernels.are_on() and _ext.metal.serves_chunks(dtype, head_dim, v_head_dim)


def takes_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    columns: int,
    tokens: int | None,
    stream: Stream | None = None,
    **options: Any,
) -> bool:
    """False if the GPU's compiler refuses a kernel of such a call, one layer's, so that plain MLX
    computes it. :func:`mlx_paged.ops.metal_kernels.take_attention` has the arguments."""
    dims = k_cache.shape[-1], dims_of(v_cache)
    if _device(stream) == mx.cpu or _kernel_on(stream, *dims) == "reference":
        return True
    return metal_kernels.take_attention(q, k_cache, v_cache, columns, tokens, **options)


def writes_in_place(
    k: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    scaled: bool = False,
    stream: Stream | None = None,
) -> bool:
    """Whether ``write_kv`` with these arguments writes in place; `scaled`: with scales."""
    if not _is_native(stream, k_cache, v_cache, slot_mapping):
        return False
    is_cpu = _device(stream) == mx.cpu
    return is_cpu or metal_kernels.take_writes(k.dtype, k_cache, v_cache, scaled)


def copies_in_place(
    k_cache: mx.array, v_cache: mx.array, block_pairs: mx.array, stream: Stream | None = None
) -> bool:
    """Whether ``copy_blocks`` with these arguments copies in place; arrays of any width."""
    if not is_compiled(stream, block_pairs):
        return False
    return _device(stream) == mx.cpu or metal_kernels.take_copies(k_cache, v_cache)


def append_kv(
    kind: type[Tagged],
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    *read: Any,
) -> tuple[mx.array, mx.array, Tagged, Tagged] | None:
    """``write_kv`` and ``gather_blocks`` in one call: see ``mlx_paged._ext.append_kv``. None where
    the device does not write in place."""
    arrays = k_cache, v_cache, slot_mapping
    on_gpu = mx.default_device() != mx.cpu and k.dtype == k_cache.dtype
    if on_gpu and not writes_in_place(k, *arrays):
        return None
    return _ext.append_kv(kind, k, v, *arrays, *read)


def paged_attention(
    q: mx.array,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: mx.array,
    context_lens: mx.array,
    layer_idx: int = 0,
    kv_head_mapping: mx.array | None = None,
    rope_freqs: mx.array | None = None,
    scale: float | None = None,
    causal: bool = True,
    attn_mask: mx.array | None = None,
    return_attn: bool = False,
    *,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    alibi_slopes: mx.array | None = None,
    k_scales: Cache | None = None,
    v_scales: Cache | None = None,
    check_tables: bool = True,
    stream: Stream | None = None,
) -> mx.array | Any:  # a union with the pair of return_attn would make every caller narrow it
    """Attention over keys and values in a pool of blocks, read through block tables.

    Softmax is streamed over blocks with a running maximum, denominator and accumulator in float32
    (Kwon et al. 2023, arXiv:2309.06180, section 4.3; Milakov & Gimelshein 2018, arXiv:1805.02867).
    The op only reads; ``write_kv`` writes.

    Args:
        q: ``[B, H, L, D]`` float32, float16 or bfloat16, not necessarily the pool's dtype. Query l
            of sequence b sits at position ``context_lens[b] - L + l``.
        k_cache: keys of all layers: a list of per-layer ``[H_kv, N, S, D]`` arrays, or one array
            ``[n_layers, H_kv, N, S, D]``. Prefer the list: ``write_kv`` returns a new handle of
            one layer, which replaces the old one in the list. MLX does not order that write before
            a read of the one array.
        v_cache: values likewise, of as many layers, ``D_v`` in place of ``D``.
        block_tables: ``[B, M]`` int32, the physical block of each logical block. Entries past
            ``ceil(context_lens[b] / S)`` are never read.
        context_lens: ``[B]`` int32, the context length of each sequence, its L tokens included.
        layer_idx: the layer to read.
        kv_head_mapping: ``[H]`` int32, KV head of each query head. Default ``h // (H / H_kv)``,
            for which H must be a multiple of H_kv.
        rope_freqs: ``[B, L, R/2]`` floats, or ``[B, R/2]`` if L is 1: rotation angles in radians of
            each query at its position. The op rotates dims ``(i, i + R/2)`` of q by angle i and
            leaves dims from R on. The keys must be rotated already. Default: so must q.
        scale: multiplies q.k; default ``D ** -0.5``.
        causal: a query sees the keys up to its own position; False: all ``context_lens[b]``.
        attn_mask: broadcastable to ``[B, H, L, M * S]``; its last axis, the key positions, has that
            size. bool (True: attend) or float (added to the score after all else).
        return_attn: also return the softmax weights.
        window: at least 1; a query at position p sees keys in ``(p - window, p]`` only.
        sinks: ``[H]`` floats, an extra logit for each head, in the softmax denominator only.
        softcap: above 0; scores become ``softcap * tanh(scale * q.k / softcap)``.
        alibi_slopes: ``[H]`` floats; ``slope * (key position - query position)`` is added to the
            score, after softcap (Press et al. 2021, arXiv:2108.12409).
        k_scales: scales of quantized keys, of as many layers: ``[H_kv, N, S, 1]`` float16.
        v_scales: scales of quantized values likewise.
        check_tables: False skips the checks of table and length values, for callers whose tables
            are valid by construction.
        stream: stream or device; default the current one.

    Returns:
        ``[B, H, L, D_v]`` in q's dtype; with return_attn a pair of it and the softmax weights
        ``[B, H, L, M * S]`` float32, zero where not attended. A query at a negative position, or
        one that sees no key, yields zeros.

    Raises:
        ValueError: an argument's rank, shape or dtype does not fit, a number is out of range, the
            caches have different numbers of layers, there is no layer `layer_idx`, or a pool's last
            axis is not dense. Also, if the arrays are evaluated: a context is longer than its
            table, a context reads a block outside the pool, or a head maps to no KV head. The op
            does not wait for arrays that are not evaluated: it clamps lengths to ``[0, M * S]``,
            does not attend keys of such blocks, and yields zeros for such heads.

    Example:
        Blocks of 2 tokens; a context of 3 reads both slots of block 2 and the first of block 0.
        Every key is zero, so each value has a weight of 1/3: (1 + 2 + 6) / 3.

        >>> k_cache = mx.zeros((1, 3, 2, 4))
        >>> v_cache = mx.array([[[6.0], [-1.0]], [[-1.0], [-1.0]], [[1.0], [2.0]]])[None]
        >>> block_tables, context_lens = mx.array([[2, 0]]), mx.array([3])
        >>> q = mx.ones((1, 1, 1, 4))
        >>> paged_attention(q, [k_cache], [v_cache], block_tables, context_lens).item()
        3.0
    """
    name = "paged_attention"
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scales": k_scales, "v_scales": v_scales}
    k, v, scales, options = checked(name, q, layer_idx, scale, window, softcap, **caches)
    arrays = q, k, v, block_tables, context_lens
    options |= {
        **scales,
        "causal": causal,
        "kv_head_mapping": kv_head_mapping,
        "rope_freqs": rope_freqs,
        "attn_mask": attn_mask,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "return_attn": return_attn,
    }
    result = _ext.paged_attention(  # validates, computes nothing
        *arrays, **options, check_tables=check_tables, stream=stream
    )
    columns, tokens = block_tables.shape[1], q.shape[2]
    if not _is_native(stream, k, v, block_tables) or not takes_attention(
        q, k, v, columns, tokens, stream, **options
    ):
        with _on(stream):
            result = fallback.paged_attention(*arrays, **options)
    return result


def paged_attention_varlen(
    q: mx.array,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: mx.array,
    context_lens: mx.array,
    cu_seqlens: mx.array,
    layer_idx: int = 0,
    scale: float | None = None,
    causal: bool = True,
    *,
    num_decodes: int = 0,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    k_scales: Cache | None = None,
    v_scales: Cache | None = None,
    check_tables: bool = True,
    stream: Stream | None = None,
) -> mx.array:
    """``paged_attention`` for sequences with different numbers of query tokens: decodes and prefill
    chunks in one op.

    Args:
        q: ``[T, H, D]`` or ``[T, H, 1, D]``, the tokens of all sequences, one sequence after the
            other.
        block_tables: ``[B, M]`` int32.
        context_lens: ``[B]`` int32. A sequence's own tokens are the last ones of its context.
        cu_seqlens: ``[B + 1]`` int32, rising from 0 to T. Sequence s has the tokens
            ``cu_seqlens[s]`` to ``cu_seqlens[s + 1] - 1`` of q, and may have none.
        num_decodes: how many of the first sequences have exactly one token each. The answer does
            not depend on it; a GPU computes these sequences by another kernel.

    The other arguments are those of ``paged_attention``.

    Returns:
        ``[T, H, D_v]`` or ``[T, H, 1, D_v]`` in q's dtype, as q. Tokens after ``cu_seqlens[B]`` are
        zeros. If wrong values of cu_seqlens are not evaluated, nothing outside the arrays is read;
        tokens of no sequence are zeros on a CPU and undefined on a GPU.

    Raises:
        ValueError: as from ``paged_attention``. Also, if cu_seqlens is evaluated: it does not rise
            from 0 to T, or not by 1 for each of the first `num_decodes` sequences.

    Example:
        Blocks of 2 tokens. The first sequence has 1 token in a context of 3, the second one 2
        tokens in a context of 2. Every key is zero, so a value has the same weight as the others
        that the token sees.

        >>> k_cache = mx.zeros((1, 3, 2, 4))
        >>> v_cache = mx.array([[[6.0], [8.0]], [[3.0], [5.0]], [[1.0], [2.0]]])[None]
        >>> block_tables, context_lens = mx.array([[2, 0], [1, 0]]), mx.array([3, 2])
        >>> q, cu_seqlens = mx.ones((3, 1, 4)), mx.array([0, 1, 3])
        >>> arrays = q, [k_cache], [v_cache], block_tables, context_lens, cu_seqlens
        >>> paged_attention_varlen(*arrays, num_decodes=1).flatten().tolist()
        [3.0, 3.0, 4.0]
    """
    name = "paged_attention_varlen"
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scales": k_scales, "v_scales": v_scales}
    k, v, scales, options = checked(name, q, layer_idx, scale, window, softcap, **caches)
    arrays = q, k, v, block_tables, context_lens
    options |= {**scales, "causal": causal, "sinks": sinks}
    num_decodes = integer(name, "num_decodes", num_decodes, 0, MAX_INT32)
    result: mx.array = _ext.paged_attention(  # validates, computes nothing
        *arrays,
        **options,
        cu_seqlens=cu_seqlens,
        num_decodes=num_decodes,
        check_tables=check_tables,
        stream=stream,
    )
    columns = block_tables.shape[1]
    if 0 not in block_tables.shape and not (
        _serves_varlen(stream, *arrays[:4])
        and all(takes_attention(*arrays[:3], columns, n, stream, **options) for n in (1, None))
    ):
        with _on(stream):
            rows = fallback.single_tokens(*arrays, cu_seqlens, causal=causal, window=window)
            options |= {role: [array] for role, array in scales.items()}
            out = paged_attention(*rows, **options, check_tables=False)
            result = out.reshape(result.shape)
    return result


def write_kv(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    slot_mapping: mx.array,
    *,
    k_scales: mx.array | None = None,
    v_scales: mx.array | None = None,
    stream: Stream | None = None,
) -> tuple[mx.array, ...]:
    """Write rows of keys and values to their slots in one layer's pool, in place.

    Args:
        k: ``[T, H_kv, D]``, or as a model computes it, ``[T, H_kv, 1, D]`` or ``[1, H_kv, T, D]``;
            in the pool's dtype, or of any floating type where the pool is quantized; not a view of
            memory that this call writes.
        v: ``[T, H_kv, D_v]`` likewise, with as many axes.
        k_cache: ``[H_kv, N, S, D]``.
        v_cache: ``[H_kv, N, S, D_v]``.
        slot_mapping: ``[T]`` int32, ``block * S + offset`` of each row. Rows with a slot outside
            ``[0, N * S)`` are skipped, so -1 is padding.
        k_scales: ``[H_kv, N, S, 1]`` float16, of a quantized pool.
        v_scales: ``[H_kv, N, S, C]`` float16 likewise.
        stream: stream or device; default the current one.

    Returns:
        New handles of both caches, then of the scales that were given. They share the pool's
        buffers. Do not use the old handles again: only the new ones order later ops after this
        write. On a GPU without a kernel for these heads, and within a function transformation, they
        are new arrays.

    Raises:
        ValueError: an argument's rank, shape or dtype does not fit, a cache's last axis is not
            dense, a cache is a broadcast view, or the caches are one array or their rows overlap.
    """
    given = {"k_scales": k_scales, "v_scales": v_scales}
    scales = {name: array for name, array in given.items() if array is not None}
    arrays = k, v, k_cache, v_cache, slot_mapping
    written = _ext.write_kv(*arrays, **scales, stream=stream)
    if writes_in_place(k, k_cache, v_cache, slot_mapping, bool(scales), stream):
        return tuple(written)
    with _on(stream):
        return fallback.write_kv(*arrays, **scales)


def copy_blocks(
    k_cache: mx.array, v_cache: mx.array, block_pairs: mx.array, *, stream: Stream | None = None
) -> tuple[mx.array, mx.array]:
    """Copy whole blocks within one layer's pool, in place: the copy of copy-on-write.

    Args:
        k_cache: ``[H_kv, N, S, D]``.
        v_cache: ``[H_kv, N, S, D_v]``.
        block_pairs: ``[P, 2]`` int32, (source, destination) physical blocks, copied in order. Pairs
            with an id outside ``[0, N)`` are skipped.
        stream: stream or device; default the current one.

    Returns:
        New handles of both caches, as from ``write_kv``.

    Raises:
        ValueError: as from ``write_kv``.
    """
    copied = _ext.copy_blocks(k_cache, v_cache, block_pairs, stream=stream)
    if copies_in_place(k_cache, v_cache, block_pairs, stream):
        return copied
    with _on(stream):
        return fallback.copy_blocks(k_cache, v_cache, block_pairs)


def install_in_mlx() -> None:
    """Make ``paged_attention`` available as ``mx.fast.paged_attention``."""
    setattr(mx.fast, "paged_attention", paged_attention)  # noqa: B010  unknown to the type stubs


def uninstall_from_mlx() -> None:
    """Undo ``install_in_mlx``, if it was called."""
    if getattr(mx.fast, "paged_attention", None) is paged_attention:
        delattr(mx.fast, "paged_attention")


def is_compiled(stream: Stream | None, indices: mx.array, *dims: int) -> bool:
    """Whether the stream computes an op with these indices by the compiled kernel. Plain MLX needs
    their values: if MLX transforms these too, only the compiled op is possible."""
    return (kernel_for if _ext.has_values(indices) else _kernel_on)(stream, *dims) == "native"


def _is_native(
    stream: Stream | None, k_cache: mx.array, v_cache: mx.array, indices: mx.array
) -> bool:
    """Whether the stream can evaluate the compiled op for these caches."""
    columns = v_cache.shape[-1]
    if v_cache.dtype == mx.uint8 and columns % 4 == 0:  # GPUs need whole vectors of pairs, too
        columns *= 2
    return is_compiled(stream, indices, k_cache.shape[-1], columns)


def _serves_varlen(
    stream: Stream | None, q: mx.array, k_cache: mx.array, v_cache: mx.array, indices: mx.array
) -> bool:
    """Whether the stream can evaluate the compiled op for sequences of different lengths."""
    if _device(stream) == mx.gpu:
        fits = k_cache.dtype in (q.dtype, mx.int8)
        if not fits or not serves_chunks(q.dtype, k_cache.shape[-1], dims_of(v_cache)):
            return False
    return _is_native(stream, k_cache, v_cache, indices)


def _on(stream: Stream | None) -> AbstractContextManager[object]:
    """A context in which `stream` is the current one."""
    return nullcontext() if stream is None else mx.stream(stream)

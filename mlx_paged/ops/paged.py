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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.arguments import MAX_INT32, integer
from mlx_paged.ops import dispatch, fallback
from mlx_paged.ops.dispatch import Stream
from mlx_paged.ops.layer_kv import LayerKV

Cache = mx.array | Sequence[mx.array]


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
    shared_prefixes: mx.array | None = None,
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
        shared_prefixes: ``[2, B]`` int32, which sequences begin with the same blocks. The first row
            is an order of the sequences. The second one says how many keys each sequence, in this
            order, has in the same blocks as the one before it; 0 for the first. The keys are read
            once for all of them (Juravsky et al. 2024, arXiv:2402.05099, section 3.2). The
            answer does not depend on it: bit by bit on a CPU, up to rounding on a GPU. A GPU uses
            it for one query token a sequence and tables of more than 512 tokens, in float16,
            bfloat16 and quantized pools, where two sequences' heads of a KV head are at most 32
            rows (16 if D or D_v is above 128). It ignores it with ``window``, ``attn_mask``,
            ``rope_freqs``, ``alibi_slopes``, ``kv_head_mapping`` or ``return_attn``, and in
            ``_varlen``.
            Wrong numbers give wrong answers.
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
    k, v, scales, options = _checked(name, q, layer_idx, scale, window, softcap, **caches)
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

    def call(prefixes: mx.array | None) -> mx.array | Any:  # validates, computes nothing
        return _ext.paged_attention(
            *arrays,
            **options,
            shared_prefixes=prefixes,
            check_tables=check_tables,
            stream=stream,
        )

    result = call(shared_prefixes)
    columns, tokens = block_tables.shape[1], q.shape[2]
    if shared_prefixes is not None and not dispatch.takes_attention(
        q, k, v, columns, tokens, stream, sequences=q.shape[0], **options
    ):
        result = call(None)
    if not dispatch.is_native(stream, k, v, block_tables) or not dispatch.takes_attention(
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
    shared_prefixes: mx.array | None = None,
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
    k, v, scales, options = _checked(name, q, layer_idx, scale, window, softcap, **caches)
    arrays = q, k, v, block_tables, context_lens
    options |= {**scales, "causal": causal, "sinks": sinks}
    num_decodes = integer(name, "num_decodes", num_decodes, 0, MAX_INT32)
    result: mx.array = _ext.paged_attention(  # validates, computes nothing
        *arrays,
        **options,
        cu_seqlens=cu_seqlens,
        num_decodes=num_decodes,
        shared_prefixes=shared_prefixes,
        check_tables=check_tables,
        stream=stream,
    )
    columns = block_tables.shape[1]
    if 0 not in block_tables.shape and not (
        dispatch.serves_varlen(stream, *arrays[:4])
        and dispatch.takes_attention(*arrays[:3], columns, 1, stream, **options)
        and dispatch.takes_attention(*arrays[:3], columns, None, stream, **options)
    ):
        with _on(stream):
            rows = fallback.single_tokens(*arrays, cu_seqlens, causal=causal, window=window)
            options |= {role: [array] for role, array in scales.items()}
            out = paged_attention(*rows, **options, check_tables=False)
            result = out.reshape(result.shape)
    return result


def attend(
    q: mx.array,
    kv: LayerKV,
    block_tables: mx.array,
    context_lens: mx.array,
    is_known: bool,
    cu_seqlens: mx.array | None = None,
    num_decodes: int = 0,
    **options: Any,
) -> mx.array:
    """``paged_attention`` over one layer, and with `cu_seqlens` ``paged_attention_varlen``. Values
    of tables and lengths are not checked.

    Args:
        kv: the arrays of the layer.
        is_known: whether the device has a kernel for the call: nothing is asked then.
            ``dispatch.attends`` and ``dispatch.takes_attention`` tell.
    """
    if cu_seqlens is not None:
        options |= {"cu_seqlens": cu_seqlens, "num_decodes": num_decodes}
    if is_known:
        if kv.k_scales is not None:
            options |= kv.options
        return _ext.paged_attention(q, kv.keys, kv.values, block_tables, context_lens, **options)
    op: Callable[..., mx.array] = paged_attention if cu_seqlens is None else paged_attention_varlen
    options |= {name: [array] for name, array in kv.options.items()}
    out: mx.array = op(
        q, [kv.keys], [kv.values], block_tables, context_lens, check_tables=False, **options
    )
    return out


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
    if dispatch.writes_in_place(k, k_cache, v_cache, slot_mapping, bool(scales), stream):
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
    if dispatch.copies_in_place(k_cache, v_cache, block_pairs, stream):
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


def _on(stream: Stream | None) -> AbstractContextManager[object]:
    """A context in which `stream` is the current one."""
    return nullcontext() if stream is None else mx.stream(stream)


def _checked(
    op: str,
    q: mx.array,
    layer_idx: int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    **caches: Cache | None,
) -> tuple[mx.array, mx.array, dict[str, mx.array], dict[str, Any]]:
    """One layer of the keys, of the values and of the scales that are given, without a copy, and
    the numbers."""
    layers = _layers(op, layer_idx, caches)
    numbers = _numbers(op, q, scale, window, softcap)
    return layers.pop("k_cache"), layers.pop("v_cache"), layers, numbers


def _numbers(
    op: str, q: mx.array, scale: float | None, window: int | None, softcap: float | None
) -> dict[str, Any]:
    if window is not None:
        window = integer(op, "window", window, 1, MAX_INT32)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, bool):
            raise ValueError(f"[{op}] {name} is {value}: expected a number")
    if scale is None:
        scale = max((1, *q.shape[-1:])) ** -0.5
    return {"scale": scale, "window": window, "softcap": softcap}


def _layers(op: str, layer_idx: int, caches: dict[str, Cache | None]) -> dict[str, mx.array]:
    given = {name: cache for name, cache in caches.items() if cache is not None}
    n_layers = len(given["k_cache"])
    for name, cache in given.items():
        if isinstance(cache, mx.array) and cache.ndim != 5:
            raise ValueError(
                f"[{op}] {name} has shape {cache.shape}: expected (n_layers, n_kv_heads,"
                " n_blocks, block_size, head_dim), or a list of arrays without the first axis"
            )
    for name, cache in given.items():
        if len(cache) != n_layers or (n_layers == 0 and name != "k_cache"):
            raise ValueError(
                f"[{op}] {name} has {len(cache)} layers and k_cache {n_layers}:"
                " expected the same number, at least 1"
            )
    layer = layer_idx
    if type(layer) is not int or not 0 <= layer < n_layers:
        layer = integer(op, "layer_idx", layer_idx, 0, n_layers - 1)
    return {name: _layer(cache, layer) for name, cache in given.items()}


def _layer(cache: Cache, layer: int) -> mx.array:
    if isinstance(cache, mx.array):
        return cache[layer : layer + 1].squeeze(0)  # cache[layer] is a gather: a copy
    return cache[layer]

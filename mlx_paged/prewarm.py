"""Compiling the GPU pipelines that an engine will use, before the first request waits for them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.allocation import BlockCopy
from mlx_paged.kv_pool import KVPool, KVShape, as_int32

NUM_BLOCKS = 2
CHUNK = 4
"""Tokens, causal, that fill a threadgroup's rows as longer chunks do."""

LONG_CONTEXT = 8192
"""Tokens of a context that is long enough to be split over threadgroups."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What distinguishes the attention pipelines of a model's layers."""

    shape: KVShape
    num_heads: int
    q_dtype: mx.Dtype
    window: int | None
    has_sinks: bool


def prewarm(kinds: Sequence[AttentionKind], block_size: int) -> float | None:
    """Dispatch every pipeline once: attention of single tokens and of chunks, each whole, split and
    merged; writes and copies.

    A pipeline is specialised at its first dispatch, which takes tenths of a second on a GPU.

    Returns:
        Seconds it took; None where nothing is compiled at run time, as on a CPU.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return None
    started = time.perf_counter()
    for kind in kinds:
        _dispatch(kind, block_size)
    return time.perf_counter() - started


def _dispatch(kind: AttentionKind, block_size: int) -> None:
    shape = kind.shape
    pool = KVPool([shape], NUM_BLOCKS, block_size)
    k, v = (mx.zeros((1, shape.n_kv_heads, dim), shape.dtype) for dim in shape.row_dims)
    pool.write(0, k, v, as_int32([0]))
    pool.copy_blocks([BlockCopy(0, 1)])
    sinks = mx.zeros((kind.num_heads,), kind.q_dtype) if kind.has_sinks else None
    for num_blocks, length in product((1, LONG_CONTEXT // block_size), (1, CHUNK)):
        out = ops.paged_attention(
            mx.zeros((1, kind.num_heads, length, shape.head_dim), kind.q_dtype),
            pool.k,
            pool.v,
            mx.zeros((1, num_blocks), mx.int32),
            as_int32([1]),
            window=kind.window,
            sinks=sinks,
        )
        mx.eval(out)
    mx.eval(pool.handles())

"""Compile the GPU pipelines of an engine before the first request needs them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_paged import ops
from mlx_paged.attention.causal import Causal
from mlx_paged.attention.paths import max_paged_queries
from mlx_paged.kv.block_bytes import read_blocks, write_blocks
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.layer_groups import PoolPlan
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.dispatch import LENGTHS, LONG_CONTEXT, MOST_TOGETHER, SEQUENCES, widths_of

NUM_BLOCKS = 2
SHARING = range(2, MOST_TOGETHER + 1)
"""Sequences that share keys. Larger numbers have the pipelines of the last one."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The properties of a layer that select its attention pipelines."""

    shape: KVShape
    num_heads: int
    q_dtype: mx.Dtype
    sees: Causal
    has_sinks: bool


def prewarm(
    kinds: Sequence[AttentionKind],
    block_size: int,
    plan: PoolPlan | None = None,
    transfers: bool = False,
    only_ragged: bool = False,
) -> float | None:
    """Dispatch every pipeline once: attention of single tokens, of chunks and of both together,
    with whole and with split contexts; of single tokens that share keys; writes and copies.

    A pipeline is compiled at its first dispatch, which takes tenths of a second on a GPU. Plain MLX
    computes what the compiler refuses. A progress bar is shown on stderr if that is a terminal.

    Args:
        block_size: tokens in a block, unless the plan has others for a layer's shape.
        only_ragged: every forward has a row for each token, so chunks come in ragged batches alone.
        transfers: whether blocks will come from elsewhere: to write them is a pipeline of its own.

    Returns:
        Seconds it took; None if the default device is a CPU, which compiles nothing at run time.
    """
    if mx.default_device() == mx.Device(mx.cpu):
        return None
    started = time.perf_counter()
    sizes = {} if plan is None else {array.shape: array.block_size for array in plan.arrays}
    for kind in tqdm(kinds, desc="GPU kernels", unit="layer kind", leave=False, disable=None):
        if ops.kernel_for(None, kind.shape.head_dim, kind.shape.v_head_dim) == "native":
            _dispatch(kind, sizes.get(kind.shape, block_size), transfers, only_ragged)
    return time.perf_counter() - started


def _dispatch(kind: AttentionKind, block_size: int, transfers: bool, only_ragged: bool) -> None:
    shape = kind.shape
    pool = KVPool([shape], NUM_BLOCKS, block_size)
    k, v = (mx.zeros((1, shape.n_kv_heads, dim), shape.dtype) for dim in shape.row_dims)
    pool.write(0, k, v, as_int32([0]))
    pool.copy_blocks([BlockCopy(0, 1)])
    if transfers:
        write_blocks(pool, np.zeros(1, np.int32), 0, read_blocks(pool, [0], 0))
    mx.eval(pool.handles())
    if not max_paged_queries():  # attention is MLX's own
        return
    sinks = mx.zeros((kind.num_heads,), kind.q_dtype) if kind.has_sinks else None
    # The keys that a long chunk sees behind a short window may be split, and so are those of the
    # decodes beside the chunk.
    variants: list[dict[str, Any]] = [
        {"scale": 1.0, **sees.options, "sinks": sinks} for sees in kind.sees.or_long(LONG_CONTEXT)
    ]
    kv = pool.layer(0)
    columns = widths_of(block_size)
    dispatched: set[str] = set()

    def dispatch(q: mx.array, **arrays: Any) -> None:
        for options in variants:
            planned = arrays | options | kv.options
            call = ops.metal.plan_attention(q, kv.keys, kv.values, **planned)
            pipelines = {launch["pipeline"] for launch in call["launches"]}
            if not pipelines <= dispatched:
                mx.eval(ops.attend(q, kv, is_known=False, **arrays, **options))
                dispatched.update(pipelines)

    in_chunks = ops.serves_chunks(kind.q_dtype, shape.head_dim, shape.v_head_dim)
    in_chunks &= kv.is_quantized or kind.q_dtype == shape.dtype
    lengths = (1, LENGTHS[-1])[: 1 + in_chunks] if only_ragged else LENGTHS
    for num_blocks, length, count in product(columns, lengths, SEQUENCES):
        q = mx.zeros((count, kind.num_heads, length, shape.head_dim), kind.q_dtype)
        tables = mx.zeros((count, num_blocks), mx.int32)
        arrays = {"block_tables": tables, "context_lens": mx.ones((count,), mx.int32)}
        if length == 1 or not only_ragged:
            dispatch(q, **arrays)
        if in_chunks and count == 1:
            arrays["cu_seqlens"] = as_int32([0, length])
            dispatch(q.transpose(2, 1, 0, 3), **arrays)
    for count, num_blocks in product(SHARING, columns[1:]):
        q = mx.zeros((count, kind.num_heads, 1, shape.head_dim), kind.q_dtype)
        arrays = {
            "block_tables": mx.zeros((count, num_blocks), mx.int32),
            "context_lens": mx.ones((count,), mx.int32),
            "shared_prefixes": mx.zeros((2, count), mx.int32),
        }
        dispatch(q, **arrays)

"""Whole blocks of a pool as bytes, whatever the arrays of the pool hold."""

from collections.abc import Sequence
from math import gcd

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.kv.pool import KVPool, as_int32

ROW_LENGTH = 1024  # elements at most of the rows in which blocks are written


def read_blocks(pool: KVPool, blocks: Sequence[int], group: int) -> mx.array:
    """A copy of these blocks in all arrays of a layer group, ``[n, bytes]`` uint8. It is under way
    when this returns, so that no later write changes it."""
    indices = as_int32(blocks)
    parts = [mx.zeros((len(blocks), 0), mx.uint8)]
    for handles, layer in pool.arrays_of(group):
        parts.append(ops.take_from_pool(_rows(handles[layer]), indices).view(mx.uint8))
    staged = mx.concatenate(parts, axis=1)
    mx.async_eval(staged)  # type: ignore[no-untyped-call]
    return staged


def write_blocks(
    pool: KVPool, blocks: Sequence[int], group: int, data: npt.NDArray[np.uint8]
) -> None:
    """Write what :func:`read_blocks` returned into these blocks, before whatever reads them."""
    indices, staged, start = as_int32(blocks), mx.array(data), 0
    for handles, layer in pool.arrays_of(group):
        stop = start + handles[layer][:, 0].nbytes
        part = staged[:, start:stop].view(handles[layer].dtype)
        written = _written(handles[layer], indices, part)
        if handles is pool.k:
            pool.set_keys(layer, written)
        else:
            handles[layer] = written
        start = stop
    mx.async_eval(pool.handles())  # type: ignore[no-untyped-call]


def _rows(cache: mx.array) -> mx.array:
    """``[num_blocks, elements of a block]``, a view of an array of the pool."""
    return cache.transpose(1, 0, 2, 3).reshape(cache.shape[1], -1)


def _written(cache: mx.array, indices: mx.array, data: mx.array) -> mx.array:
    """A handle of `cache` after `data` ``[n, elements of a block]`` was written: in place, by the
    op for rows of K/V, which writes each half of a row as one of its two arrays; else a new
    array."""
    heads, num_blocks, size, dim = cache.shape
    pairs = cache.dtype.size == 1 and data.shape[1] % 2 == 0
    dtype = mx.float16 if pairs else cache.dtype
    width = gcd(data.shape[1] >> pairs, ROW_LENGTH)
    if width > 1 and ops.kernel_for(None, width // 2, width // 2) == "native":
        cells = _rows(cache).view(dtype).reshape(num_blocks, -1, 1, width).transpose(1, 0, 2, 3)
        k, v = mx.split(data.view(dtype).reshape(len(indices), -1, width), 2, axis=-1)
        k_cells, v_cells = mx.split(cells, 2, axis=-1)
        written = ops.write_kv(k, v, k_cells, v_cells, indices)
        handle: mx.array = mx.depends([cache], list(written))[0]
        return handle
    changed = mx.array(_rows(cache))
    changed[indices] = data
    return changed.reshape(num_blocks, heads, size, dim).transpose(1, 0, 2, 3)
